"""From measurements to predictions: the one place where theory meets the numbers of a model, its data and its machine.

`Measurements` holds what the measure stage found; `predict` turns it into a flat list of `Prediction`s, each with its
theorem, its assumptions and an uncertainty that comes from the measurements. Predictions are written down before the
first training step, and judged against the run afterwards; nothing here reads a file.

Ids, by family (p is a cycle length, MODE a backward mode, IDLE an idle policy):

    limit/IDLE                   largest stable learning rate x preconditioned sharpness of the full run        T5
    movement/IDLE/steady         steady movement of a block per cycle, in units of the learning rate            T9
    movement/IDLE/ratio          (pure drift, pure diffusion) movement relative to full at the same rate        T9
    movement/IDLE/first-cycle    total movement per block caused by its first pulse within p steps, by block    T6
    equivalent/IDLE/drift        learning rate at which full backpropagation drifts as far                      T9
    equivalent/IDLE/diffusion    learning rate at which full backpropagation diffuses as far                    T9
    seconds/MODE/p, speedup/MODE/p                                                                              T12
    dequantisation/share         share of full backward time spent dequantising                                 T12
    fidelity/MODE/LAYOUT         expected adapter cosine by layer (measured on one batch)                       T7
    fidelity/MODE/composed       the same at the cyclic layout, composed from one-layer cosines                 T7
    fidelity-length/MODE         skipped layers after which the cosine falls below one half                     T7
    step-limit/BOUND             largest learning rate for which that theorem guarantees something       T1, T2, T6, T6b
    rate/BOUND                   its bound on the mean squared gradient over the planned cycles            T2, T6, T6b
    noise-floor/IDLE             stationary excess loss, averaged over coordinates' own steps              T10
    quantisation/relative-error  |E|/|W| of the quantised weights, if they are Gaussian                    T11
    bytes/MODE                   peak bytes of the process                                                 T12
    law/tolerance, law/roundings on the idle displacement's deviation from its closed form                 T6
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bcd_theory.cost import StepCosts, speedup, step_seconds
from bcd_theory.geometry import Geometry, peak_bytes
from bcd_theory.identity import compose_cosines, fidelity_length
from bcd_theory.momentum import (
    Idle,
    equivalent_learning_rate,
    first_pulse_displacement,
    idle_displacement,
    steady_movement,
    uncoupled_limit,
)
from bcd_theory.noise import uncoupled_variance
from bcd_theory.quantization import relative_error
from bcd_theory.stepsize import BOUNDS

Layout = Literal["cyclic", "all-above"]

LAW_TOLERANCE = 1e-4
LAW_ROUNDINGS = 100
FIDELITY_TOLERANCE = 0.1
KINDS: tuple[Literal["drift", "diffusion"], ...] = ("drift", "diffusion")
SURROGATE_MODES = ("identity", "mlp")
LIMIT_POLICIES: tuple[Literal["full", "momentum", "frozen"], ...] = ("full", "momentum", "frozen")
IDLE_POLICIES: tuple[Idle, ...] = ("momentum", "frozen")


@dataclass(frozen=True)
class Fidelity:
    """Surrogate against true adapter gradient, by layer, on one batch.

    Attributes:
        mode: backward mode of the surrogate (identity or mlp).
        layout: cyclic (each layer measured while its own block is selected) or all-above (every layer above it is
            skipped).
        cosine, norm_ratio, relative_error: N values; rho = |g~|/|g| and delta = |g~ - g|/|g| (T2). A layer whose true
            gradient is exactly zero has no direction and is None.
    """

    mode: str
    layout: Layout
    cosine: tuple[float | None, ...]
    norm_ratio: tuple[float | None, ...]
    relative_error: tuple[float | None, ...]


@dataclass(frozen=True)
class Smoothness:
    """Measured smoothness of the problem, for the step-size bounds and rates.

    Attributes:
        joint: L of the whole gradient. blocks: L_i, one a block.
        gap: f(x^0) - f*. cycles: K, how many are planned. momentum: EMA momentum of the run (0: plain descent).
        relative_uncertainty: of L and L_i (residual of the eigenvalue solver, spread over batches).
    """

    joint: float
    blocks: tuple[float, ...]
    gap: float
    cycles: int
    momentum: float = 0.0
    relative_uncertainty: float = 0.0


@dataclass(frozen=True)
class GradientNoise:
    """Curvature and gradient variance of uncoupled coordinates (same length), at a momentum in EMA form."""

    curvature: tuple[float, ...]
    variance: tuple[float, ...]
    momentum: float = 0.0


@dataclass(frozen=True)
class MemorySettings:
    """What decides the peak of a training process; `floor` is the measured peak of the bare process."""

    geometry: Geometry
    tokens: int
    batch: int
    rank: int
    floor: int
    embedding_bytes: int = 4


@dataclass(frozen=True)
class WeightCode:
    """How the base weights are stored: codebook, quantisation block, double quantisation."""

    quantization: str
    block_size: int = 64
    double_quantisation: bool = False


@dataclass(frozen=True)
class Measurements:
    """What the measure stage found, and the settings it was found for.

    Attributes:
        model: name of the model or problem.
        layers: N.
        cycle_length: p.
        blocks: the p blocks of a cycle.
        learning_rate, betas, eps, weight_decay: AdamW's constants.
        costs: seconds of one full step by part.
        costs_spread: relative half-width of the timing repeats ((max - min)/(2 median) of a full step).
        recompute: whether the runs recompute layers in backward.
        cycle_lengths: cycle lengths for which the cost is to be predicted.
        fidelity: one entry for each surrogate mode and layout, on the measuring batch.
        gradient_norm: 2-norm of the true adapter gradient by layer.
        held_out_loss: mean loss per token on the evaluation windows at step 0, in nats.
        hidden_cosine: mode -> N cosines between the true hidden gradient below one layer and what the mode's
            one-layer surrogate makes of the true hidden gradient above it.
        smoothness, noise, memory, weights: measured or not (None); each gives predictions of its own.
    """

    model: str
    layers: int
    cycle_length: int
    blocks: tuple[tuple[int, ...], ...]
    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    costs: StepCosts
    costs_spread: float
    recompute: bool
    cycle_lengths: tuple[int, ...]
    fidelity: tuple[Fidelity, ...]
    gradient_norm: tuple[float, ...]
    held_out_loss: float
    hidden_cosine: dict[str, tuple[float, ...]]
    smoothness: Smoothness | None = None
    noise: GradientNoise | None = None
    memory: MemorySettings | None = None
    weights: WeightCode | None = None


@dataclass(frozen=True)
class Prediction:
    """One number (or one number a layer or block) said beforehand.

    Attributes:
        id: see the module's table.
        value: the number, or a tuple of them; None where the measurement gave nothing to predict from.
        unit: "1" for ratios.
        theorems: ids of the results used.
        assumptions: what must hold for it.
        uncertainty: absolute half-width, same unit; None if the result is exact under its assumptions.
    """

    id: str
    value: float | tuple[float | None, ...] | None
    unit: str
    theorems: tuple[str, ...]
    assumptions: tuple[str, ...]
    uncertainty: float | None = None


@dataclass(frozen=True)
class Predictions:
    """All predictions of a run, in a fixed order."""

    items: tuple[Prediction, ...]

    def __getitem__(self, prediction_id: str) -> Prediction:
        for item in self.items:
            if item.id == prediction_id:
                return item
        raise KeyError(
            f"no prediction {prediction_id!r}; there are {', '.join(item.id for item in self.items)}"
        )

    def __contains__(self, prediction_id: str) -> bool:
        return any(item.id == prediction_id for item in self.items)

    def number(self, prediction_id: str) -> float:
        """The value of a scalar prediction.

        Raises KeyError for an unknown id, TypeError for one that is not a single number.
        """
        value = self[prediction_id].value
        if not isinstance(value, int | float):
            raise TypeError(f"prediction {prediction_id!r} is not a single number")
        return float(value)


def predict(measurements: Measurements) -> Predictions:
    """All predictions that the measurements allow (T1-T3, T5-T7, T6b, T9-T12)."""
    return Predictions(
        (
            *_limits(measurements),
            *_movement(measurements),
            *_cost(measurements),
            *_fidelity(measurements),
            *(() if measurements.smoothness is None else _guarantees(measurements, measurements.smoothness)),
            *(() if measurements.noise is None else _noise_floor(measurements, measurements.noise)),
            *(() if measurements.weights is None else _quantisation(measurements.weights)),
            *(() if measurements.memory is None else _bytes(measurements, measurements.memory)),
            Prediction("law/tolerance", LAW_TOLERANCE, "1", ("T6",), ("float32 parameters and moments",)),
            Prediction("law/roundings", LAW_ROUNDINGS, "roundings of x", ("T6",), ("float32 parameters",)),
        )
    )


def _limits(m: Measurements) -> list[Prediction]:
    beta = m.betas[0]
    assumptions = ("blocks uncoupled", "v frozen at its stationary value", "no weight decay")
    return [
        Prediction(
            f"limit/{idle}",
            uncoupled_limit(1.0, momentum=beta, cycle_length=m.cycle_length, idle=idle, units="adamw"),
            "1 / preconditioned sharpness",
            ("T5",),
            assumptions,
        )
        for idle in LIMIT_POLICIES
    ]


def first_cycle_movement(m: Measurements, idle: Idle) -> tuple[float, ...]:
    """Movement of each block in the p steps from its first selection, per unit of learning rate and gradient sign.

    One gradient at step j (block j's first turn) and then p - 1 idle steps (T6, AdamW from zero moments): blocks do
    not start equal, because the bias correction counts global steps under idle momentum. Shape (p,).
    """
    beta1, beta2 = m.betas
    moved = []
    for block in range(m.cycle_length):
        steps = block + 1 if idle == "momentum" else 1
        after = idle_displacement(
            "adamw",
            steps=m.cycle_length - 1,
            first_moment=1.0 - beta1,  # moments after one unit gradient
            second_moment=1.0 - beta2,
            step_count=steps,
            learning_rate=1.0,
            betas=m.betas,
            eps=0.0,
            idle=idle,
        )
        moved.append(float(first_pulse_displacement(steps, m.betas)) - float(after))
    return tuple(moved)


def _movement(m: Measurements) -> list[Prediction]:
    p, root = m.cycle_length, math.sqrt(m.cycle_length)
    constant = (
        "constant gradient",
        "t >> 1/(1 - beta2)",
        "(1 - beta2) p << 1",
        "no weight decay",
        "eps << |g|",
    )
    mixed = ("between pure drift and pure diffusion", "gradients like full's", *constant[1:])
    diffusion = {"momentum": root, "frozen": 1.0}  # per p steps, in units of the learning rate; full: sqrt(p)
    items = [Prediction("movement/full/steady", float(p), "learning rates per cycle", ("T9",), constant)]
    for idle in IDLE_POLICIES:
        drift = steady_movement(idle, p, m.betas)
        low, high = sorted((drift / p, diffusion[idle] / root))
        items += [
            Prediction(f"movement/{idle}/steady", drift, "learning rates per cycle", ("T9",), constant),
            Prediction(f"movement/{idle}/ratio", (low, high), "1", ("T9",), mixed),
            Prediction(
                f"movement/{idle}/first-cycle",
                first_cycle_movement(m, idle),
                "learning rates",
                ("T6",),
                ("first gradient only", "eps << |g|"),
            ),
        ]
        items += [
            Prediction(
                f"equivalent/{idle}/{kind}",
                equivalent_learning_rate(m.learning_rate, idle, p, m.betas, kind=kind),
                "learning rate",
                ("T9",),
                constant,
            )
            for kind in KINDS
        ]
    return items


def _layers_per_step(layers: int, cycle_length: int) -> int:
    return -(-layers // cycle_length)


def _cost(m: Measurements) -> list[Prediction]:
    assumptions = ("costs per layer as measured on one full step", "nothing else competes for the cores")
    full = step_seconds(m.costs, "full", recompute=m.recompute)
    backward = sum(m.costs.total(part) for part in ("input_gradient", "adapter_gradient"))
    if m.recompute:
        backward += m.costs.total("recompute")
    items = [
        Prediction("seconds/full/1", full, "s", ("T12",), assumptions, m.costs_spread * full),
        Prediction(
            "dequantisation/share",
            m.costs.total("dequantisation") / backward,
            "1",
            ("T12",),
            assumptions,
            None,
        ),
    ]
    for mode in ("exact", *SURROGATE_MODES):
        for p in m.cycle_lengths:
            k = _layers_per_step(m.layers, p)
            seconds = step_seconds(m.costs, mode, layers_per_step=k, recompute=m.recompute)
            ratio = speedup(m.costs, mode, layers_per_step=k, recompute=m.recompute)
            items += [
                Prediction(
                    f"seconds/{mode}/{p}", seconds, "s", ("T12",), assumptions, m.costs_spread * seconds
                ),
                Prediction(f"speedup/{mode}/{p}", ratio, "1", ("T12",), assumptions, m.costs_spread * ratio),
            ]
    return items


def _composed(m: Measurements, mode: str) -> tuple[float | None, ...]:
    """Cosine of the hidden gradient that reaches each layer's block, by composition over the idle layers above."""
    cosines = m.hidden_cosine[mode]
    by_layer: list[float | None] = [None] * m.layers
    for block in m.blocks:
        above = [cosines[layer] for layer in range(max(block) + 1, m.layers)]
        value = compose_cosines(above) if above else 1.0
        for layer in block:
            by_layer[layer] = value
    return tuple(by_layer)


def _length(cosines: Sequence[float | None]) -> float | None:
    """Fidelity length from the all-above layout: layer N - 1 - j has j skipped layers above it; None if never."""
    by_skipped = [math.nan if value is None else value for value in reversed(cosines)]
    length = fidelity_length(by_skipped[1:])
    return length if math.isfinite(length) else None


def _fidelity(m: Measurements) -> list[Prediction]:
    same = ("held-out batches like the measuring one",)
    items = []
    for row in m.fidelity:
        items.append(
            Prediction(
                f"fidelity/{row.mode}/{row.layout}", row.cosine, "cosine", ("T7",), same, FIDELITY_TOLERANCE
            )
        )
        if row.layout == "all-above":
            items.append(
                Prediction(f"fidelity-length/{row.mode}", _length(row.cosine), "layers", ("T7",), same)
            )
    for mode in m.hidden_cosine:
        independent = (
            "deviations of different layers independent",
            "adapter cosine = hidden cosine above the block",
        )
        items.append(
            Prediction(f"fidelity/{mode}/composed", _composed(m, mode), "cosine", ("T7",), independent)
        )
    return items


def _guarantees(m: Measurements, smooth: Smoothness) -> list[Prediction]:
    """Step limits and rates of the theorems whose assumptions the smoothness alone can meet (delta = 0)."""
    plain = ("T1", "T2") if smooth.momentum == 0 else ()
    guaranteed = (*plain, "T6-corollary", "T6-cycles", "T6b-cycles")
    values = {
        "eta": m.learning_rate,
        "L": smooth.joint,
        "L_i": max(smooth.blocks),
        "L_max": max(smooth.blocks),
        "p": m.cycle_length,
        "delta": 0.0,
        "beta": smooth.momentum,
        "f0": smooth.gap,
        "fstar": 0.0,
        "K": smooth.cycles,
    }
    items = []
    for name in guaranteed:
        bound = BOUNDS[name]
        limit = bound.largest_step()
        if limit is not None:
            needed = {str(free): values[str(free)] for free in limit.free_symbols}
            step = float(bound.largest_step_at(**needed))
            spread = smooth.relative_uncertainty * step
            if math.isfinite(step):
                items.append(
                    Prediction(
                        f"step-limit/{name}", step, "learning rate", (name,), bound.assumptions, spread
                    )
                )
        if name in ("T2", "T6-cycles", "T6b-cycles"):
            rate = float(bound.evaluate(**{variable: values[variable] for variable in bound.variables}))
            rate /= 1 if "K" in bound.variables else smooth.cycles  # T6b bounds the sum over the cycles
            # Beyond the step limit nothing is guaranteed, so nothing is predicted.
            value = rate if math.isfinite(rate) else None
            items.append(Prediction(f"rate/{name}", value, "squared gradient", (name,), bound.assumptions))
    return items


def _noise_floor(m: Measurements, noise: GradientNoise) -> list[Prediction]:
    assumptions = ("uncoupled quadratic", "noise independent from step to step", "EMA momentum")
    items = []
    for idle in LIMIT_POLICIES:
        p = 1 if idle == "full" else m.cycle_length
        variance = uncoupled_variance(
            noise.curvature,
            noise.variance,
            m.learning_rate,
            momentum=noise.momentum,
            cycle_length=p,
            idle=idle,
        )
        excess = sum(h * v / 2 for h, v in zip(noise.curvature, variance.tolist(), strict=True))
        items.append(Prediction(f"noise-floor/{idle}", excess, "loss", ("T10",), assumptions))
    return items


def _quantisation(code: WeightCode) -> list[Prediction]:
    error = relative_error(code.quantization, code.block_size, code.double_quantisation)
    return [Prediction("quantisation/relative-error", error, "1", ("T11",), ("Gaussian weights",))]


def _bytes(m: Measurements, memory: MemorySettings) -> list[Prediction]:
    assumptions = ("parts alive together at the peak", "floor as measured")
    items = []
    for mode in ("full", "exact", *SURROGATE_MODES):
        peak = peak_bytes(
            memory.geometry,
            mode,
            tokens=memory.tokens,
            batch=memory.batch,
            layers_per_step=None if mode == "full" else _layers_per_step(m.layers, m.cycle_length),
            rank=memory.rank,
            floor=memory.floor,
            quantised=m.weights is not None,
            embedding_bytes=memory.embedding_bytes,
            recompute=m.recompute,
        )
        items.append(Prediction(f"bytes/{mode}", float(peak.total), "bytes", ("T12",), assumptions))
    return items
