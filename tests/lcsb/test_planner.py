"""The planner of the memory engine: what it keeps, what it refuses, and that a process stays inside its promise."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys

import pytest
import torch

from bcd_theory.geometry import GEOMETRIES, Geometry
from bcd_theory.streaming import Resident
from lcsb import LCSBConfig
from lcsb.cli import main
from lcsb.engine.architecture import Architecture
from lcsb.engine.engine import Engine, LoRASettings
from lcsb.engine.fit import measure
from lcsb.engine.inputs import LayerInputs
from lcsb.engine.planner import BudgetError, constants, counted_bytes, embedding_bytes, plan, streamed_step
from lcsb.engine.pull import gradient_below
from lcsb.engine.ram import read_status
from lcsb.engine.random_weights import config_of, write_random
from lcsb.engine.rates import Rates

TINY = Geometry(4, 64, 128, 4, 2, 16, 512)
FULL = LCSBConfig("full")
RATES = Rates(3e10, 1e9, 5e8, 2e9, 1e9)


def architecture(name):
    return Architecture.from_config(config_of(name), name)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("tiny") / "model", TINY)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_least_budget_is_named_and_then_accepted(name, tmp_path):
    with pytest.raises(BudgetError, match="the least budget that can is") as refused:
        plan(architecture(name), tokens=256, config=FULL, ram=10**8, scratch=tmp_path)
    least = refused.value.least_bytes
    assert str(least) in str(refused.value) and "\n" not in str(refused.value)
    found = plan(architecture(name), tokens=256, config=FULL, ram=least, scratch=tmp_path)
    assert found.peak.total + found.margin_bytes <= least == found.least_bytes
    with pytest.raises(BudgetError):
        plan(architecture(name), tokens=256, config=FULL, ram=least - 1, scratch=tmp_path)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "gemma3-1b", "gemma3-4b"])
def test_a_gigabyte_holds_every_geometry(name, tmp_path):
    found = plan(architecture(name), tokens=256, config=FULL, ram=10**9, scratch=tmp_path)
    assert found.peak.total + found.margin_bytes <= 10**9


def test_more_memory_is_never_slower_and_more_tokens_never_smaller(tmp_path):
    seconds, peaks = [], []
    for ram in range(400 << 20, 3000 << 20, 200 << 20):
        found = plan(
            architecture("qwen2.5-0.5b"), tokens=256, config=FULL, ram=ram, scratch=tmp_path, rates=RATES
        )
        assert found.peak.total + found.margin_bytes <= ram
        assert (
            found.peak.total
            == sum(found.peak.parts.values())
            >= max(sum(parts.values()) for parts in found.phases.values())
        )
        seconds.append(sum(found.seconds.values()))
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < 0.9 * seconds[0]
    for tokens in (64, 256, 1024):
        peaks.append(
            plan(architecture("qwen2.5-0.5b"), tokens=tokens, config=FULL, scratch=tmp_path).least_bytes
        )
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]


def test_the_head_is_summed_in_other_chunks_only_where_nothing_else_fits(tmp_path):
    """Other chunks are other roundings of the loss."""
    least = plan(architecture("smollm2-135m"), tokens=256, config=FULL, scratch=tmp_path).least_bytes
    chunks = [
        plan(
            architecture("smollm2-135m"), tokens=256, config=FULL, ram=ram, scratch=tmp_path
        ).residency.chunk_logits
        for ram in (least, 400 << 20, 500 << 20, 700 << 20)
    ]
    assert chunks[0] < chunks[1] == chunks[2] == chunks[3] == 1 << 22


@pytest.mark.parametrize(
    ("name", "tokens", "tame"),
    [
        ("smollm2-135m", 256, False),
        ("smollm2-135m", 512, True),
        ("gemma3-270m", 256, False),
        ("qwen2.5-3b", 256, True),
    ],
)
def test_the_allocator_is_tamed_where_tensors_are_large(name, tokens, tame):
    assert plan(architecture(name), tokens=tokens, config=FULL).tame is tame


def test_without_a_limit_everything_stays_and_nothing_is_timed_that_was_not_measured(tmp_path):
    found = plan(architecture("smollm2-135m"), tokens=256, config=FULL, scratch=tmp_path)
    kept = found.residency
    assert (kept.weights, kept.head, kept.states, kept.inputs, kept.products) == (
        True,
        True,
        True,
        "memory",
        30,
    )
    assert found.seconds is None and found.budget is None
    json.dumps(found.as_dict(), allow_nan=False)


def test_without_a_folder_nothing_goes_to_a_file_and_inputs_are_rounded_only_where_they_must_be():
    large = plan(architecture("smollm2-135m"), tokens=2048, config=FULL, ram=2 * 10**9).residency
    assert large.inputs == "memory" and large.states
    least = plan(architecture("smollm2-135m"), tokens=2048, config=FULL).least_bytes
    tight = plan(architecture("smollm2-135m"), tokens=2048, config=FULL, ram=least).residency
    assert tight.inputs == "bfloat16" and tight.states and not tight.weights


def test_states_stay_in_memory_where_an_optimiser_has_them(tmp_path):
    found = plan(architecture("qwen2.5-3b"), tokens=256, config=FULL, scratch=tmp_path, states_in_file=False)
    least = plan(
        architecture("qwen2.5-3b"), tokens=256, config=FULL, ram=found.least_bytes, scratch=tmp_path,
        states_in_file=False,
    )  # fmt: skip
    assert least.residency.states and not least.residency.weights


def test_the_floor_that_is_given_counts(tmp_path):
    small = plan(architecture("smollm2-135m"), tokens=64, config=FULL, scratch=tmp_path, floor=0)
    large = plan(architecture("smollm2-135m"), tokens=64, config=FULL, scratch=tmp_path, floor=10**9)
    assert large.peak.total - small.peak.total == 10**9


def test_type_of_the_embedding_from_the_size_of_the_folder():
    packed, words = TINY.packed_bytes(), TINY.embedding_weights
    assert embedding_bytes(TINY, None) == embedding_bytes(TINY, packed + 2 * words + 9000) == 2
    assert embedding_bytes(TINY, packed + 4 * words + 9000) == 4


def test_every_budget_gives_the_same_losses_bit_for_bit(tiny_folder, tmp_path):
    """Only residency differs: the vocabulary fits into one chunk of every size."""
    config = LCSBConfig("exact", layers_per_step=2)
    arch = Architecture.from_config(json.loads((tiny_folder / "config.json").read_text()))
    lora = LoRASettings(r=4)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(3, 512, (2, 24), generator=generator) for _ in range(4)]
    settings = {"tokens": 24, "rows": 2, "config": config, "lora": lora, "floor": 0}
    whole = plan(arch, **settings, scratch=tmp_path)
    curves = {}
    for number in range(9):
        share = number / 8
        most = whole.peak.total + whole.margin_bytes
        ram = round(whole.least_bytes + share * (most - whole.least_bytes))
        residency = plan(arch, **settings, ram=ram, scratch=tmp_path / str(number)).residency
        engine = Engine(tiny_folder, config, lora=lora, residency=residency, compute_dtype="float32")
        losses = []
        for ids in batches:
            engine.step(ids)
            losses.append(engine.loss)
        curves[dataclasses.replace(residency, folder=None)] = losses
    assert len(curves) >= 4
    assert len({tuple(losses) for losses in curves.values()}) == 1


def test_a_fresh_process_stays_inside_its_plan(tiny_folder):
    case = {"folder": str(tiny_folder), "mode": "full", "tokens": 64}
    case["residency"] = {"weights": False, "head": False, "states": False, "inputs": "file"}
    measured = measure(case)
    step = streamed_step(
        Architecture.from_config(json.loads((tiny_folder / "config.json").read_text())), 64, config=FULL
    )
    predicted = counted_bytes(step, Resident(**case["residency"])).total
    assert measured["peak_bytes"] <= predicted * (1 + constants().margin)
    assert measured["peak_bytes"] > 0.8 * predicted


def test_a_step_loads_nothing_that_it_does_not_need(tiny_folder):
    """torch's gradients of tensors import sympy (35 MB); ours must not."""
    code = (
        "import sys, torch\nfrom pathlib import Path\nfrom lcsb.engine.engine import Engine\n"
        f"Engine(Path({str(tiny_folder)!r})).step(torch.arange(3, 40)[None])\n"
        "print([name for name in ('sympy', 'scipy', 'transformers', 'bitsandbytes', 'peft') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_gradient_below_is_torchs_own():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, generator=generator, requires_grad=True)
    above = torch.randn(5, 3, generator=generator)
    assert torch.equal(gradient_below(x.sin() * x, x, above), torch.autograd.grad(x.sin() * x, x, above)[0])
    with pytest.raises(ValueError, match=r"gradient of shape \(3,\) for an output of \(5, 3\)"):
        gradient_below(x.sin(), x, above[0])


def test_pages_of_a_layer_input_are_given_back_once_it_is_taken(tmp_path):
    inputs = LayerInputs("file", 40, 1 << 19, tmp_path)

    def pages():
        return read_status("RssFile") + read_status("RssShmem")

    for layer in range(40):
        inputs.put(layer, torch.full((1 << 19,), float(layer)))
    before = pages()
    for layer in range(40):
        assert float(inputs.take(layer)[7]) == layer
    assert pages() - before < 8 << 20  # of 80 MiB


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `lcsb plan` with arguments in this process; gives (exit code, output, errors)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lcsb", "plan", *arguments])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


def test_command(command, tiny_folder):
    code, out, _ = command("--model", "qwen2.5-3b", "--ram", "1GB", "--no-measure", "--json")
    found = json.loads(out.strip().splitlines()[-1])
    assert code == 0 and found["budget"] == 10**9 and found["seconds"] is None
    assert found["peak"]["total"] == sum(found["peak"]["parts"].values()) <= 10**9
    code, out, _ = command("--model", str(tiny_folder), "--ram", "1GiB", "--tokens", "64")
    assert code == 0
    assert "products kept for backward" in out and "dequantisation" in out and "total" in out
    assert re.search(r"products in bfloat16 take \d+\.\d\d of float32's time here", out)


def test_a_trainer_needs_more(command):
    least = []
    for arguments in ([], ["--trainer"]):
        _, out, _ = command("--model", "smollm2-135m", "--ram", "2GB", "--no-measure", "--json", *arguments)
        least.append(json.loads(out)["least_bytes"])
    assert least[1] - least[0] > 10**8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "qwen2.5-3b", "--ram", "300MB"], "the least budget that can is"),
        (["--model", "qwen2.5-3", "--ram", "1GB"], "nearest is 'qwen2.5-3b'"),
        (["--model", "qwen2.5-3b", "--ram", "much"], "expected an amount such as 1GB"),
    ],
)
def test_command_refuses_in_one_line(command, arguments, words):
    code, out, error = command(*arguments)
    assert code == 2 and not out
    assert words in error and len(error.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ram", [340 << 20, 650 << 20])
def test_smollm2_stays_inside_two_budgets(ram, tmp_path):
    from lcsb.engine.mapped import MappedFolder
    from lcsb.models import packed_builtin

    place = packed_builtin("smollm2-135m")
    folder = MappedFolder(place)
    found = plan(
        Architecture.from_config(folder.config), tokens=256, config=FULL, ram=ram, scratch=tmp_path,
        folder_bytes=sum(folder.nbytes(name) for name in folder.names()),
    )  # fmt: skip
    kept = found.residency
    residency = {
        "weights": kept.weights, "head": kept.head, "states": kept.states, "inputs": kept.inputs,
        "products": kept.products, "chunk": kept.chunk_logits,
    }  # fmt: skip
    measured = measure({"folder": str(place), "mode": "full", "tokens": 256, "residency": residency})
    assert measured["peak_bytes"] <= ram
    assert measured["peak_bytes"] == pytest.approx(found.peak.total, rel=0.1)
