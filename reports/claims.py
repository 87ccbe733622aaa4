"""The registry of claims: statements, theorems, rules and margins, fixed before any run is judged.

C1 to C8 are claims of the paper (arXiv 2602.13073), in our words. Each gets two verdicts: on the paper's claim and on
our prediction. Figures marked (second-hand) come from a public review note, not from the paper itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bcd_theory.predictions import FIDELITY_TOLERANCE, LAW_ROUNDINGS, LAW_TOLERANCE
from reports.decisions import SEEDS_NEEDED
from reports.numbers import percent

# C1
COSINE_MARGIN = 0.5
COSINE_SHARE = 0.5
MODELS_NEEDED = 2
FIDELITY_SHARE = 0.9
# C2
DROP_MARGIN = 0.05
MOVEMENT_SHARE = 0.9
# C4
PAPER_SPEEDUP = 1.40
PAPER_DEQUANTISATION = (0.32, 0.42)
SPEEDUP_TOLERANCE = 0.10
# C3
PROBE_SHARE = 0.99
PROBES_NEEDED = 24  # where all of 24 hold, the lower 95 % limit of the share is 0.88
# C5
GAP_MARGIN = 0.02
# C6
RATES_NEEDED = 4
MARGIN_OF_STEP = 0.5  # of one step of the grid of learning rates
# C7
ONE_GIGABYTE = 10**9
MEMORY_TOLERANCE = 0.10
MEMORY_GEOMETRIES = ("qwen2.5-0.5b", "gemma3-1b", "qwen2.5-1.5b", "qwen2.5-3b", "gemma3-4b")


@dataclass(frozen=True)
class Rule:
    """A decision rule in words, with the number it turns on (`margin` in `unit`)."""

    text: str
    margin: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class Contrast:
    """A rival explanation of C6 as the difference of two cells' log2 divergence rates, left - right.

    left, right: (backward, idle, learning rate rule). between: which cells, of one sweep or of two. claim: what the
    difference is where the explanation is right. counts: our prediction rests on it.
    """

    id: str
    name: str
    left: tuple[str, str, str]
    right: tuple[str, str, str]
    claim: Literal["above", "below", "inside"]
    between: Literal["arms", "bases", "arithmetic"] = "arms"
    counts: bool = False


EXPLANATIONS: tuple[Contrast, ...] = (
    Contrast(
        "a", "movement (T9)", ("exact", "momentum", "eta"), ("full", "", "eta/sqrt(p)"), "inside", counts=True
    ),
    Contrast("a, frozen", "movement (T9)", ("exact", "frozen", "eta"), ("full", "", "eta/p"), "inside"),
    Contrast("b", "block curvature (T1, T6b)", ("exact", "frozen", "eta"), ("full", "", "eta/p"), "above"),
    Contrast(
        "c", "surrogate gradient (T7)", ("identity", "momentum", "eta"), ("exact", "momentum", "eta"), "above"
    ),
    Contrast("d", "4-bit function (T11)", ("full", "", "eta"), ("full", "", "eta"), "below", "bases"),
    Contrast("e", "bf16 arithmetic", ("full", "", "eta"), ("full", "", "eta"), "below", "arithmetic"),
)


@dataclass(frozen=True)
class Order:
    """A pairwise claim of C8: the arm `first` is better than `second`, by final held-out loss or by seconds."""

    first: str
    second: str
    by: Literal["quality", "time"]


ORDERS_PAPER = (
    Order("lisa", "identity-momentum", "quality"),
    Order("freeze-lowest", "identity-momentum", "time"),
    Order("exact-momentum", "importance", "time"),
    Order("exact-momentum", "cached", "quality"),
)
ORDERS_OURS = (
    Order("exact-momentum", "identity-momentum", "quality"),
    Order("lisa", "identity-momentum", "quality"),
    Order("exact-momentum", "mezo", "quality"),
    Order("identity-momentum", "exact-momentum", "time"),
    Order("freeze-lowest", "exact-momentum", "time"),
    Order("exact-momentum", "full", "time"),
)


@dataclass(frozen=True)
class Claim:
    """One claim. needed: how many independent values (`needed_of`) a verdict rests on at least."""

    id: str
    title: str
    statement: str
    theory: str
    theorems: tuple[str, ...]
    evidence: str
    paper: Rule
    ours: Rule
    change: str
    assumptions: str
    prediction: str
    needed: int = SEEDS_NEEDED
    needed_of: str = "seed"


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "C1",
        "Gradient flow through identity paths",
        "Residual connections guarantee gradient flow through identity paths.",
        "The size of the gradient survives if every branch is a contraction; its direction is not guaranteed.",
        ("T2", "T7"),
        "Cosine of the surrogate with the true adapter gradient, by layer, on held-out batches, before and after "
        "fine-tuning, each layer measured while its own block is selected.",
        Rule(
            f"Supported if the cosine in identity mode is at least {COSINE_MARGIN} for every layer on "
            f"{MODELS_NEEDED} real models, before and after fine-tuning; refuted if it is below {COSINE_MARGIN} for "
            "more than half of the layers, before and after. A layer counts as below when its whole 95 % interval "
            "is. One model alone cannot support it.",
            COSINE_MARGIN,
            "cosine",
        ),
        Rule(
            f"Supported if the predicted cosine lies within {FIDELITY_TOLERANCE} of the mean over the held-out "
            f"batches for at least {percent(FIDELITY_SHARE, 0)} of the pairs of mode and layer; refuted if more than "
            f"{percent(1 - FIDELITY_SHARE, 0)} of the pairs miss it with their whole 95 % interval.",
            FIDELITY_TOLERANCE,
            "cosine",
        ),
        "A cosine of at least one half in every layer of two models; for our prediction, held-out batches unlike the "
        "measuring one.",
        "Deterministic loss; gradients of the adapters alone; batches of the run's own task.",
        "The cosine of each mode and layer is the one measured on one batch before the run.",
        needed_of="held-out batch",
    ),
    Claim(
        "C2",
        "Momentum updates idle layers",
        "AdamW momentum gives idle layers implicit updates.",
        "True, and exactly known: T6 gives the displacement, T9 the rate it amounts to.",
        ("T6", "T9"),
        "Optimiser states and parameters of real runs against T6 at every step; held-out loss of idle momentum and "
        "frozen arms against full backpropagation at the rescaled learning rate.",
        Rule(
            "Supported if idle layers move under idle momentum in every seed (the 95 % interval of their "
            "share of the "
            "path lies above 0) and the movement is T6's; refuted if they do not move.",
            0.0,
            "share of the path",
        ),
        Rule(
            f"Three parts, all needed. Law: every idle tensor at every step within {LAW_TOLERANCE:g} of T6 "
            "(norm-wise, "
            f"or within {LAW_ROUNDINGS} float32 roundings of x), frozen exactly 0. Equivalence: the paired "
            "difference "
            f"to full at the rescaled rate lies within {percent(DROP_MARGIN, 0)} of full's drop with its 95 % "
            "interval, refuted when wholly outside. Movement: each block's movement relative to full lies "
            "between T9's "
            "drift and diffusion ratios.",
            DROP_MARGIN,
            "share of full's drop",
        ),
        "An idle tensor that leaves T6 by more than rounding, or a paired difference beyond the margin.",
        "AdamW as torch computes it; for T9 a gradient that changes slowly over a cycle and t far above 1/(1 "
        "- beta2).",
        "Idle momentum moves and learns as full at eta/sqrt(p), frozen as full at eta/p.",
    ),
    Claim(
        "C3",
        "Block coordinate descent, hence convergence",
        "LCSB is block coordinate descent on the LoRA parameter space, hence converges.",
        "Exact backward: T1 to T3. Idle momentum: T6, frozen: T6b. Identity mode: only as far as T2's angle "
        "form goes.",
        ("T1", "T2", "T3", "T6", "T6b", "T7"),
        "Probe steps of plain block gradient descent from saved points of the run, on the same batch before "
        "and after, at "
        "1, 2 and 4 times 1/L_i with L_i measured there; cosines of the surrogate by layer.",
        Rule(
            "Two parts. Exact: f(x - g_i/L_i) <= f(x) - |g_i|^2/(2 L_i) on at least "
            f"{percent(PROBE_SHARE, 0)} of the probe "
            f"steps, of {PROBES_NEEDED} or more over {SEEDS_NEEDED} seeds; refuted if even the upper 95 % "
            "limit of the "
            "share is below. Identity: cosine above 0 with its 95 % interval for every layer; refuted if one layer's "
            "interval lies below 0.",
            PROBE_SHARE,
            "share of probe steps",
        ),
        Rule("The exact part of that rule. At 2/L_i and 4/L_i the share is printed and decides nothing.", PROBE_SHARE,
             "share of probe steps"),
        "Probe steps at 1/L_i that do not decrease the loss as T1 says; a layer whose surrogate points uphill.",
        "L_i at the point stands for L_i along the step; the loss is deterministic and known to 8 float32 roundings.",
        "In mode exact the inequality holds on every probe step at 1/L_i.",
    ),
    Claim(
        "C4",
        "Speed",
        "Up to 1.40 times faster than memory-efficient backpropagation; dequantisation is 32 to 42 % of its backward "
        "time.",
        "The cost model T12 gives the speed-up of each mode and cycle length from the seconds of the parts.",
        ("T12",),
        "Seconds of a step by mode and cycle length, alone on the machine, one thread.",
        Rule(
            f"Supported if identity mode reaches {PAPER_SPEEDUP:.2f} at some cycle length on some model with "
            "its 95 % "
            "interval. One model that does not reach it leaves the others open.",
            PAPER_SPEEDUP,
            "speed-up",
        ),
        Rule(
            f"Supported if the predicted speed-up is within {percent(SPEEDUP_TOLERANCE, 0)} of the measured one for "
            "each mode and cycle length; refuted if one misses it with its whole 95 % interval.",
            SPEEDUP_TOLERANCE,
            "relative error",
        ),
        "A quiet machine on which a predicted speed-up is more than 10 % off.",
        "One thread, alone on the machine; ratios of medians of whole cycles.",
        "T12 with the measured seconds of the parts, for each mode and cycle length.",
        needed_of="repeat",
    ),
    Claim(
        "C5",
        "Quality",
        "Under 2 % quality loss over five models and three tasks (models, rank and steps: second-hand).",
        "No theorem. T9: at equal steps idle momentum moves as full at eta/sqrt(p); T7: identity mode by a "
        "surrogate.",
        ("T7", "T9"),
        "Gap of held-out loss, (arm - full)/full, paired by seed, at equal steps, at equal updates per block "
        "(p times as "
        "many steps) and at equal wall time; the share of full's drop that the arm misses.",
        Rule(
            "Equal steps, identity mode with idle momentum; the gap of a seed is its mean over models and "
            "tasks. Supported "
            f"if the upper end of the 95 % interval over the seeds is below {percent(GAP_MARGIN, 0)}, on "
            f"{MODELS_NEEDED} "
            "models or more and with no model and task wholly above; refuted if the lower end is not below. A seed "
            "in which the arm ends without a finite loss and full does not counts as above.",
            GAP_MARGIN,
            "gap",
        ),
        Rule(
            f"Two parts, both needed: the same pooled gap lies wholly at {percent(GAP_MARGIN, 0)} or above, "
            "and it is larger "
            "than that of mode exact.",
            GAP_MARGIN,
            "gap",
        ),
        "An interval of the gap wholly below 2 % on two models.",
        "Same data order, same adapter start and same learning rate for both arms of a pair; full itself "
        "made progress.",
        "The gap is 2 % or more at equal steps, and larger in mode identity than in mode exact.",
    ),
    Claim(
        "C6",
        "Stability in 4-bit",
        "In 4-bit a 3B model diverges under full backpropagation (loss 8.5, second-hand) and converges under LCSB "
        "(0.777, second-hand): an implicit regularisation.",
        "Rival explanations: (a) smaller movement per step (T9), (b) smaller block curvature (T1, T4, T6b), "
        "(c) surrogate "
        "gradient (T7), (d) the 4-bit function (T11), (e) arithmetic.",
        ("T1", "T4", "T6b", "T7", "T9", "T11"),
        "A sweep of learning rates to divergence for each arm, full at eta/sqrt(p) and eta/p among them, on "
        "4-bit and on "
        "unquantised weights; log2 of the rate at which each arm and seed first diverges.",
        Rule(
            "Supported if on one model and base the identity arm diverges at a higher rate than full at "
            "equal rate and than "
            f"full at eta/sqrt(p) (equal movement), each by {MARGIN_OF_STEP:g} step of the grid with the 95 "
            "% interval of "
            f"the paired difference over {SEEDS_NEEDED} seeds, and at some rate every seed of the one "
            "diverges and none of "
            "the other; refuted if on every model and base one of the two differences lies below that. The "
            "regularisation "
            "is claimed of the method, so models other than the paper's count; its own 3B run is not repeated.",
            None,
            "octaves",
        ),
        Rule(
            f"Movement explains it: exact with idle momentum diverges within {MARGIN_OF_STEP:g} step of the "
            "grid of full at "
            "eta/sqrt(p), with the 95 % interval. An explanation survives if its contrast shows what it "
            "says, falls if "
            "the interval lies on the other side, else is open.",
            None,
            "octaves",
        ),
        "A rate at which full at eta/sqrt(p) diverges and LCSB does not, over three seeds.",
        "Diverged: a mean training loss over 20 steps above 1.2 times the held-out loss at step 0, or not "
        "finite; within the "
        "steps of the sweep. A rate is known to the step of the grid; one outside the grid is a bound.",
        "(a) survives: at equal movement the exact arm and full diverge at the same rate.",
    ),
    Claim(
        "C7",
        "First-order fine-tuning under 1 GB",
        "First-order fine-tuning of language models in less than 1 GB of memory.",
        "T12 counts the bytes by part.",
        ("T12",),
        "Peak of the whole process of each mode of the memory engine, in a fresh process, for real models "
        "and for geometries "
        "of random weights (marked so).",
        Rule(
            "Supported if every peak is below 1e9 bytes for every geometry from 0.5B to 4B and for one model "
            "of trained "
            "weights; refuted if for one of them no mode stays below. Random weights count: bytes depend on "
            "shapes alone.",
            float(ONE_GIGABYTE),
            "bytes",
        ),
        Rule(
            f"Every predicted peak within {percent(MEMORY_TOLERANCE, 0)} of the measured one; refuted if one is not.",
            MEMORY_TOLERANCE,
            "relative error",
        ),
        "A geometry whose process peaks at 1e9 bytes or more.",
        "One row of 256 tokens, rank 16, on the machine of the benchmark; the peak includes the interpreter "
        "and libraries.",
        "The planner's peak, made before the process starts.",
        needed=1,
        needed_of="process of each mode and model",
    ),
    Claim(
        "C8",
        "Alternatives",
        "LISA keeps quality best (gap 0.20 % against 1.05 %), freezing is faster (1.45 against 1.35 times), "
        "importance "
        "selection costs more (518.8 s against 107.9 s), reused gradients are unstable (loss 11.3); all second-hand.",
        "T2, T9 and T12 bound what each can do.",
        ("T2", "T9", "T12"),
        "The same methods trained at one setting: final held-out loss and seconds of all steps, paired by seed.",
        Rule(
            "All pairs needed, each by the 95 % interval of the paired difference: "
            + "; ".join(f"{o.first} before {o.second} by {o.by}" for o in ORDERS_PAPER)
            + ". Refuted if one pair is reversed. A method without a finite final loss is the worse one.",
            0.0,
            "paired difference",
        ),
        Rule(
            "The same for our order: " + "; ".join(f"{o.first} before {o.second} by {o.by}" for o in ORDERS_OURS) + ".",
            0.0,
            "paired difference",
        ),
        "A pair whose interval lies on the other side.",
        "Same data order, adapter start, learning rate and number of steps; seconds of steps that ran beside "
        "each other.",
        "True gradients before surrogates (T7), both before zeroth order; seconds by T12.",
    ),
)  # fmt: skip

BY_ID = {claim.id: claim for claim in CLAIMS}
