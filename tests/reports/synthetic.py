"""A complete run folder made of invented records whose truth is known, for tests of judge and report.

Nothing here is a measurement: losses, cosines and seconds are drawn from formulas with a generator of the given seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bcd_theory.cost import StepCosts
from bcd_theory.partition import contiguous_blocks
from bcd_theory.predictions import Fidelity, Measurements, Predictions, predict
from reports.records import MetricsWriter, RunConfig, RunFolder, sha256_of, write_config, write_json

N = 30
START = 3.2


@dataclass(frozen=True)
class Truth:
    """What the invented run is like; the defaults agree with every prediction and refute the paper's C1."""

    cosine_shift: float = 0.0  # held-out cosine minus predicted one, below the top block
    high_cosine: bool = False  # identity surrogate keeps its direction
    batch_noise: float = 0.02
    law_worst: float = 2e-6
    violations: int = 0
    moved: int = 0
    idle_moves: bool = True
    gap: float = 0.0  # drop of exact arms minus their control's, as a share of full's drop
    seed_noise: float = 0.005  # spread of that gap over seeds
    movement: float | None = None  # movement ratio of all blocks; None: in the middle of the predicted range
    speed_error: float = 0.0  # measured speed-up / predicted one - 1
    repeat_noise: float = 0.003
    without: tuple[tuple[str, int], ...] = ()  # (arm, seed) without a folder
    unfinished: tuple[tuple[str, int], ...] = ()
    diverged: tuple[tuple[str, int], ...] = ()
    evidence: tuple[str, ...] = ("fidelity", "timing", "memory")
    overrides: tuple[str, ...] = field(default=())


def measurements(config: RunConfig, truth: Truth) -> Measurements:
    generator = np.random.default_rng(7)
    blocks = contiguous_blocks(N, config.layers_per_step(N))
    mean = {"identity": np.linspace(0.05, 0.62, N), "mlp": np.linspace(0.45, 0.93, N)}
    if truth.high_cosine:
        mean["identity"] = np.linspace(0.72, 0.93, N)
    rows = []
    for mode in ("identity", "mlp"):
        for layout in ("cyclic", "all-above"):
            values = mean[mode] + (0.02 if layout == "cyclic" else -0.02) + generator.normal(0, 0.01, N)
            exact = blocks[-1] if layout == "cyclic" else (N - 1,)
            values[list(exact)] = 1.0
            rows.append(
                Fidelity(
                    mode, layout, tuple(values.tolist()), tuple(np.linspace(0.2, 1.0, N).tolist()),
                    tuple(np.sqrt(np.clip(1 - values**2, 0, None)).tolist()),
                )
            )  # fmt: skip
    return Measurements(
        model=config.model,
        layers=N,
        cycle_length=config.cycle_length,
        blocks=blocks,
        learning_rate=config.optimizer.learning_rate,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        costs=StepCosts(
            layers=N, forward=0.52, head=0.24, optimizer=0.02, recompute=0.52, input_gradient=0.49,
            adapter_gradient=0.17, dequantisation=0.3, attention_recompute=0.14, attention_input_gradient=0.15,
        ),
        costs_spread=0.04,
        recompute=config.recompute,
        cycle_lengths=tuple(config.timing_cycle_lengths),
        fidelity=tuple(rows),
        gradient_norm=tuple(np.geomspace(0.9, 0.07, N).tolist()),
        held_out_loss=3.5,
        hidden_cosine={"identity": tuple(np.linspace(0.6, 0.9, N).tolist()), "mlp": tuple([0.97] * N)},
    )  # fmt: skip


def build(root: Path, truth: Truth | None = None, size: str = "standard") -> RunFolder:
    """Write the whole folder below `root` and return it."""
    truth = truth or Truth()
    folder = RunFolder(root)
    config = RunConfig.preset(size).override(truth.overrides)
    write_config(folder, config)
    measured = measurements(config, truth)
    predictions = predict(measured)
    write_json(folder.measurements, measured)
    write_json(folder.predictions, predictions)
    sha256 = sha256_of(folder.predictions)
    write_json(
        folder.environment,
        {
            "versions": {"lcsb": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"}, "python": "3.11.7",
            "commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False, "cpu_model": "Invented CPU",
            "cpu_flags": ["avx2"], "cores": 2, "memory_bytes": 25 * 2**30, "threads": 1, "system": "Linux x86_64",
            "corpus": {"source": config.data.source, "sha256": "c" * 64, "counts": {"train": 880, "held_out": 97}},
        },
    )  # fmt: skip
    for arm in config.arms:
        for seed in config.seeds:
            if (arm.name, seed) not in truth.without:
                _arm(folder, config, truth, measured, predictions, sha256, arm.name, seed)
    writers = {"fidelity": _fidelity, "timing": _timing, "memory": _memory}
    for kind in truth.evidence:
        write_json(folder.evidence(kind), writers[kind](config, truth, measured, predictions, sha256))
    return folder


def _drop(truth: Truth, arm: str, seed: int) -> float:
    """Fall of the held-out loss; full's is 0.6."""
    noise = truth.seed_noise * float(np.random.default_rng([11, seed]).normal())
    drops = {
        "full": 0.6, "full-eta-over-sqrt-p": 0.41, "full-eta-over-p": 0.29,
        "exact-momentum": 0.41 + 0.6 * (truth.gap + noise), "exact-frozen": 0.29 + 0.6 * (truth.gap - noise),
        "identity-momentum": 0.22, "mlp-momentum": 0.38,
    }  # fmt: skip
    return drops[arm] + 0.02 * float(np.random.default_rng([13, seed]).normal())


def _arm(
    folder: RunFolder, config: RunConfig, truth: Truth, measured: Measurements, predictions: Predictions,
    sha256: str, name: str, seed: int,
) -> None:  # fmt: skip
    arm = next(entry for entry in config.arms if entry.name == name)
    p = config.cycle_length
    # Same data order for every arm of a seed, so the step losses share their noise.
    data_noise = np.random.default_rng([17, seed]).normal(0, 0.18, config.steps)
    drop = _drop(truth, name, seed)
    blows_up = (name, seed) in truth.diverged
    unfinished = (name, seed) in truth.unfinished
    rate = arm.learning_rate(config.optimizer.learning_rate, p)
    blocks = [list(range(N))] if arm.backward == "full" else [list(block) for block in measured.blocks]
    with MetricsWriter(folder.arm(name, seed).metrics) as writer:
        writer.write(
            {
                "kind": "header", "schema": 1, "predictions_sha256": sha256, "arm": arm, "seed": seed,
                "learning_rate": rate, "cycle_length": p, "blocks": blocks, "n_layers": N, "steps": config.steps,
                "loss_at_start": START,
            }
        )  # fmt: skip

        def loss(t: int) -> float:
            falls = drop * (1 - math.exp(-4 * t / config.steps)) / (1 - math.exp(-4))
            return START + (0.12 * t if blows_up else -falls)

        stop = config.steps if not unfinished else max(1, config.steps // 2)
        for t in range(stop):
            block = None if arm.backward == "full" else t % p
            selected = list(range(N)) if block is None else blocks[block]
            moves = np.full(N, rate * 20.0)
            idle = np.setdiff1d(np.arange(N), selected)
            moving = arm.idle == "momentum" and t > 0 and truth.idle_moves
            moves[idle] = rate * 9.0 if moving else 0.0
            writer.write(
                {
                    "kind": "step", "t": t, "loss": loss(t) + data_noise[t], "lcsb/block": block,
                    "lcsb/selected": selected, "lcsb/grad_norm": 0.4, "displacement": moves, "seconds": 2.0,
                    "lcsb/displacement_idle": np.linalg.norm(moves[idle]),
                }
            )  # fmt: skip
            if idle.size:
                law = {"kind": "law", "t": t, "checked": 14 * idle.size, "within_rounding": 3}
                if arm.idle == "frozen":
                    law |= {"moved": truth.moved}
                else:
                    law |= {
                        "worst": truth.law_worst,
                        "worst_tensor": "layers.3.a",
                        "violations": truth.violations,
                    }
                writer.write(law)
            if (t + 1) % config.eval_every == 0 or t + 1 == config.steps:
                writer.write({"kind": "eval", "t": t + 1, "held_out_loss": loss(t + 1), "tokens": 2032})
        if unfinished:
            return
        writer.write(_movement(config, truth, predictions, arm.idle, arm.backward, rate, seed))
        status = "diverged" if blows_up else "done"
        if blows_up:
            writer.write({"kind": "event", "t": 12, "event": "diverged"})
        writer.write({"kind": "end", "t": stop, "status": status, "diverged_at": 12 if blows_up else None,
                      "seconds": 2.0 * stop})  # fmt: skip


def _movement(config, truth, predictions, idle, backward, rate, seed):
    full = rate * config.steps * 0.4
    ratio = 1.0
    if backward != "full":
        low, high = predictions[f"movement/{idle}/ratio"].value
        ratio = (low + high) / 2 if truth.movement is None else truth.movement
    noise = 1 + 0.01 * np.random.default_rng([19, seed]).normal(size=N)
    return {
        "kind": "movement", "t": config.steps, "layer_rms": full * ratio * noise,
        "layer_path": [rate * config.steps * 20.0] * N,
    }  # fmt: skip


def _fidelity(config, truth, measured, predictions, sha256):
    generator = np.random.default_rng(23)
    batches = []
    for stage, adapter_seeds in (("start", [0]), ("after", config.seeds)):
        for adapter_seed in adapter_seeds:
            for batch in range(config.fidelity_batches):
                rows = []
                for row in measured.fidelity:
                    values = np.array(row.cosine)
                    inexact = values < 1
                    change = truth.cosine_shift + (0.04 if stage == "after" else 0.0)
                    values[inexact] += change + generator.normal(0, truth.batch_noise, int(inexact.sum()))
                    values = np.clip(values, -1, 1)
                    rows.append(
                        {
                            "mode": row.mode, "layout": row.layout, "cosine": values,
                            "norm_ratio": list(row.norm_ratio), "relative_error": list(row.relative_error),
                        }
                    )  # fmt: skip
                batches.append(
                    {
                        "batch": batch, "adapter_seed": adapter_seed, "stage": stage, "rows": rows,
                        "gradient_norm": list(measured.gradient_norm),
                    }
                )  # fmt: skip
    return {"kind": "fidelity", "predictions_sha256": sha256, "batches": batches}


def _timing(config, truth, measured, predictions, sha256):
    generator = np.random.default_rng(29)
    full = predictions.number("seconds/full/1")

    def repeats(mean, blocks):
        factors = 1 + truth.repeat_noise * generator.normal(size=(blocks, config.timing_repeats))
        slope = np.linspace(1.1, 0.9, blocks) if blocks > 1 else np.ones(1)
        return (mean * slope[:, None] * factors).T

    def row(mode, p, repeated, speedup):
        medians = np.median(repeated, axis=0)
        return {
            "mode": mode, "cycle_length": p, "seconds": medians, "mean_seconds": medians.mean(),
            "speedup": speedup / medians.mean(), "repeats": repeated,
        }  # fmt: skip

    base = repeats(full, 1)
    reference = float(np.median(base))
    rows = [row("full", 1, base, reference)]
    for mode in ("exact", "identity", "mlp"):
        for p in config.timing_cycle_lengths:
            error = truth.speed_error if p > 1 else 0.0
            mean = full / (predictions.number(f"speedup/{mode}/{p}") * (1 + error))
            rows.append(row(mode, p, repeats(mean, p), reference))
    return {
        "kind": "timing", "predictions_sha256": sha256, "rows": rows, "threads": 1,
        "dequantisation_share_of_backward": 0.27,
    }  # fmt: skip


def _memory(config, truth, measured, predictions, sha256):
    peaks = {"full": 1658, "exact": 1602, "identity": 1433, "mlp": 1489}
    rows = [
        {
            "mode": mode,
            "peak_bytes": peak * 2**20,
            "rss_anon_bytes": (peak - 300) * 2**20,
            "floor_bytes": 428 * 2**20,
        }
        for mode, peak in peaks.items()
    ]
    return {"kind": "memory", "predictions_sha256": sha256, "meter": "VmHWM of a fresh process", "rows": rows}
