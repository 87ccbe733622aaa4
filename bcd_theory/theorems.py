"""The results T1 to T12 in one sentence each, for pages and tables that name them by id."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Kind = Literal["tight", "upper", "law"]


class Theorem(NamedTuple):
    """A result: tight (an equality, or attained), upper (a one-sided bound) or law (an exact identity)."""

    title: str
    kind: Kind
    statement: str


THEOREMS: Final[dict[str, Theorem]] = {
    "T1": Theorem(
        "Block descent",
        "upper",
        "A step along block i lowers f by at least eta (1 - eta L_i/2) |grad_i f|^2, for every eta < 2/L_i.",
    ),
    "T2": Theorem(
        "Biased cyclic block descent",
        "upper",
        "With block gradients of relative error delta < 1 the mean squared gradient over K cycles falls like 1/K, for "
        "eta < 2/(L_max (1 + delta)); in angles a step descends for eta < 2 cos/(L_i rho) whenever cos > 0.",
    ),
    "T3": Theorem(
        "Linear rate",
        "upper",
        "Under the Polyak-Lojasiewicz condition f - f* contracts by a constant factor each cycle.",
    ),
    "T4": Theorem(
        "Exact linear stability",
        "tight",
        "On a quadratic a schedule converges from every start iff the spectral radius of its cycle map is below 1 on "
        "the quotient by the null space.",
    ),
    "T5": Theorem(
        "Limits with momentum",
        "tight",
        "Uncoupled blocks: 2 (1 + q)/((1 - q) L) with q = beta^p for idle momentum and q = beta for frozen; coupled "
        "blocks under idle momentum need not be stable up to 2/L_max.",
    ),
    "T6": Theorem(
        "Idle momentum",
        "law",
        "The displacement of an idle layer is a closed form of the moments it was left with; in a shifted variable "
        "idle momentum is plain block descent with gradients read at a displaced point.",
    ),
    "T6b": Theorem(
        "Frozen momentum keeps block descent",
        "upper",
        "With frozen idle layers the loss plus a momentum energy falls at every step, for every eta < 2/L_max and "
        "every beta.",
    ),
    "T7": Theorem(
        "Identity mode: gradient flow and bias",
        "upper",
        "Branch norms below 1 bound the size of the gradient that arrives and the bias of the shortcut; its direction "
        "is guaranteed by nothing, and its sign can be wrong.",
    ),
    "T8": Theorem(
        "Smoothness of a LoRA block",
        "upper",
        "The curvature of a LoRA block is bounded by the norms of its factors, the curvature of the adapted weights "
        "and their gradient.",
    ),
    "T9": Theorem(
        "AdamW's movement",
        "law",
        "Under a constant gradient a block moves p, about sqrt(p) or 1 learning rates a cycle: full, idle momentum, "
        "frozen. A comparison at equal learning rate compares different movements.",
    ),
    "T10": Theorem(
        "Noise floor",
        "tight",
        "On a noisy quadratic the stationary covariance solves a Lyapunov equation of the cycle map.",
    ),
    "T11": Theorem(
        "Quantised base",
        "law",
        "The rounding error of block quantisation on Gaussian weights is a closed form of the block size; it is a "
        "fixed perturbation, not noise.",
    ),
    "T12": Theorem(
        "Cost",
        "law",
        "Seconds and bytes of a step are sums over its parts; a mode saves the parts that its idle layers skip, and "
        "never the head, the loss or the forward pass.",
    ),
}
