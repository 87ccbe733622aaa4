"""The stages of a run that need torch: measure and run. (predict is pure theory; judge and render live in `reports`.)

Each stage reads the files of the stage before it and nothing else, and does nothing if its own are there already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcd_theory.cost import step_seconds
from bcd_theory.predictions import Measurements, Predictions
from bcd_theory.predictions import predict as predictions_of
from lcsb.jobs import Job, Reporter, run_jobs
from reports.records import (
    ArmConfig,
    RunConfig,
    RunFolder,
    environment,
    read_json,
    read_metrics,
    read_record,
    sha256_of,
    write_config,
    write_json,
)

THREADS = 1  # of every process of a run: what is predicted and what is measured meet the same conditions


def open_run(root: Path, config: RunConfig) -> RunFolder:
    """The run folder with this configuration; a new one is made, an interrupted one taken up.

    Raises:
        ValueError: the folder holds a run with other settings (names the first that differs).
    """
    folder = RunFolder(root)
    if not folder.config.exists():
        write_config(folder, config)
        return folder
    there = RunConfig.read(folder.config).to_mapping()
    for key, value in config.to_mapping().items():
        if there[key] != value:
            raise ValueError(
                f"{folder.config}: this run has {key} = {there[key]!r}, asked for {value!r}; choose another --out "
                "or run it with its own settings (--config of that file)"
            )
    return folder


# -- measure -----------------------------------------------------------------------------------------------------


Progress = Callable[[str], AbstractContextManager[Reporter]]
"""Opens the progress display of one part of the work, from its title."""


def _run_part(title: str, jobs: list[Job], workers: int, progress: Progress | None) -> None:
    if not jobs:
        return
    if progress is None:
        run_jobs(jobs, workers, None, THREADS)
        return
    with progress(title) as report:
        run_jobs(jobs, workers, report, THREADS)


def measure(folder: RunFolder, progress: Progress | None = None) -> Measurements:
    """Measure fidelity on one batch, seconds by part and the held-out loss at step 0; writes measurements.json."""
    if not folder.measurements.exists():
        _run_part(
            "measure", [Job("fidelity and seconds by part", _measure, (folder.root,), 60.0)], 1, progress
        )
    return read_record(folder.measurements, Measurements)


def _measure(root: Path) -> None:
    from lcsb.config import LCSBConfig
    from lcsb.measure.fidelity import measure_fidelity
    from lcsb.measure.timing import measure_costs
    from lcsb.models import run_header
    from lcsb.prepare import held_out_loss, language_batch, layers_per_step, make_optimizer, prepare
    from lcsb.selective import selective_backward

    folder = RunFolder(root)
    config = RunConfig.read(folder.config)
    seed = config.seeds[0]
    model, corpus = prepare(config, seed, config.recompute)
    facts = environment(THREADS)
    facts["corpus"] = {"source": corpus.source, "sha256": corpus.sha256, "counts": dict(corpus.counts)}
    facts["model"] = run_header(model)
    write_json(folder.environment, facts)
    k = layers_per_step(model, config)
    batch = language_batch(corpus.batch(seed, 0, config.batch_size), model)
    fidelity = measure_fidelity(model, batch, k)
    start_loss, _ = held_out_loss(model, corpus.held_out[: config.eval_windows])
    lcsb = selective_backward(model, LCSBConfig("exact", layers_per_step=k))
    optimizer = make_optimizer(model, config, learning_rate=0.0)  # a run that will diverge can be timed too
    costs, spread = measure_costs(model, batch, optimizer, config.recompute, config.timing_repeats)
    write_json(
        folder.measurements,
        Measurements(
            model=config.model,
            layers=len(lcsb.layers),
            cycle_length=config.cycle_length,
            blocks=tuple(tuple(lcsb.trainable_layers[i] for i in block) for block in lcsb.schedule.blocks),
            learning_rate=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
            costs=costs,
            costs_spread=spread,
            recompute=config.recompute,
            cycle_lengths=tuple(config.timing_cycle_lengths),
            fidelity=fidelity.rows,
            gradient_norm=fidelity.gradient_norm,
            held_out_loss=start_loss,
            hidden_cosine=fidelity.hidden_cosine,
        ),
    )


# -- predict -----------------------------------------------------------------------------------------------------


def predict(folder: RunFolder) -> Predictions:
    """Turn measurements.json into predictions.json, whose sha256 every later record carries.

    Raises:
        ValueError: the run has begun against other predictions than these measurements give.
    """
    predictions = predictions_of(read_record(folder.measurements, Measurements))
    if folder.predictions.exists():
        if read_record(folder.predictions, Predictions) != predictions:
            raise ValueError(
                f"{folder.predictions}: differs from what {folder.measurements} gives; predictions are registered "
                "before a run and are never written anew in its folder (use another --out)"
            )
        return predictions
    write_json(folder.predictions, predictions)
    return predictions


# -- run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """What of the run stage is wanted.

    Attributes:
        evidence: of timing, memory, fidelity and probes.
        arms: names of the arms to train; None: all.
    """

    evidence: frozenset[str] = frozenset({"timing", "memory", "fidelity"})
    arms: frozenset[str] | None = None

    def trains(self, arm: ArmConfig) -> bool:
        """Whether this arm is wanted."""
        return self.arms is None or arm.name in self.arms


EVERYTHING = Needs()
_EVIDENCE_OF = {"C1": "fidelity", "C3": "probes", "C4": "timing"}


def needs_of(claims: Sequence[str], config: RunConfig) -> Needs:
    """What the rules of these claims read, and nothing else. C6 and C7 need other runs (lcsb study): nothing here.

    Raises:
        ValueError: an unknown claim.
    """
    from reports.claims import BY_ID

    evidence: set[str] = set()
    arms: set[str] = set()
    every = {arm.name for arm in config.arms}
    for claim in claims:
        if claim not in BY_ID:
            raise ValueError(f"claim is {claim!r}, expected one of {', '.join(BY_ID)}")
        evidence |= {_EVIDENCE_OF[claim]} if claim in _EVIDENCE_OF else set()
        if claim == "C1":
            arms |= {"full"} & every
        elif claim == "C3":
            evidence |= {"fidelity"}
            arms |= {"full", probed_arm(config)} & every
        elif claim in ("C2", "C5", "C8"):
            arms |= every
    return Needs(frozenset(evidence), frozenset(arms))


def probed_arm(config: RunConfig) -> str:
    """The arm whose end is a point of the probe steps: exact with idle momentum, else the first one."""
    for arm in config.arms:
        if (arm.method, arm.backward, arm.idle, arm.schedule) == ("lcsb", "exact", "momentum", "cyclic"):
            return arm.name
    return config.arms[0].name


def run(folder: RunFolder, progress: Progress | None = None, needs: Needs = EVERYTHING) -> None:
    """Measure timing and memory alone, then train all arms side by side and measure fidelity on held-out batches.

    Args:
        progress: opens the display of one part of the work.
        needs: what is wanted of it; probe steps (`probes`) are taken only where they are asked for.

    Raises:
        ValueError: no predictions are registered.
        JobError: some jobs failed (the others have finished; running again takes up what is missing).
    """
    config = RunConfig.read(folder.config)
    if not folder.predictions.exists():
        raise ValueError(
            f"{folder.predictions}: not there; predictions must be registered before a run (lcsb predict)"
        )
    expected = _Expected(config, read_record(folder.measurements, Measurements))
    if "timing" in needs.evidence:
        _run_part("timing, alone", _timing_jobs(folder, expected), 1, progress)
    if "memory" in needs.evidence:
        jobs = _memory_jobs(folder, expected)
        _run_part("memory, each mode in a process of its own", jobs, config.workers, progress)
        _collect_memory(folder)
    # The short jobs come last and fill the time in which one worker would wait for the other's last arm.
    jobs = _arm_jobs(folder, config, expected, needs)
    if "fidelity" in needs.evidence:
        jobs += _fidelity_jobs(folder, config, expected, "start")
        _run_part("arms, and fidelity before them", jobs, config.workers, progress)
        after = _fidelity_jobs(folder, config, expected, "after")
        _run_part("fidelity after fine-tuning", after, config.workers, progress)
        _collect_fidelity(folder, config)
    else:
        _run_part("arms", jobs, config.workers, progress)
    if "probes" in needs.evidence:
        _run_part("probe steps", _probe_jobs(folder, config, expected), config.workers, progress)
        _collect_probes(folder, config)


MODES = ("full", "exact", "identity", "mlp")
_START_SECONDS = 6.0  # of a process: imports, and loading the model


class _Expected:
    """Expected seconds of the parts of the run stage, on one thread, from the measured costs (T12)."""

    def __init__(self, config: RunConfig, measured: Measurements) -> None:
        self.config = config
        k = config.layers_per_step(measured.layers)

        def steps(recompute: bool) -> dict[str, float]:
            return {
                mode: step_seconds(measured.costs, mode, layers_per_step=k, recompute=recompute)
                for mode in MODES
            }

        self.timed, self.trained = steps(config.recompute), steps(config.recompute_arms)
        self.window = measured.costs.forward + measured.costs.head

    @property
    def timing(self) -> float:
        cycles = sum(self.config.timing_cycle_lengths)
        references = 1 + 3 * cycles // 6
        steps = references * self.timed["full"] + cycles * sum(self.timed[mode] for mode in MODES[1:])
        return _START_SECONDS + self.config.timing_repeats * steps

    def memory(self, mode: str) -> float:
        return _START_SECONDS + self.config.cycle_length * self.timed[mode]

    def arm(self, arm: ArmConfig) -> float:
        """An arm's seconds; a baseline's by the mode that costs about as much (mezo: two forward passes)."""
        evaluations = -(-self.config.steps // self.config.eval_every) * self.config.eval_windows
        known = self.trained.get(arm.backward, self.trained["exact"])  # certified: at most exact
        step = 2 * self.window if arm.method == "mezo" else known
        return _START_SECONDS + self.config.steps * step + evaluations * self.window

    @property
    def fidelity_batch(self) -> float:
        return 4 * self.timed["full"]

    @property
    def probe_point(self) -> float:
        """Seconds of the probe steps at one point: about 25 products of 1.5 gradients, and 10 passes, a block."""
        return _START_SECONDS + self.config.cycle_length * (38 * self.trained["full"] + 10 * self.window)

    def wall(self, needs: Needs) -> float:
        """Wall seconds of what is wanted."""
        return self.alone(needs) + self.side_by_side(needs) / self.config.workers

    def alone(self, needs: Needs) -> float:
        """Seconds of what must run alone on the machine."""
        return self.timing if "timing" in needs.evidence else 0.0

    def side_by_side(self, needs: Needs) -> float:
        """Core-seconds of the rest, which several processes share."""
        config = self.config
        seconds = len(config.seeds) * sum(self.arm(arm) for arm in config.arms if needs.trains(arm))
        if "memory" in needs.evidence:
            seconds += sum(self.memory(mode) for mode in MODES)
        if "fidelity" in needs.evidence:
            seconds += 2 * config.fidelity_batches * self.fidelity_batch
        if "probes" in needs.evidence:
            seconds += len(POINTS) * len(config.seeds) * self.probe_point
        return seconds


def expected_run_seconds(folder: RunFolder, needs: Needs = EVERYTHING) -> float:
    """Expected wall seconds of the run stage, from the measured costs (T12)."""
    expected = _Expected(RunConfig.read(folder.config), read_record(folder.measurements, Measurements))
    return expected.wall(needs)


def expected_core_seconds(config: RunConfig, measured: Measurements, needs: Needs) -> float:
    """Expected seconds of one core for the run stage, from measured costs (T12)."""
    expected = _Expected(config, measured)
    return expected.alone(needs) + expected.side_by_side(needs)


def _timing_jobs(folder: RunFolder, expected: _Expected) -> list[Job]:
    if folder.evidence("timing").exists():
        return []
    return [Job("every mode and cycle length", _measure_timing, (folder.root,), expected.timing)]


def _memory_jobs(folder: RunFolder, expected: _Expected) -> list[Job]:
    if folder.evidence("memory").exists():
        return []
    return [
        Job(mode, _measure_memory, (folder.root, mode), expected.memory(mode))
        for mode in MODES
        if not _part(folder, f"memory-{mode}").exists()
    ]


def _evidence(folder: RunFolder, kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "predictions_sha256": sha256_of(folder.predictions), **fields}


def _measure_timing(root: Path) -> None:
    from lcsb.measure.timing import dequantisation_seconds, measure_speedups
    from lcsb.prepare import language_batch, layers_per_step, make_optimizer, prepare

    folder = RunFolder(root)
    config = RunConfig.read(folder.config)
    seed = config.seeds[0]
    model, corpus = prepare(config, seed, config.recompute)
    batch = language_batch(corpus.batch(seed, 0, config.batch_size), model)
    optimizer = make_optimizer(model, config, learning_rate=0.0)
    ks = {p: layers_per_step(model, config, p) for p in config.timing_cycle_lengths}
    rows, backward = measure_speedups(model, batch, optimizer, ks, config.timing_repeats)
    share = dequantisation_seconds(model, config.timing_repeats) * (2 if config.recompute else 1) / backward
    evidence = _evidence(
        folder,
        "timing",
        rows=rows,
        threads=THREADS,
        recompute=config.recompute,
        dequantisation_share_of_backward=share,
    )
    write_json(folder.evidence("timing"), evidence)


def _measure_memory(root: Path, mode: str) -> None:
    from lcsb.measure.memory import measure_memory

    folder = RunFolder(root)
    write_json(
        _part(folder, f"memory-{mode}"),
        _evidence(folder, "memory", **measure_memory(folder.config, mode, THREADS)),
    )


def _collect_memory(folder: RunFolder) -> None:
    if not folder.evidence("memory").exists():
        rows = [_read_part(folder, f"memory-{mode}") for mode in MODES]
        evidence = _evidence(folder, "memory", meter="VmHWM of a fresh process", rows=rows)
        write_json(folder.evidence("memory"), evidence)


def _arm_jobs(
    folder: RunFolder, config: RunConfig, expected: _Expected, needs: Needs = EVERYTHING
) -> list[Job]:
    jobs = []
    for seed in config.seeds:
        for arm in config.arms:
            metrics = folder.arm(arm.name, seed).metrics
            if not needs.trains(arm) or arm_status(folder, arm.name, seed) is not None:
                continue
            jobs.append(
                Job(
                    f"{arm.name}, seed {seed}",
                    _train,
                    (folder.root, arm.name, seed),
                    expected.arm(arm),
                    _share_done(metrics, config.steps),
                )
            )
    return jobs


def _share_done(metrics: Path, steps: int) -> Callable[[], float]:
    def share() -> float:
        try:
            return metrics.read_bytes().count(b'"kind":"step"') / steps
        except OSError:
            return 0.0

    return share


def _train(root: Path, arm: str, seed: int) -> str:
    from lcsb.train import train_arm

    return train_arm(RunFolder(root), arm, seed)


def _part(folder: RunFolder, name: str) -> Path:
    """A piece of evidence that one job has finished, until all pieces are put together."""
    return folder.evidence("parts").with_suffix("") / f"{name}.json"


def _read_part(folder: RunFolder, name: str) -> dict[str, Any]:
    path, registration = _part(folder, name), sha256_of(folder.predictions)
    part: dict[str, Any] = read_json(path)
    found = part.pop("predictions_sha256", "no predictions")
    if found != registration:
        raise ValueError(f"{path}: registered against {found[:12]}, expected {registration[:12]}")
    del part["kind"]
    return part


def _fidelity_batches(folder: RunFolder, config: RunConfig) -> list[tuple[str, int, int]]:
    """(stage, held-out batch, adapter seed): the seeds take turns, so no result rests on one adapter start.

    `after` is measured on what the arm `full` has learned; where it diverged there is nothing to measure on.
    """
    learned = [seed for seed in config.seeds if arm_status(folder, "full", seed) == "done"]
    found = [("start", i, config.seeds[i % len(config.seeds)]) for i in range(config.fidelity_batches)]
    return found + [
        ("after", i, learned[i % len(learned)]) for i in range(config.fidelity_batches) if learned
    ]


def arm_status(folder: RunFolder, arm: str, seed: int) -> str | None:
    """How an arm ended: done, diverged, or None if it has not."""
    metrics = folder.arm(arm, seed).metrics
    end = read_metrics(metrics).end if metrics.exists() else None
    return end.status if end else None


def _fidelity_jobs(folder: RunFolder, config: RunConfig, expected: _Expected, when: str) -> list[Job]:
    if folder.evidence("fidelity").exists():
        return []
    return [
        Job(
            f"fidelity {stage} {i}", _measure_fidelity, (folder.root, stage, i, seed), expected.fidelity_batch
        )
        for stage, i, seed in _fidelity_batches(folder, config)
        if stage == when and not _part(folder, f"fidelity-{stage}-{i}").exists()
    ]


def _measure_fidelity(root: Path, stage: str, index: int, seed: int) -> None:
    from lcsb.adapter_files import load_adapter
    from lcsb.measure.fidelity import measure_fidelity
    from lcsb.prepare import language_batch, layers_per_step, prepare

    folder = RunFolder(root)
    config = RunConfig.read(folder.config)
    model, corpus = prepare(config, seed, recompute=False)
    if stage == "after":
        load_adapter(model, folder.arm("full", seed).adapter)
    rows = config.batch_size
    windows = corpus.held_out[index * rows : (index + 1) * rows]
    if len(windows) < rows:
        raise ValueError(f"{len(corpus.held_out)} held-out windows, expected at least {(index + 1) * rows}")
    measured = measure_fidelity(model, language_batch(windows, model), layers_per_step(model, config))
    write_json(
        _part(folder, f"fidelity-{stage}-{index}"),
        _evidence(
            folder,
            "fidelity",
            batch=index,
            adapter_seed=seed,
            stage=stage,
            loss=measured.loss,
            rows=measured.rows,
            gradient_norm=measured.gradient_norm,
        ),
    )


def _collect_fidelity(folder: RunFolder, config: RunConfig) -> None:
    if not folder.evidence("fidelity").exists():
        names = [f"fidelity-{stage}-{index}" for stage, index, _ in _fidelity_batches(folder, config)]
        batches = [_read_part(folder, name) for name in names]
        write_json(folder.evidence("fidelity"), _evidence(folder, "fidelity", batches=batches))


POINTS = ("start", "after")  # of an arm's training, see `probed_arm`


def _probe_names(folder: RunFolder, config: RunConfig) -> list[tuple[str, int]]:
    """(point, seed); `after` for the seeds whose arm has learned something."""
    arm = probed_arm(config)
    return [
        (point, seed)
        for point in POINTS
        for seed in config.seeds
        if point == "start" or arm_status(folder, arm, seed) == "done"
    ]


def _probe_jobs(folder: RunFolder, config: RunConfig, expected: _Expected) -> list[Job]:
    if folder.evidence("probes").exists():
        return []
    return [
        Job(
            f"probe steps {point}, seed {seed}",
            _measure_probes,
            (folder.root, point, seed),
            expected.probe_point,
        )
        for point, seed in _probe_names(folder, config)
        if not _part(folder, f"probes-{point}-{seed}").exists()
    ]


def _measure_probes(root: Path, point: str, seed: int) -> None:
    from lcsb.adapter_files import load_adapter
    from lcsb.measure.probes import measure_probes
    from lcsb.prepare import language_batch, layers_per_step, prepare

    folder = RunFolder(root)
    config = RunConfig.read(folder.config)
    model, corpus = prepare(config, seed, recompute=False)
    arm = probed_arm(config)
    if point == "after":
        load_adapter(model, folder.arm(arm, seed).adapter)
    model.eval()
    # The batch that the arm would have seen next: no step of it was trained on this one.
    batch = language_batch(corpus.batch(seed, config.steps, config.batch_size), model)
    found = measure_probes(model, batch, layers_per_step(model, config), seed=seed)
    where = "start" if point == "start" else f"{arm}, step {config.steps}"
    steps = [{"point": where, "seed": seed, **step} for step in found.steps]
    write_json(
        _part(folder, f"probes-{point}-{seed}"),
        _evidence(folder, "probes", steps=steps, skipped=found.skipped, products=found.products),
    )


def _collect_probes(folder: RunFolder, config: RunConfig) -> None:
    if not folder.evidence("probes").exists():
        parts = [_read_part(folder, f"probes-{point}-{seed}") for point, seed in _probe_names(folder, config)]
        fields = {name: [row for part in parts for row in part[name]] for name in ("steps", "skipped")}
        products = sum(part["products"] for part in parts)
        write_json(folder.evidence("probes"), _evidence(folder, "probes", products=products, **fields))
