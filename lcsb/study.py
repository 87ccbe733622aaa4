"""The full study as data: parts (a) to (f), each a set of ordinary run folders, resumable run by run.

    a  all arms at one setting          b  equal updates per block: p times the steps     c  tasks with answers
    d  the alternatives                 e  a second model                                 f  sweeps to divergence

Runs of one model, base, arithmetic and data share what the measure stage found (`measurements_like`): it does not
depend on the learning rate, the arms or the number of steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bcd_theory.cost import StepCosts
from bcd_theory.geometry import GEOMETRIES, Geometry
from bcd_theory.predictions import Measurements
from lcsb import stages
from lcsb.jobs import JobError
from lcsb.stages import Needs, Progress
from reports.records import RunConfig, RunFolder, read_json, read_record, write_json
from reports.study import Manifest, StudyRun, manifest_path

PARTS = {
    "a": "all arms at one setting", "b": "equal updates per block", "c": "tasks with answers",
    "d": "the alternatives", "e": "a second model", "f": "sweeps to divergence",
}  # fmt: skip

MAIN = ("full", "exact-momentum", "exact-frozen", "identity-momentum", "mlp-momentum")
REDUCED = ("full-eta-over-sqrt-p", "full-eta-over-p")
ALTERNATIVES = (
    "lisa", "freeze-lowest", "freeze-highest", "surgical-last", "importance", "cached", "stochastic-depth", "mezo",
)  # fmt: skip
SWEPT = ("full", *REDUCED, "exact-momentum", "exact-frozen", "identity-momentum", "mlp-momentum")
SWEPT_BF16 = ("full", "full-eta-over-sqrt-p", "identity-momentum")
RATES = tuple(3e-4 * 2**i for i in range(8))

#: whose shapes a model's costs are estimated by before anything is measured
SHAPES = {
    "smollm2-135m": "smollm2-135m", "gemma3-270m": "gemma3-270m", "Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2.5-1.5b", "Qwen/Qwen2.5-3B-Instruct": "qwen2.5-3b",
    "google/gemma-3-1b-it": "gemma3-1b",
}  # fmt: skip
LARGER = tuple(name for name in SHAPES if "/" in name)

#: mean tokens of a row by SmolLM2's tokenizer, cut at 256 (200 rows); a batch of one row is no longer than that
ROW_TOKENS = {"arc-challenge": 36, "gsm8k": 185}
BF16_SLOWER = 3.5  # on a CPU without bf16 instructions 2 to 5 times
_MEASURE_PASSES = 30  # full gradients that the measure stage takes, about


@dataclass(frozen=True)
class Planned:
    """One run folder of the study. donor: the run whose measurements it shares, or None if it takes its own."""

    part: str
    name: str
    config: RunConfig
    needs: Needs
    donor: str | None = None


@dataclass
class _Plan:
    size: str
    path: str | None
    runs: list[Planned] = field(default_factory=list)
    _donors: dict[str, str] = field(default_factory=dict)

    def add(
        self, part: str, name: str, arms: Sequence[str], evidence: Sequence[str] = (), **settings: Any
    ) -> None:
        """A run; dotted settings are written with two underscores."""
        base: dict[str, Any] = {"name": f"{part}-{name}", "arms": list(arms), "data": {"path": self.path}}
        for key, value in settings.items():
            place = base
            *outer, last = key.split("__")
            for word in outer:
                place = place.setdefault(word, {})
            place[last] = value
        config = RunConfig.from_mapping(base, f"study part {part}")
        group = _group(config)
        needs = Needs(frozenset(evidence))
        self.runs.append(Planned(part, config.name, config, needs, self._donors.get(group)))
        self._donors.setdefault(group, config.name)


def _group(config: RunConfig) -> str:
    """Runs of equal group measure the same things."""
    settings = config.to_mapping()
    for name in ("name", "seeds", "steps", "eval_every", "checkpoint_every", "workers", "recompute_arms",
                 "fidelity_batches", "timing_repeats", "arms"):  # fmt: skip
        del settings[name]
    settings["first_seed"] = config.seeds[0]
    del settings["optimizer"]["learning_rate"]
    return repr(settings)


def plan(size: str, parts: Sequence[str] = tuple(PARTS), path: str | None = None) -> list[Planned]:
    """All runs of these parts, in order. path: folder with the tasks' files (else LCSB_DATA, else the hub).

    Raises:
        ValueError: an unknown size or part.
    """
    sizes = {"quick": _quick, "standard": _standard, "full": _full}
    if size not in sizes:
        raise ValueError(f"size is {size!r}, expected one of {', '.join(sizes)}")
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"--part: found {part!r}, expected some of {', '.join(PARTS)}")
    whole = _Plan(size, path)
    sizes[size](whole)
    # A part alone must not lean on measurements of a part that is not run.
    chosen = [run for run in whole.runs if run.part in parts]
    names = {run.name for run in chosen}
    donors: dict[str, str] = {}
    found = []
    for run in chosen:
        group = _group(run.config)
        donor = run.donor if run.donor in names else donors.get(group)
        found.append(dataclasses.replace(run, donor=donor))
        donors.setdefault(group, run.name)
    return found


def _standard(plan: _Plan) -> None:
    text: dict[str, Any] = {"data__source": "wikitext-2", "checkpoint_every": 100, "eval_windows": 16}
    arms = (*MAIN, "mlp-frozen", *REDUCED)
    plan.add("a", "smollm2-wikitext2", arms, ("fidelity", "timing", "memory", "probes"),
             steps=200, eval_every=100, **text)  # fmt: skip
    plan.add("b", "smollm2-wikitext2-updates", MAIN[1:], steps=800, eval_every=100, **text)
    for task in ("arc-challenge", "gsm8k"):
        plan.add("c", f"smollm2-{task}", MAIN, steps=150, eval_every=50, checkpoint_every=50, eval_windows=16,
                 data__source=task, data__tokens=256)  # fmt: skip
    plan.add("d", "smollm2-alternatives", ALTERNATIVES, steps=200, eval_every=100, **text)
    plan.add("e", "gemma3-wikitext2", MAIN, ("fidelity", "timing"), model="gemma3-270m", steps=100, eval_every=50,
             **text)  # fmt: skip
    _sweeps(plan, [0, 1, 2], 60, 40)


def _sweeps(plan: _Plan, seeds: list[int], steps: int, steps_bf16: int) -> None:
    common: dict[str, Any] = {"data__source": "wikitext-2", "eval_windows": 4, "seeds": seeds}
    for base in ("nf4", None):
        for rate in RATES:
            plan.add("f", f"{base or 'fp32'}-{rate:.1e}", SWEPT, steps=steps, eval_every=steps, checkpoint_every=steps,
                     quantization=base, optimizer__learning_rate=rate, **common)  # fmt: skip
    for rate in RATES[2:6]:
        plan.add("f", f"nf4-bf16-{rate:.1e}", SWEPT_BF16, steps=steps_bf16, eval_every=steps_bf16,
                 checkpoint_every=steps_bf16, compute_dtype="bfloat16", optimizer__learning_rate=rate,
                 **common)  # fmt: skip


def _full(plan: _Plan) -> None:
    """What a larger machine would run: the paper's number of steps, five seeds, four of its models."""
    seeds = [0, 1, 2, 3, 4]
    text: dict[str, Any] = {
        "data__source": "wikitext-2",
        "checkpoint_every": 200,
        "eval_windows": 64,
        "seeds": seeds,
    }
    long: dict[str, Any] = {"steps": 1000, "eval_every": 100, **text}
    arms = (*MAIN, "mlp-frozen", *REDUCED)
    plan.add("a", "smollm2-wikitext2", arms, ("fidelity", "timing", "memory", "probes"), **long)
    plan.add("b", "smollm2-wikitext2-updates", MAIN[1:], **{**long, "steps": 4000})
    for model in ("smollm2-135m", *LARGER):
        short = model.rpartition("/")[2].lower()
        for task in ("arc-challenge", "gsm8k"):
            plan.add(
                "c",
                f"{short}-{task}",
                MAIN,
                model=model,
                **{**long, "data__source": task, "data__tokens": 256},
            )
    plan.add("d", "smollm2-alternatives", ALTERNATIVES, **long)
    for model in ("gemma3-270m", *LARGER):
        short = model.rpartition("/")[2].lower()
        plan.add("e", f"{short}-wikitext2", MAIN, ("fidelity", "timing"), model=model, **long)
    _sweeps(plan, seeds, 200, 200)


def _quick(plan: _Plan) -> None:
    """Every part on SmolLM2 for a few steps and one seed: enough to see that all of it runs, never for a verdict."""
    tiny: dict[str, Any] = {
        "seeds": [0], "steps": 4, "eval_every": 4, "checkpoint_every": 4, "eval_windows": 2, "fidelity_batches": 1,
        "timing_repeats": 1, "timing_cycle_lengths": [1, 4], "data__tokens": 32,
    }  # fmt: skip
    three = ("full", "exact-momentum", "identity-momentum")
    plan.add("a", "smollm2-pydoc", three, ("fidelity", "timing"), **tiny)
    plan.add("b", "smollm2-pydoc-updates", three[1:], **{**tiny, "steps": 16})
    plan.add("c", "smollm2-arc-challenge", ("full", "identity-momentum"), data__source="arc-challenge", data__rows=40,
             **{**tiny, "data__tokens": 128})  # fmt: skip
    plan.add("d", "smollm2-alternatives", ("lisa", "freeze-lowest"), **tiny)
    for rate in (3e-4, 3e-3, 3e-2, 3e-1):
        plan.add("f", f"nf4-{rate:.1e}", ("full", "full-eta-over-sqrt-p", "identity-momentum"),
                 optimizer__learning_rate=rate, **tiny)  # fmt: skip


# -- cost ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Expected core-seconds of one run. source: 'measured here', 'estimated', or 'unknown' (then seconds is None)."""

    run: Planned
    seconds: float | None
    source: str
    finished: bool = False


def cost_of(root: Path, run: Planned) -> Cost:
    """From this study's own measurements where there are any, else from the published run's, scaled (T12)."""
    folder = RunFolder(root / "runs" / run.name)
    if _finished(folder, run):
        return Cost(run, 0.0, "finished", True)
    for name in (run.name, run.donor):
        there = RunFolder(root / "runs" / name).measurements if name else None
        if there is not None and there.exists():
            seconds = stages.expected_core_seconds(run.config, read_record(there, Measurements), run.needs)
            return Cost(run, seconds, "measured here")
    estimated = estimate(run.config)
    if estimated is None:
        return Cost(run, None, "unknown")
    seconds = stages.expected_core_seconds(run.config, estimated, run.needs)
    if run.donor is None:
        costs = estimated.costs
        one = costs.forward + costs.head + costs.total("recompute") + costs.total("input_gradient")
        seconds += _MEASURE_PASSES * one
    return Cost(run, seconds, "estimated")


def _finished(folder: RunFolder, run: Planned) -> bool:
    if any(not folder.evidence(kind).exists() for kind in run.needs.evidence):
        return False
    return all(
        stages.arm_status(folder, arm.name, seed) is not None
        for arm in run.config.arms
        for seed in run.config.seeds
    )


def reference() -> tuple[Measurements, Geometry, int] | None:
    """The published run's measurements, shapes and tokens; None where this installation has none."""
    import reports

    folder = RunFolder(Path(reports.__file__).parent / "published" / "first")
    if not folder.measurements.exists():
        return None
    measured = read_record(folder.measurements, Measurements)
    return measured, GEOMETRIES[measured.model], RunConfig.read(folder.config).data.tokens


def estimate(config: RunConfig) -> Measurements | None:
    """Costs in proportion to the multiplications: tokens times weights, for the layers and for the head (T12)."""
    known = reference()
    if known is None or config.model not in SHAPES:
        return None
    measured, there, tokens = known
    here = GEOMETRIES[SHAPES[config.model]]
    slower = BF16_SLOWER if config.compute_dtype == "bfloat16" else 1.0
    row = config.data.tokens
    if config.batch_size == 1:  # rows of a task are shorter than the window as a rule
        row = min(row, ROW_TOKENS.get(config.data.source, row))
    more = slower * row * config.batch_size * config.accumulation / tokens
    layers = more * here.layers * here.layer_weights / (there.layers * there.layer_weights)
    head = more * here.hidden * here.vocabulary / (there.hidden * there.vocabulary)
    adapters = here.lora_parameters(config.lora.r) / there.lora_parameters(16)
    scales = {"head": head, "optimizer": adapters}
    costs = StepCosts(
        layers=here.layers,
        **{
            name: measured.costs.total(name) * scales.get(name, layers)
            if name not in ("forward", "head", "optimizer")
            else getattr(measured.costs, name) * scales.get(name, layers)
            for name in (f.name for f in dataclasses.fields(StepCosts) if f.name != "layers")
        },
    )
    return dataclasses.replace(measured, model=config.model, layers=here.layers, costs=costs)


# -- run -------------------------------------------------------------------------------------------------------------


def write_manifest(root: Path, size: str, runs: Sequence[Planned]) -> None:
    """study.json: the runs asked for so far. Raises ValueError when the folder holds a study of another size."""
    path = manifest_path(root)
    listed = [StudyRun(part=run.part, name=run.name) for run in runs]
    if path.exists():
        there = read_record(path, Manifest)
        if there.size != size:
            raise ValueError(f"{path}: a study of size {there.size}, asked for {size}; choose another folder")
        listed = list(dict.fromkeys([*there.runs, *listed]))
        if listed == list(there.runs):
            return
    order = {name: i for i, name in enumerate(PARTS)}
    listed.sort(key=lambda run: order[run.part])
    write_json(path, Manifest(size=size, runs=tuple(listed)))  # type: ignore[arg-type]


def measurements_like(folder: RunFolder, donor: RunFolder, config: RunConfig) -> None:
    """Take over what another run measured: everything but the learning rate, which is an input and no measurement."""
    measured = read_record(donor.measurements, Measurements)
    environment = {**read_json(donor.environment), "measured_in": donor.root.name}
    write_json(folder.environment, environment)
    rate = config.optimizer.learning_rate
    write_json(folder.measurements, dataclasses.replace(measured, learning_rate=rate))


def run_study(
    root: Path,
    size: str,
    runs: Sequence[Planned],
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Run what is not finished, one run folder after the other; returns one line for each run that failed.

    Raises:
        ValueError: the folder holds a study of another size.
    """
    write_manifest(root, size, runs)
    failed = []
    for number, run in enumerate(runs, start=1):
        folder = RunFolder(root / "runs" / run.name)
        if _finished(folder, run) and folder.config.exists():
            say(f"{number} of {len(runs)}: {run.name}: finished")
            continue
        say(f"{number} of {len(runs)}: {run.name}")
        try:
            folder = stages.open_run(folder.root, run.config)
            donor = RunFolder(root / "runs" / run.donor) if run.donor else None
            if donor is not None and donor.measurements.exists() and not folder.measurements.exists():
                measurements_like(folder, donor, run.config)
            stages.measure(folder, progress)
            stages.predict(folder)
            stages.run(folder, progress, run.needs)
        except (ValueError, JobError) as error:
            # One run that cannot be had (no data, no such model) must not cost the others.
            failed.append(f"{run.name}: {error}")
            say(failed[-1])
    return failed
