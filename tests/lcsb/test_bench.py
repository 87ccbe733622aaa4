"""`lcsb bench`: the figures come from processes of their own, add up, and are judged by targets that are data."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics

import pytest
import tiny_packed
import torch
from rich.console import Console
from typer.testing import CliRunner

from bcd_theory.geometry import GEOMETRIES, MIB, Geometry
from lcsb.bench import ledger
from lcsb.bench.cases import ARMS, CASES, Case, chosen, verdict
from lcsb.bench.channel import Stopwatch
from lcsb.bench.engine_process import EngineSession
from lcsb.bench.growth import BASE, measure_growth, points
from lcsb.bench.memory import Setup, measure_memory, row_of
from lcsb.bench.peers import lisa_draws
from lcsb.bench.processes import BenchProcess
from lcsb.bench.products import PARTS, Products, operations, shapes
from lcsb.bench.records import GrowthReport, MemoryReport, SpeedReport
from lcsb.bench.speed import judge, measure_speed, profile_table
from lcsb.bench.store import Store, verdicts
from lcsb.commands import bench
from lcsb.jobs import JobError
from lcsb.measure.memory import STATUS
from reports.strict import read_json

needs_proc = pytest.mark.skipif(not STATUS.exists(), reason="needs /proc")

SMALL = Geometry(4, 64, 192, 4, 2, 16, 512)


@contextlib.contextmanager
def silent(title):
    yield lambda share, words: None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A llama of random packed weights."""
    folder = tmp_path_factory.mktemp("small")
    tiny_packed.write_geometry(folder, SMALL)
    return folder


@pytest.fixture
def case(folder):
    return Case("small", real=False, memory_limit=10**9, shapes=SMALL, folder=folder)


def session(case, folder, tmp_path, mode="full", ram=None, tokens=24, rank=4):
    setup = Setup(tokens=tokens, rank=rank)
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(3, SMALL.vocabulary, (3, tokens), generator=generator).tolist()
    spec = setup.spec(case, mode, folder, windows, str(tmp_path))
    return EngineSession({**spec, "ram": ram})


# -- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_products_are_the_geometrys(name):
    """2 x tokens x weights operations, in the layers and in the head, forward and backward."""
    geometry, tokens = GEOMETRIES[name], 256
    found = operations(geometry, tokens)
    layers = 2 * tokens * geometry.layers * geometry.layer_weights
    head = 2 * tokens * geometry.vocabulary * geometry.hidden
    assert found == {
        "layers_forward": layers, "layers_backward": layers, "head_forward": head, "head_backward": head,
    }  # fmt: skip


def test_products_run_with_the_shapes_they_state():
    """What is timed is counted by torch's own flop counter."""
    from torch.utils.flop_counter import FlopCounterMode

    products = Products(SMALL, 24)
    for part in PARTS:
        with FlopCounterMode(display=False) as counter:
            products.run(part)
        assert counter.get_total_flops() == operations(SMALL, 24)[part], part


def test_backward_products_are_the_forward_ones_turned_round():
    found = shapes(SMALL, 8)
    turned = sorted((n, outputs, inputs) for n, inputs, outputs in found["layers_forward"])
    assert sorted(found["layers_backward"]) == turned


# -- the ledger ------------------------------------------------------------------------------------------------------


def test_a_ledger_counts_every_moment_once():
    """Nested spans: the inner one's time is not the outer one's; what lies outside of the step is not counted."""
    spans = [
        ledger.Span("aten::mul", 0, 5),  # before the step
        ledger.Span("lcsb step", 10, 100),
        ledger.Span("lcsb phase: forward", 20, 80),
        ledger.Span("lcsb row: matrix products", 30, 60),
        ledger.Span("aten::mm", 32, 58),  # in a named row: the row's
        ledger.Span("lcsb row: dequantisation", 40, 50),  # but a row in a row is its own
        ledger.Span("aten::matmul", 60, 70),
        ledger.Span("aten::mul", 62, 64),  # inside of another operation: that one's
        ledger.Span("autograd::engine::evaluate_function: MulBackward0", 70, 78),
        ledger.Span("aten::mul", 72, 77),
        ledger.Span("aten::add", 85, 90),
    ]
    found = {key: round(1e9 * seconds) for key, seconds in ledger.charge(spans).items()}
    assert found == {
        ("forward", ledger.PRODUCTS): 20, ("forward", ledger.DEQUANTISATION): 10, ("forward", ledger.LORA): 10,
        ("forward", ledger.ELEMENTWISE): 5, ("forward", ledger.REST): 15, ("optimiser", ledger.ELEMENTWISE): 5,
        ("optimiser", ledger.REST): 25,
    }  # fmt: skip
    assert sum(found.values()) == 90


def test_the_profile_counts_the_models_products_and_sums_to_the_step(case, folder, tmp_path):
    """Every product of the layers lands in its row (operations equal the geometry's), rows sum to the profiled step.

    Forward once; in backward once for the gradient and at most once more for what is computed again.
    """
    engine = session(case, folder, tmp_path).engine
    ids = torch.randint(3, SMALL.vocabulary, (1, 24), generator=torch.Generator().manual_seed(1))
    engine.step(ids)
    with ledger.profiled(engine):
        engine.step(ids)
    before = set(vars(engine))
    with ledger.profiled(engine) as book:
        watch = Stopwatch()
        engine.step(ids)
        whole = watch.read()["wall"]
    once = operations(SMALL, 24)["layers_forward"]
    assert book.operations["forward"] == once
    assert once <= book.operations["backward"] <= 2 * once
    table = book.table()
    assert sum(sum(phases.values()) for phases in table.values()) == pytest.approx(whole, rel=0.1)
    for row in (ledger.PRODUCTS, ledger.DEQUANTISATION, ledger.LORA, ledger.ATTENTION, ledger.ELEMENTWISE):
        assert table[row]["forward"] > 0, row
        assert table[row]["backward"] > 0, row
    assert table[ledger.HEAD]["head"] > 0
    assert table[ledger.OPTIMISER]["optimiser"] > 0
    assert set(vars(engine)) == before, "the engine is left as it was"


def test_the_profile_of_a_session_fits_the_table(case, folder, tmp_path):
    found = profile_table([session(case, folder, tmp_path).profile()])
    total = sum(sum(phases.values()) for phases in found["table"].values())
    assert found["seconds"] == pytest.approx(total)
    assert found["measured_seconds"] == pytest.approx(total, rel=0.1), "the rows are the whole step"
    assert found["plain_seconds"] > 0 and found["cost_of_measuring"] > 0
    assert 0 < found["dequantisation_of_backward"] < 1
    shown = rendered(bench._profile_tables({"cases": {"small": {"mode": "full", **found}}}))
    assert all(row.split(",")[0] in shown for row in ledger.ROWS)
    assert found["product_operations"]["forward"] == operations(SMALL, 24)["layers_forward"]


def test_the_layers_part_is_less_than_the_step(case, folder, tmp_path):
    """Embedding, head, loss and optimiser are outside; what is inside is most of the rest."""
    running = session(case, folder, tmp_path)
    running.step()
    found = running.step()
    assert 0 < found["layers"]["cpu"] < found["step"]["cpu"]
    assert not {"_embed", "_loss"} & vars(running.engine).keys(), "the engine is left as it was"


# -- targets ---------------------------------------------------------------------------------------------------------


def test_the_targets():
    """The figures that the models are held against."""
    assert CASES["smollm2-135m"].memory_limit == 650 * MIB
    assert CASES["gemma3-270m"].memory_limit == 900 * MIB
    assert {case.memory_limit for case in CASES.values() if not case.real} == {10**9}
    assert CASES["smollm2-135m"].step_ratios == {"full": 0.9, "exact": 0.75, "identity": 0.52}
    assert CASES["gemma3-270m"].step_ratios == {"full": 0.9, "exact": 0.85, "identity": 0.72}
    for name in ("smollm2-135m", "gemma3-270m"):
        assert CASES[name].layer_ratios == {"exact": 0.75, "identity": 0.50}
        assert CASES[name].forward_share == 0.70


@pytest.mark.parametrize(
    ("value", "limit", "at_most", "met"),
    [(1.0, 1.0, True, True), (1.1, 1.0, True, False), (0.69, 0.7, False, False), (0.7, 0.7, False, True),
     (5.0, None, True, None), (None, 1.0, True, False), (None, None, True, None)],
)  # fmt: skip
def test_verdicts(value, limit, at_most, met):
    """A missing figure misses its target; no target is no verdict."""
    assert verdict(value, limit, at_most)["met"] is met


def test_every_verdict_of_a_report_counts_and_is_named():
    content = {
        "cases": {
            "m": {"arms": [{"name": "full", "peak": verdict(2, 1)}, {"name": "mlp", "peak": verdict(1, 1)}]}
        }
    }
    assert verdicts(content) == [("cases.m.arms.full.peak", False), ("cases.m.arms.mlp.peak", True)]


def _found(seconds):
    part = {"cpu": seconds, "wall": 2 * seconds}
    return [{"step": part, "layers": part, "loss": 1.0}] * 3


def test_speed_is_judged_against_qlora():
    """exact at 0.76 of the peer misses 0.75; at 0.74 it does not; without the peer there is nothing to meet it by."""
    case = CASES["smollm2-135m"]
    measured = {
        "rounds": {"exact": _found(0.76), "identity": _found(0.50), "qlora": _found(1.0)},
        "forward": [], "products": [], "first_losses": {"exact": 1.0, "qlora": 1.0 + 2e-5}, "compute_dtype": "float32",
        "peak_bytes": {"exact": 1, "identity": 700 * MIB, "qlora": 10**10},
    }  # fmt: skip
    exact, identity, peer = judge(case, measured)["arms"]
    assert exact["step_ratio"] == {"value": 0.76, "limit": 0.75, "met": False}
    assert identity["step_ratio"]["met"] and identity["layers_ratio"]["met"]
    assert not identity["peak"]["met"], "700 MiB while it was timed"
    assert peer["step_ratio"]["met"] is None
    assert judge(case, measured)["first_losses_apart"]["met"] is False
    measured["rounds"]["exact"] = _found(0.74)
    assert judge(case, measured)["arms"][0]["step_ratio"]["met"]
    del measured["rounds"]["qlora"]
    assert judge(case, measured)["arms"][0]["step_ratio"] == {"value": None, "limit": 0.75, "met": False}


def test_a_peer_has_no_memory_target():
    found = {"peak_bytes": 10**10, "seconds": {"cpu": 2.0, "wall": 2.0}, "planned": None}
    products = {"seconds": {part: {"cpu": 0.25, "wall": 1.0} for part in PARTS}}
    case = CASES["smollm2-135m"]
    assert row_of(case, "qlora", found, False, None)["peak"]["met"] is None
    ours = row_of(case, "full", found, False, products)
    assert ours["peak"]["met"] is False
    assert ours["times_products"] == 2.0
    assert ours["prediction"]["met"] is None
    for predicted, met in ((0.95e10, True), (0.89e10, False), (1.11e10, False)):
        found["planned"] = {"peak": {"total": predicted}}
        assert row_of(case, "full", found, False, products)["prediction"]["met"] is met


def test_names_are_checked():
    assert chosen(["mlp", "full"], ARMS, "--arm") == ("full", "mlp")
    assert chosen(None, ARMS, "--arm") == ARMS
    with pytest.raises(ValueError, match=r"--case: found 'smolm2-135m', .* nearest: 'smollm2-135m'"):
        chosen(["smolm2-135m"], tuple(CASES), "--case")


def test_lisa_draws_anew_and_the_same_for_a_seed():
    draws = lisa_draws(30, 8)
    assert draws == lisa_draws(30, 8)
    assert len(set(draws)) > 1
    assert all(len(draw) == 2 and min(draw) >= 0 and max(draw) < 30 for draw in draws)


# -- resuming --------------------------------------------------------------------------------------------------------


def test_a_finished_part_is_not_measured_again(tmp_path, monkeypatch):
    """Same settings and sources: found; other settings, other sources: measured again."""
    calls = []

    def measure():
        calls.append(1)
        return {"value": len(calls)}

    out = tmp_path / "m.json"
    assert Store(out, 1).part("a", {"x": 1}, measure)["value"] == 1
    assert Store(out, 1).part("a", {"x": 1}, measure)["value"] == 1
    assert Store(out, 1).part("a", {"x": 2}, measure)["value"] == 2
    monkeypatch.setattr("lcsb.bench.store.sources_sha256", lambda: "other")
    assert Store(out, 1).part("a", {"x": 2}, measure)["value"] == 3
    found = read_json(tmp_path / "m" / "a.json")
    assert found["environment"]["sources_sha256"] == "other"
    assert {"commit", "dirty", "cpu_model", "threads", "versions"} <= found["environment"].keys()


def test_what_was_measured_before_an_interruption_stays(tmp_path):
    store = Store(tmp_path / "m.json", 1)
    store.part("a", {}, lambda: {"value": 1})
    with pytest.raises(KeyboardInterrupt):
        store.part("b", {}, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["a.json"]


def test_a_report_that_does_not_fit_its_schema_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"m\.json: field cases\.x"):
        Store(tmp_path / "m.json", 1).whole("memory", {}, cases={"x": {"weights": "real"}})
    assert not (tmp_path / "m.json").exists()


# -- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("missed", "gate", "code"), [(["x"], True, 1), (["x"], False, 0), ([], True, 0)])
def test_gate_fails_where_a_target_is_missed(monkeypatch, tmp_path, missed, gate, code):
    report = {"cases": {}, "targets": 1, "missed": missed, "met": not missed}
    asked = []
    monkeypatch.setattr("lcsb.bench.memory.measure_memory", lambda *given: asked.append(given) or report)
    arguments = [
        "memory",
        "--case",
        "qwen2.5-3b",
        "--case",
        "gemma3-1b",
        "--cold",
        "--out",
        str(tmp_path / "m.json"),
    ]
    found = CliRunner().invoke(bench.app, [*arguments, *(["--gate"] if gate else []), "--json"])
    assert found.exit_code == code, found.output
    assert json.loads(found.output.splitlines()[-1]) == report
    cases, arms, setup, out, _ = asked[0]
    assert [case.name for case in cases] == ["gemma3-1b", "qwen2.5-3b"]
    assert arms is None and setup.cold and setup.compute_dtype == "float32" and out == tmp_path / "m.json"


def rendered(tables):
    console = Console(width=160)
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    return captured.get()


# -- end to end ------------------------------------------------------------------------------------------------------


@needs_proc
def test_memory_of_random_weights(case, tmp_path, monkeypatch):
    """Two arms, each in a process of its own; a second call reads what the first left."""
    monkeypatch.setattr(
        "lcsb.bench.store.sources_sha256", lambda: "this"
    )  # also while somebody edits the sources
    out = tmp_path / "memory.json"
    setup = Setup(tokens=16, rank=4)
    report = measure_memory([case], ["full", "identity", "qlora"], setup, out, silent)
    assert report == read_json(out)
    MemoryReport.model_validate(report)
    full, identity = report["cases"]["small"]["arms"]  # the peer needs trained weights
    assert f"{full['peak_bytes'] / MIB:,.0f} (<= 954)" in rendered(bench._memory_tables(report))
    assert full["cycle_length"] == 1 and identity["cycle_length"] == 4
    for row in (full, identity):
        assert 50 * MIB < row["floor_bytes"] <= row["peak_bytes"] < 10**9
        assert 0 < row["anonymous_bytes"] < row["peak_bytes"]
    assert full["products_seconds"] > 0 and full["times_products"] > 1
    assert full["losses"][0] == identity["losses"][0], "the same weights, tokens and adapters"
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "memory").iterdir()}
    assert measure_memory([case], ["full", "identity"], setup, out, silent)["cases"] == report["cases"]
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "memory").iterdir()}


def test_a_sweep_changes_one_thing():
    for name, found in points().items():
        for value, geometry, tokens in found:
            changed = {"tokens": tokens, **dataclasses.asdict(geometry)}
            assert changed.pop(name) == value
            expected = {"tokens": 256, **dataclasses.asdict(BASE)}
            del expected[name]
            assert changed == expected


@needs_proc
def test_growth(tmp_path):
    """Each point is a model of its own, measured once where two sweeps share it; numbers and figure are written."""
    base = dataclasses.replace(SMALL, layers=2)
    sweeps = points(base, {"tokens": (16,), "layers": (2,)}, tokens=16)
    setup = Setup(rank=4, models=tmp_path / "models")
    report = measure_growth(setup, tmp_path / "growth.json", silent, sweeps)
    GrowthReport.model_validate(read_json(tmp_path / "growth.json"))
    assert [row["value"] for row in report["sweeps"]["tokens"]] == [16]
    assert report["sweeps"]["layers"][0]["peak_bytes"] == report["sweeps"]["tokens"][0]["peak_bytes"]
    assert len(list((tmp_path / "growth").glob("2x*.json"))) == 1
    assert "growth with layers" in rendered(bench._growth_tables(report))
    figure = (tmp_path / "growth.svg").read_text()
    assert figure.count("tokens in a row") == 2 and "words in the vocabulary" not in figure


@needs_proc
def test_speed_beside_the_peer(tmp_path):
    """QLoRA and the engine start from the same loss on the same packed weights, and take turns."""
    folder = tiny_packed.write(tmp_path, "llama", hidden_size=64, intermediate_size=128)
    config = json.loads((folder / "config.json").read_text())
    shape = Geometry(
        config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"], config["num_attention_heads"],
        config["num_key_value_heads"], config["head_dim"], config["vocab_size"],
    )  # fmt: skip
    case = Case("tiny", True, 10**9, {"full": 1e9}, {}, 0.0, shape, folder)
    out = tmp_path / "speed.json"
    report = measure_speed([case], ("full", "qlora"), Setup(tokens=16, rank=4), 1, out, silent)
    SpeedReport.model_validate(read_json(out))
    found = report["cases"]["tiny"]
    assert found["first_losses_apart"]["met"], found["first_losses_apart"]
    full, peer = found["arms"]
    assert peer["step_ratio"]["value"] == 1.0
    assert (
        full["step_ratio"]["met"] and full["step_ratio"]["value"] == full["step"]["cpu"] / peer["step"]["cpu"]
    )
    assert 0 < peer["layers"]["cpu"] < peer["step"]["cpu"]
    assert f"{found['forward']['layers_share']:.3f}" in rendered(bench._speed_tables(report))
    rounds = found["measured"]["rounds"]
    assert [len(rows) for rows in rounds.values()] == [1, 1]
    assert full["step"]["cpu"] == statistics.median(row["step"]["cpu"] for row in rounds["full"])
    assert found["forward"]["share"]["value"] > 0 and found["forward"]["share"]["met"]


@needs_proc
def test_a_process_that_fails_says_why(case, tmp_path):
    spec = Setup().spec(case, "full", tmp_path / "nowhere", [[1, 2]], str(tmp_path))
    with pytest.raises(
        JobError, match=r"process 'engine full' ended with 1: ValueError: .*nowhere.*not there"
    ) as error:
        BenchProcess(spec, {})
    assert error.value.bad_input
