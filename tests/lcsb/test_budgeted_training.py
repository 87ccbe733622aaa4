"""An arm by the memory engine: where the unbudgeted one goes, within the budget, and on after a SIGKILL."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import tiny_run
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import lcsb.engine.training as training
from lcsb.cli import app
from lcsb.engine.adapter_start import drawn_adapters
from lcsb.engine.architecture import Architecture
from lcsb.engine.engine import LoRASettings
from lcsb.engine.find_packed import packed_model
from lcsb.engine.layer import AdapterLayout
from lcsb.engine.mapped import MappedFolder
from lcsb.engine.planner import BudgetError
from lcsb.engine.tokens import PackedTokenizer, read_windows
from lcsb.engine.training import train_within
from lcsb.models import attach_lora, load_quantized
from lcsb.prepare import read_corpus
from lcsb.train import train_arm
from reports.records import RunConfig, RunFolder, read_metrics, write_config, write_json

CHILD = Path(__file__).parent / "budgeted_child.py"
GIGABYTE = 10**9


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder with a packed tiny model, as model/, and a text."""
    base = tmp_path_factory.mktemp("packed")
    tiny_run.write_model(base, intermediate_size=128)  # rows of whole quantisation blocks
    model, tokenizer = load_quantized(str(base / "model"), quantization="nf4", compute_dtype="float32")
    shutil.rmtree(base / "model")
    model.save_pretrained(base / "model")
    tokenizer.save_pretrained(base / "model")
    return base


def run_folder(root, packed, **changes):
    """A run folder with its predictions; measuring is not what is tested here."""
    folder = RunFolder(root)
    write_config(folder, tiny_run.settings(packed, **{"quantization": "nf4", **changes}))
    write_json(folder.measurements, {"held_out_loss": 4.6})
    write_json(folder.predictions, {"items": []})
    return folder


def child(folder, arm, point="none", *options, ram=GIGABYTE):
    command = [sys.executable, str(CHILD), point, str(folder.root), arm, str(ram), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def finished(folder, arm):
    """Rows without what differs from run to run, and the adapter."""
    place = folder.arm(arm, 0)
    rows = [json.loads(line) for line in place.metrics.read_text().splitlines()]
    rows = [row for row in rows if row.get("event") != "resumed"]
    for row in rows:
        for name in ("seconds", "peak_bytes", "plan"):
            row.pop(name, None)
    assert sorted(path.name for path in place.root.iterdir()) == ["adapter", "metrics.jsonl"]
    return rows, load_file(place.adapter / "adapter_model.safetensors")


def same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


ARMS = ("full", "exact-momentum", "exact-frozen", "identity-momentum", "mlp-momentum")


@pytest.mark.parametrize("arm", ARMS)
def test_the_losses_and_the_adapter_are_those_of_the_unbudgeted_run(packed, tmp_path, arm):
    settings = {"steps": 20, "eval_every": 10, "checkpoint_every": 7, "batch_size": 2, "accumulation": 2}
    ours, theirs = (run_folder(tmp_path / name, packed, **settings) for name in ("ours", "theirs"))
    assert train_within(ours, arm, 0, None).status == train_arm(theirs, arm, 0) == "done"
    mine, other = (read_metrics(folder.arm(arm, 0).metrics) for folder in (ours, theirs))
    assert len(mine.losses) == 20
    assert mine.losses == pytest.approx(other.losses, rel=1e-5)
    assert [step.selected for step in mine.steps] == [step.selected for step in other.steps]
    for step, reference in zip(mine.steps, other.steps, strict=True):
        assert step.displacement == pytest.approx(reference.displacement, rel=2e-2, abs=1e-7)
        assert step.grad_norm == pytest.approx(reference.grad_norm, rel=1e-3)
    assert [e.held_out_loss for e in mine.evals] == pytest.approx(
        [e.held_out_loss for e in other.evals], rel=1e-5
    )
    assert [e.tokens for e in mine.evals] == [e.tokens for e in other.evals]
    assert mine.movements[0].layer_rms == pytest.approx(other.movements[0].layer_rms, rel=1e-2)
    a, b = (load_file(f.arm(arm, 0).adapter / "adapter_model.safetensors") for f in (ours, theirs))
    assert a.keys() == b.keys()
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 2e-4


def test_adapters_start_where_peft_starts_them(packed):
    folder = MappedFolder(packed / "model")
    architecture = Architecture.from_config(folder.config, "config")
    lora = LoRASettings(r=3)
    layout = AdapterLayout(architecture, lora.r, lora.targets)
    model = attach_lora(tiny.llama(intermediate_size=128), r=3, seed=5)
    theirs = {n: p for n, p in model.named_parameters() if "lora_" in n}
    seen = 0
    for index, flat in enumerate(drawn_adapters(layout, architecture.layers, 5)):
        for name, view in layout.views(flat).items():
            projection, part = name.split(".")
            (found,) = [
                p
                for n, p in theirs.items()
                if f"layers.{index}." in n and f"{projection}.lora_{part.upper()}" in n
            ]
            assert torch.equal(view, found)
            seen += 1
    assert seen == len(theirs)


def test_windows_are_those_of_the_unbudgeted_run(packed, tmp_path):
    config = tiny_run.settings(packed)
    _, tokenizer = load_quantized(str(packed / "model"), quantization="nf4")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"block {i}", "completion": " descent limit" * (i + 1)}) + "\n"
            for i in range(9)
        )
    )
    for changes in ([], ["data.tokens=9"], [f"data.source={rows}"], ["data.source=pydoc", "data.rows=3"]):
        chosen = config.override(changes)
        ours, theirs = read_windows(chosen, packed / "model", tmp_path / "w"), read_corpus(chosen, tokenizer)
        for name in ("train", "held_out"):
            a, b = getattr(ours, name), getattr(theirs, name)
            parts = [(a, b)] if isinstance(b, torch.Tensor) else [
                (getattr(a, f), getattr(b, f)) for f in ("input_ids", "labels", "attention_mask")
            ]  # fmt: skip
            assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in parts)
        assert (ours.sha256, dict(ours.counts), ours.source) == (
            theirs.sha256,
            dict(theirs.counts),
            theirs.source,
        )


def test_windows_are_made_anew_for_another_text(packed, tmp_path):
    """A stale file must not be taken for this run's."""
    text = tmp_path / "text.txt"
    config = tiny_run.settings(packed).override([f"data.source={text}"])
    text.write_text("block descent layer " * 60)
    first = read_windows(config, packed / "model", tmp_path / "w")
    text.write_text("momentum residual adapter " * 60)
    assert not torch.equal(first.train, read_windows(config, packed / "model", tmp_path / "w").train)


def test_a_real_tokenizer_gives_the_same_tokens(demo_cache):
    from transformers import AutoTokenizer

    folder = packed_model("smollm2-135m")
    theirs, ours = AutoTokenizer.from_pretrained(folder), PackedTokenizer(folder)
    texts = ["A text.", " 12<eos> <|endoftext|> ünïcödé\n\n\tx"]
    want = theirs(texts, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    got = ours(texts, add_special_tokens=False, split_special_tokens=True)
    assert got["input_ids"] == want["input_ids"]
    assert got["offset_mapping"] == want["offset_mapping"]
    assert ours("a")["input_ids"] == theirs("a")["input_ids"]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)


@pytest.fixture(scope="module")
def straight(packed, tmp_path_factory):
    """The undisturbed run, all in memory."""
    folder = run_folder(tmp_path_factory.mktemp("straight"), packed, steps=8, eval_every=4)
    done = child(folder, "exact-momentum")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), finished(folder, "exact-momentum")


def test_torch_is_the_only_large_import_and_the_floor_is_small(straight):
    said, _ = straight
    assert said["status"] == "done"
    assert said["large"] == []
    assert said["peak"] < 300 << 20


def test_everything_in_files_gives_the_same_bits(straight, packed, tmp_path):
    folder = run_folder(tmp_path, packed, steps=8, eval_every=4)
    done = child(folder, "exact-momentum", "none", "--in-file")
    assert done.returncode == 0, done.stderr
    same(finished(folder, "exact-momentum"), straight[1])


@pytest.mark.parametrize(
    ("point", "options"),
    [
        ("tensor:15", ("--in-file",)),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(straight, packed, tmp_path, point, options):
    """U37: SIGKILL inside a checkpoint, with the states in a mapped file that later steps write to."""
    folder = run_folder(tmp_path, packed, steps=8, eval_every=4)
    assert child(folder, "exact-momentum", point, *options).returncode == -signal.SIGKILL
    done = child(folder, "exact-momentum", "none", *options)
    assert done.returncode == 0, done.stderr
    same(finished(folder, "exact-momentum"), straight[1])


def test_a_resumed_run_keeps_the_order_of_the_heads_sums(packed, tmp_path, monkeypatch):
    """A resume under another budget must not choose another chunk: its curve would be that of no undisturbed run."""
    folder = run_folder(tmp_path, packed, steps=8, eval_every=4)
    stopped = child(folder, "exact-momentum", "remove:1", "--small-chunk")
    assert stopped.returncode == -signal.SIGKILL
    assert folder.arm("exact-momentum", 0).checkpoints()
    seen = []
    real = training.make_engine
    monkeypatch.setattr(training, "make_engine", lambda *args: seen.append(args[3]) or real(*args))
    assert train_within(folder, "exact-momentum", 0, None).status == "done"
    assert [residency.chunk_logits for residency in seen] == [1 << 16]


def test_a_checkpoint_is_read_layer_by_layer():
    """A checkpoint larger than a layer must not come into memory whole: the budget holds for a resumed run too."""
    script = """
import sys, tempfile
from pathlib import Path
from types import SimpleNamespace
import torch
from lcsb.engine.ram import peak_bytes
from lcsb.engine.saving import load_state, save_state
from lcsb.engine.states import LayerStates
with tempfile.TemporaryDirectory() as name:
    states = LayerStates(40, 1 << 18, Path(name) / "one")
    states.x(39).fill_(3)
    save_state(Path(name) / "kept", SimpleNamespace(states=states, t=5), {})
    other = SimpleNamespace(states=LayerStates(40, 1 << 18, Path(name) / "two"), t=0)
    before = peak_bytes()
    load_state(Path(name) / "kept", other)
    assert other.t == 5 and bool((other.states.x(39) == 3).all())
    print(peak_bytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20 << 20  # of 120 MiB


@pytest.mark.slow
@pytest.mark.parametrize("place", ["layer", "idle", "tensor", "facts", "rename", "remove", "adapter"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_killed_at_many_instants(straight, packed, tmp_path, place, count):
    """U37"""
    folder = run_folder(tmp_path, packed, steps=8, eval_every=4)
    child(folder, "exact-momentum", f"{place}:{count}", "--in-file")
    done = child(folder, "exact-momentum", "none", "--in-file")
    assert done.returncode == 0, done.stderr
    same(finished(folder, "exact-momentum"), straight[1])


@pytest.mark.slow
def test_the_adapter_loads_with_peft_in_a_foreign_process(straight, packed, tmp_path):
    folder = run_folder(tmp_path / "run", packed, steps=2, eval_every=2)
    assert train_within(folder, "full", 0, None).status == "done"
    adapter = folder.arm("full", 0).adapter
    script = f"""
import sys, torch
from transformers import AutoModelForCausalLM
from peft import PeftModel
from safetensors.torch import load_file
model = AutoModelForCausalLM.from_pretrained({str(packed / "model")!r}, dtype=torch.float32)
model = PeftModel.from_pretrained(model, {str(adapter)!r})
saved = load_file({str(adapter / "adapter_model.safetensors")!r})
there = {{n.replace(".default", ""): p for n, p in model.named_parameters() if "lora_" in n}}
assert saved.keys() == there.keys() and all(torch.equal(saved[n], there[n]) for n in saved)
assert all(m.scaling["default"] == 2.0 for m in model.modules() if hasattr(m, "lora_A"))
assert not any(n == "lcsb" or n.startswith("lcsb.") for n in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("override", "arm", "said"),
    [
        (["lora.dropout=0.1"], "full", "lora.dropout is 0.1"),
        (["lora.use_rslora=true"], "full", "use_rslora"),
        (["quantization=int8"], "full", "quantization is 'int8'"),
        (["double_quant=true"], "full", "double_quant"),
        (["lora.target_modules=.*_proj"], "full", "'.*_proj'"),
        (["arms=[certified]"], "certified", "backward is 'certified'"),
        (["arms=[importance]"], "importance", "schedule is 'importance'"),
        (["arms=[mezo]"], "mezo", "method is 'mezo'"),
        (["arms=[freeze-lowest]"], "freeze-lowest", "method is 'freeze'"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused_before_anything_is_written(
    packed, tmp_path, override, arm, said
):
    folder = run_folder(tmp_path, packed)
    config = RunConfig.read(folder.config).override(override)
    folder.config.unlink()
    write_config(folder, config)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=said.replace("*", r"\*").replace(".", r"\.")) as error:
        train_within(folder, arm, 0, GIGABYTE)
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_several_processes_are_refused(packed, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes"):
        train_within(run_folder(tmp_path, packed), "full", 0, GIGABYTE)


def test_a_model_without_a_packed_form_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("LCSB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="lcsb convert smollm2-135m DIR"):
        packed_model("smollm2-135m")
    tiny_run.write_model(tmp_path)
    with pytest.raises(ValueError, match=r"lcsb convert .*model DIR"):
        packed_model(str(tmp_path / "model"))


def test_a_budget_that_cannot_be_met_ends_with_2_and_the_least(packed, tmp_path):
    folder = run_folder(tmp_path, packed)
    with pytest.raises(BudgetError, match="least budget that can"):
        train_within(folder, "full", 0, 1 << 20)
    assert not (folder.root / "arms").exists()
    command = [sys.executable, "-m", "lcsb.cli", "train", str(folder.root), "--arm", "full", "--ram", "1MB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "least budget" in done.stderr


def test_divergence_has_the_records_and_the_exit_code_of_the_unbudgeted_run(packed, tmp_path):
    folder = run_folder(tmp_path, packed, optimizer__learning_rate=1e30)
    result = CliRunner().invoke(app, ["train", str(folder.root), "--arm", "full", "--ram", "8GB"])
    assert result.exit_code == 3, result.output
    other = run_folder(tmp_path / "other", packed, optimizer__learning_rate=1e30)
    assert train_arm(other, "full", 0) == "diverged"
    mine, theirs = (read_metrics(f.arm("full", 0).metrics) for f in (folder, other))
    assert (mine.end.status, mine.end.diverged_at) == (theirs.end.status, theirs.end.diverged_at)
    assert [e.event for e in mine.events if e.event != "over-budget"] == [e.event for e in theirs.events]


def test_the_end_carries_peak_and_budget(packed, tmp_path):
    folder = run_folder(tmp_path, packed)
    result = CliRunner().invoke(app, ["train", str(folder.root), "--arm", "full", "--ram", "8GB"])
    assert result.exit_code == 0, result.output
    end = read_metrics(folder.arm("full", 0).metrics).end
    assert end.ram == 8 * 10**9
    assert 0 < end.peak_bytes < end.ram
    assert "predicted peak" in result.output
