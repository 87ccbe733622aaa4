"""Idle policies around an ordinary optimiser (theory: "Idle policies", T6, T6b), and what they mean for each.

An optimiser reads what a layer's gradient *is*: `None` means "leave x, m, v and the step count alone" (policy
`frozen`), a zero tensor means "decay m and v, move x by what is left of m, apply weight decay" (policy `momentum`).
Nothing else is needed, so the optimiser stays the user's own. What the zero gradient does depends on the optimiser;
`OPTIMIZERS` says it for each one that is supported, and `check_optimizer` reads it from there.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

_STILL = "nothing but weight decay moves it"
_KEPT = "nothing of it changes"
_LAW = "T6: it moves by what is left of m, over sqrt(v) as v decays; decoupled weight decay"
_FULL_STEPS = "so each idle step is as long as a selected one, while m is not exactly zero: T6 does not hold"


@dataclass(frozen=True)
class IdleMeaning:
    """What the idle policies mean for one optimiser.

    Attributes:
        momentum: what an idle layer does under `momentum`; if `refused`, why that policy is refused.
        refused: whether `momentum` is refused.
        coupled_decay: weight decay enters the gradient and is normalised with it, so that under `momentum` an idle
            layer with decay would take steps of full length; refused if weight_decay > 0.
        uses_eps: whether a step divides by a moment + eps, so that eps = 0 gives 0/0 under `momentum`.
        frozen: what it does under `frozen`.
    """

    momentum: str
    refused: bool = False
    coupled_decay: bool = False
    uses_eps: bool = True
    frozen: str = _KEPT


_ADAM = IdleMeaning(
    "T6 with weight decay 0: it moves by what is left of m, over sqrt(v) as v decays", coupled_decay=True
)
_ADAMW = IdleMeaning(_LAW)
_ADAMW_8BIT = IdleMeaning(f"{_LAW}; to about 0.2 % an idle step, since m and v are rounded to 8 bits at each")
_SGD = IdleMeaning(
    "it moves by learning_rate beta^k b at the k-th idle step, b the momentum buffer; decay shrinks it",
    uses_eps=False,
)
_LION = IdleMeaning(f"the step is the sign of m, {_FULL_STEPS}", refused=True)
_RMSPROP = IdleMeaning(
    f"v decays by alpha a step, so the next selected step is longer; {_STILL} (with momentum: as SGD)",
    coupled_decay=True,
)
_ADAGRAD = IdleMeaning(f"{_STILL}; v stays, lr_decay goes on", coupled_decay=True)
_ADEMAMIX = IdleMeaning("its slow average does not fade within a cycle, so T6 does not hold", refused=True)

OPTIMIZERS: Mapping[str, IdleMeaning] = {
    "torch.SGD": _SGD,
    "torch.Adam": _ADAM,
    "torch.AdamW": _ADAMW,
    "torch.NAdam": IdleMeaning("as Adam, with Nesterov's schedule of beta", coupled_decay=True),
    "torch.RAdam": IdleMeaning("as Adam, rectified (before step 6: by m itself)", coupled_decay=True),
    "torch.Adamax": IdleMeaning("as Adam, over the decaying maximum of the gradients", coupled_decay=True),
    "torch.Adagrad": _ADAGRAD,
    "torch.RMSprop": _RMSPROP,
    "torch.Adafactor": IdleMeaning(
        f"{_STILL}; v decays, so the next selected step is longer (up to its clipping)"
    ),
    "torch.Muon": IdleMeaning(f"m is orthogonalised, {_FULL_STEPS}", refused=True),
    "transformers.Adafactor": IdleMeaning(
        f"{_STILL} (with beta1: by the decaying average of past moves); v decays, so the next selected step is longer "
        "(up to its clipping)"
    ),
    "bitsandbytes.Adam": _ADAMW,
    "bitsandbytes.Adam8bit": _ADAMW_8BIT,
    "bitsandbytes.Adam32bit": _ADAMW,
    "bitsandbytes.AdamW": _ADAMW,
    "bitsandbytes.AdamW8bit": _ADAMW_8BIT,
    "bitsandbytes.AdamW32bit": _ADAMW,
    "bitsandbytes.SGD": _SGD,
    "bitsandbytes.SGD8bit": _SGD,
    "bitsandbytes.SGD32bit": _SGD,
    "bitsandbytes.RMSprop": _RMSPROP,
    "bitsandbytes.RMSprop8bit": _RMSPROP,
    "bitsandbytes.RMSprop32bit": _RMSPROP,
    "bitsandbytes.Adagrad": _ADAGRAD,
    "bitsandbytes.Adagrad8bit": _ADAGRAD,
    "bitsandbytes.Adagrad32bit": _ADAGRAD,
    "bitsandbytes.Lion": _LION,
    "bitsandbytes.Lion8bit": _LION,
    "bitsandbytes.Lion32bit": _LION,
    "bitsandbytes.AdEMAMix": _ADEMAMIX,
    "bitsandbytes.AdEMAMix8bit": _ADEMAMIX,
}
"""Library and class of each supported optimiser (exactly that class). bitsandbytes' paged ones: without `Paged`."""


def optimizer_table() -> str:
    """`OPTIMIZERS` as a Markdown table."""
    rows = ["| optimiser | `momentum` | `frozen` |", "|---|---|---|"]
    for name, meaning in OPTIMIZERS.items():
        momentum = f"refused: {meaning.momentum}" if meaning.refused else meaning.momentum
        if meaning.coupled_decay:
            momentum += "; refused with weight decay, which it would normalise to steps of full length"
        rows.append(f"| {name} | {momentum} | {meaning.frozen} |")
    return "\n".join(rows)


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimiser inside accelerate's wrapper (Trainer hands that one out)."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def idle_meaning(optimizer: torch.optim.Optimizer) -> IdleMeaning:
    """The row of `OPTIMIZERS` for this optimiser.

    Raises:
        TypeError: an optimiser whose behaviour under zero and absent gradients has not been established.
    """
    kind = type(unwrapped(optimizer))
    name = f"{kind.__module__.split('.')[0]}.{kind.__name__.removeprefix('Paged')}"
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name, OPTIMIZERS, n=1, cutoff=0.0)[0]
        libraries: dict[str, list[str]] = {}
        for known in OPTIMIZERS:
            libraries.setdefault(known.split(".")[0], []).append(known.split(".")[1])
        supported = "; ".join(f"{library}: {', '.join(kinds)}" for library, kinds in libraries.items())
        raise TypeError(
            f"optimizer: found {kind.__module__}.{kind.__name__}, whose idle steps are not known here; nearest that "
            f"is supported: {near} ({supported})"
        )
    return OPTIMIZERS[name]


def check_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], idle: str
) -> None:
    """Refuse an optimiser with which the idle policy would not mean what the theory says.

    Args:
        parameters: name -> every parameter that any step of the cycle can train.
        idle: `momentum` or `frozen`.

    Raises:
        TypeError: an optimiser type that is not in `OPTIMIZERS`.
        ValueError: a parameter that is in no group or in two (it would silently never be trained, or twice); a paged
            optimiser on the CPU; with idle momentum: a type for which it is refused, weight decay that an adaptive
            optimiser would normalise, or eps = 0 (a block not yet selected would give 0/0).
    """
    meaning, optimizer = idle_meaning(optimizer), unwrapped(optimizer)
    name = type(optimizer).__name__
    if getattr(optimizer, "is_paged", False) and any(p.device.type == "cpu" for p in parameters.values()):
        raise ValueError(
            f"optimizer: {name} is paged, which needs a GPU (on the CPU bitsandbytes quietly uses the optimiser that "
            f"is not paged); use {name.removeprefix('Paged')}"
        )
    if idle == "momentum" and meaning.refused:
        raise ValueError(f"optimizer: {name} with idle='momentum': {meaning.momentum}; use idle='frozen'")
    seen: dict[int, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
        if idle == "momentum":
            _check_group(name, group, meaning)
    wrong = [name for name, parameter in parameters.items() if seen.get(id(parameter), 0) != 1]
    if wrong:
        raise ValueError(
            f"optimizer: {len(wrong)} of {len(parameters)} adapter parameters are not in exactly one parameter "
            f"group, first {wrong[0]!r} ({seen.get(id(parameters[wrong[0]]), 0)} times); build the optimiser from "
            "all adapters, not from those trainable at one step"
        )


def _check_group(name: str, group: Mapping[str, object], meaning: IdleMeaning) -> None:
    if meaning.uses_eps and group.get("eps", 1.0) == 0.0:
        raise ValueError("optimizer: eps is 0; idle momentum needs eps > 0 (0/0 in a block not yet selected)")
    decay = group.get("weight_decay", 0.0)
    if meaning.coupled_decay and decay and group["params"] and not group.get("decoupled_weight_decay", False):
        raise ValueError(
            f"optimizer: {name} with weight_decay {decay} and idle='momentum': the decay enters the gradient and is "
            "normalised with it, so idle layers would take steps of full length; use AdamW, weight_decay 0 or "
            "idle='frozen'"
        )


def keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimiser has per-parameter state after a step (SGD without momentum has none)."""
    optimizer = unwrapped(optimizer)
    return not isinstance(optimizer, torch.optim.SGD) or any(
        group["momentum"] for group in optimizer.param_groups
    )


def set_idle_gradients(parameters: Iterable[torch.nn.Parameter], idle: str) -> None:
    """Give idle parameters the gradient that makes the optimiser follow the idle policy.

    `momentum`: zero (T6); `frozen`: None (T6b). Any gradient left there by something else is overwritten.
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if idle == "momentum" else None
