"""`lcsb bench speed`: seconds per step of the engine and its peers, all in turn within one run.

Each arm is a process of its own and waits while another works, so whatever else the machine does meets all alike. A
round is one step of each arm whose cycle is one step, and one cycle of each other; the first round warms up and does
not count. Figures are medians over the rounds, of a step's mean over its cycle.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lcsb.bench.cases import DESCRIPTIONS, OURS, Case, verdict
from lcsb.bench.memory import WINDOWS, Report, Setup
from lcsb.bench.processes import BenchProcess, folder_of, windows_of
from lcsb.bench.products import PARTS
from lcsb.bench.store import Store

CLOCKS = ("cpu", "wall")
#: relative difference of the first step's losses up to which two arms compute the same model
SAME_LOSS = {"float32": 1e-5, "bfloat16": 2e-2}


def _round(process: BenchProcess) -> dict[str, Any]:
    """A cycle of steps: mean seconds of the step and of the layers alone."""
    steps = [process.ask({"do": "step"}) for _ in range(process.ready["cycle_length"])]
    return {
        "step": {clock: statistics.fmean(s["step"][clock] for s in steps) for clock in CLOCKS},
        "layers": {clock: statistics.fmean(s["layers"][clock] for s in steps) for clock in CLOCKS},
        "loss": steps[0]["loss"],
    }


def _medians(rounds: Sequence[dict[str, Any]], part: str) -> dict[str, float]:
    return {clock: statistics.median(r[part][clock] for r in rounds) for clock in CLOCKS}


def measure_case(
    case: Case, arms: Sequence[str], setup: Setup, rounds: int, report: Report
) -> dict[str, Any]:
    """All arms of one case, interleaved; with them the forward pass for evaluation and the matrix products alone."""
    folder = folder_of(case, setup.models)
    windows = windows_of(case, folder, setup.tokens, WINDOWS)
    with contextlib.ExitStack() as stack:
        processes = {}
        for arm in (*arms, "products"):
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            spec = setup.spec(case, arm, folder, windows, scratch)
            processes[arm] = stack.enter_context(BenchProcess(spec, setup.allocator_of(arm)))
        forward = next((arm for arm in arms if arm in OURS), None)
        steps: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        passes: list[dict[str, Any]] = []
        products: list[dict[str, Any]] = []
        first_losses: dict[str, float] = {}
        for turn in range(rounds + 1):
            report(turn / (rounds + 1), f"{case.name}: round {turn} of {rounds}")
            shift = turn % len(arms)
            for arm in (*arms[shift:], *arms[:shift]):
                found = _round(processes[arm])
                if turn:
                    steps[arm].append(found)
                else:
                    first_losses[arm] = found["loss"]
                # The products stand beside the forward pass, the two being compared.
                if arm == forward:
                    pair = (
                        processes[arm].ask({"do": "forward"}),
                        processes["products"].ask({"do": "measure", "repeats": 1}),
                    )
                    if turn:
                        passes.append(pair[0])
                        products.append(pair[1])
        peaks = {arm: processes[arm].ask({"do": "memory"})["peak_bytes"] for arm in arms}
        ready = {arm: processes[arm].ready for arm in arms}
    return {
        "rounds": steps,
        "forward": passes,
        "products": products,
        "first_losses": first_losses,
        "compute_dtype": setup.compute_dtype,
        "peak_bytes": peaks,
        "processes": ready,
    }


def judge(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Medians, ratios to QLoRA and verdicts of one case. Ratios that are judged are of CPU seconds."""
    rounds = found["rounds"]
    peer = rounds.get("qlora")
    arms = []
    for arm, rows in rounds.items():
        row: dict[str, Any] = {"name": arm, "what": DESCRIPTIONS[arm], "peak_bytes": found["peak_bytes"][arm]}
        for part, targets in (("step", case.step_ratios), ("layers", case.layer_ratios)):
            row[part] = _medians(rows, part)
            ratios: dict[str, float | None] = dict.fromkeys(CLOCKS)
            if peer is not None:
                base = _medians(peer, part)
                ratios = {clock: row[part][clock] / base[clock] for clock in CLOCKS}
            row[f"{part}_wall_ratio"] = ratios["wall"]
            row[f"{part}_ratio"] = verdict(ratios["cpu"], targets.get(arm))
        if arm in OURS:
            row["peak"] = verdict(row["peak_bytes"], case.memory_limit)
        arms.append(row)
    losses = found["first_losses"]
    reference = next(iter(losses.values()))
    apart = max(abs(loss - reference) / abs(reference) for loss in losses.values())
    return {
        "arms": arms,
        "forward": _forward_share(case, found) if found["forward"] else None,
        "first_losses_apart": verdict(apart, SAME_LOSS[found["compute_dtype"]]),
    }


def _forward_share(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the matrix products over those of the forward pass: the layers', the head's and both."""

    def middle(rows: Sequence[dict[str, Any]], *keys: str) -> float:
        return statistics.median(sum(row[key]["cpu"] for key in keys) for row in rows)

    whole, layers = (middle(found["forward"], key) for key in ("whole", "layers"))
    head = statistics.median(row["whole"]["cpu"] - row["layers"]["cpu"] for row in found["forward"])
    alone = {part: middle(found["products"], part) for part in PARTS}
    both = middle(found["products"], "layers_forward", "head_forward")
    return {
        "seconds": {"layers": layers, "head": head, "whole": whole},
        "products_seconds": alone,
        "layers_share": alone["layers_forward"] / layers,
        "head_share": alone["head_forward"] / head,
        "share": verdict(both / whole, case.forward_share, at_most=False),
    }


def measure_speed(
    cases: Sequence[Case],
    arms: Sequence[str],
    setup: Setup,
    rounds: int,
    out: Path,
    progress: Callable[[str], contextlib.AbstractContextManager[Report]],
) -> dict[str, Any]:
    """Measure every case that is not measured yet; returns the whole report, which is in `out` too."""
    store = Store(out, setup.threads)
    entries: dict[str, Any] = {}
    with progress("speed") as show:
        for done, case in enumerate(cases):
            ours = tuple(arm for arm in arms if case.real or arm in OURS)

            def report(share: float, words: str, done: int = done) -> None:
                show((done + share) / len(cases), words)

            settings = setup.settings(case, arms=list(ours), rounds=rounds)
            found = store.part(
                case.name, settings, functools.partial(measure_case, case, ours, setup, rounds, report)
            )
            entries[case.name] = {"weights": case.weights, **judge(case, found), "measured": found}
    return store.whole("speed", {**setup.described(), "rounds": rounds}, cases=entries)


def measure_profile(
    cases: Sequence[Case],
    mode: str,
    setup: Setup,
    repeats: int,
    out: Path,
    progress: Callable[[str], contextlib.AbstractContextManager[Report]],
) -> dict[str, Any]:
    """Where the time of a step of one mode goes, by row and phase: medians over `repeats` of a cycle's mean."""
    store = Store(out, setup.threads)
    entries: dict[str, Any] = {}
    with progress("profile") as show:
        for done, case in enumerate(cases):
            show(done / len(cases), case.name)
            settings = setup.settings(case, mode=mode, repeats=repeats)
            found = store.part(
                f"{case.name}.{mode}", settings, functools.partial(_profile_case, case, mode, setup, repeats)
            )
            entries[case.name] = {"mode": mode, **profile_table(found["repeats"]), "measured": found}
    return store.whole("profile", {**setup.described(), "mode": mode, "repeats": repeats}, cases=entries)


def _profile_case(case: Case, mode: str, setup: Setup, repeats: int) -> dict[str, Any]:
    folder = folder_of(case, setup.models)
    windows = windows_of(case, folder, setup.tokens, WINDOWS)
    with (
        tempfile.TemporaryDirectory() as scratch,
        BenchProcess(setup.spec(case, mode, folder, windows, scratch), {}) as process,
    ):
        process.ask({"do": "step"})
        return {"repeats": [process.ask({"do": "profile"}) for _ in range(repeats)]}


def profile_table(repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The table of medians, what measuring costs, and C4's share.

    `seconds` is the table's sum, `measured_seconds` the profiled step by a stopwatch around it, `plain_seconds` a step
    that is not profiled (all wall). `cost_of_measuring` is the ratio of CPU seconds of a profiled to a plain step.
    `dequantisation_of_backward`: its seconds over all seconds of the backward phase (head not in it).
    """
    from lcsb.bench.ledger import DEQUANTISATION, PHASES, ROWS

    def middle(*keys: str) -> float:
        found: list[Any] = list(repeats)
        for key in keys:
            found = [item[key] for item in found]
        return statistics.median(found)

    table = {row: {phase: middle("table", row, phase) for phase in PHASES} for row in ROWS}
    return {
        "table": table,
        "seconds": sum(sum(phases.values()) for phases in table.values()),
        "measured_seconds": middle("measured", "wall"),
        "plain_seconds": middle("plain", "wall"),
        "cost_of_measuring": middle("measured", "cpu") / middle("plain", "cpu"),
        "dequantisation_of_backward": table[DEQUANTISATION]["backward"]
        / sum(phases["backward"] for phases in table.values()),
        "product_operations": repeats[0]["product_operations"],
    }
