"""ArmConfig: one method in one comparison, with the options that it takes; and the arms that have a name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

Backward = Literal["full", "exact", "identity", "mlp", "certified"]
Idle = Literal["momentum", "frozen"]
ScheduleName = Literal[
    "cyclic", "reversed", "interleaved", "shuffled", "random", "importance", "greedy", "fixed",
    "depth-weighted", "adaptive",
]  # fmt: skip
MethodName = Literal["lcsb", "lisa", "freeze", "surgical", "cached", "stochastic-depth", "mezo"]
LearningRateRule = Literal["eta", "eta/sqrt(p)", "eta/p"]

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Name = Annotated[str, Field(pattern=_NAME, max_length=100)]
PositiveInt = Annotated[int, Field(ge=1)]
_Cosine = Annotated[float, Field(gt=0, lt=1)]
_Rate = Annotated[float, Field(gt=0)] | None
_Count = PositiveInt | None


class Settings(BaseModel):
    """Base of everything in a configuration file: unknown keys and non-finite numbers are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def expected(found: str, known: Iterable[str]) -> str:
    """What a message expects in place of `found`: the nearest known name, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(str(found), names, n=1, cutoff=0.5)
    listing = ", ".join(names)
    return f"{near[0]!r} (known: {listing})" if near else f"one of {listing}"


# Options by what asks for them: name -> (type, default); ... where there is no default.
_OF_METHOD: dict[str, dict[str, tuple[Any, Any]]] = {
    "lcsb": {},
    # active_layers: None takes the run's layers per step. parameters: LoRA adapters, or the layers' own weights.
    "lisa": {
        "parameters": (Literal["adapters", "layers"], "adapters"),
        "active_layers": (_Count, None),
        "period": (PositiveInt, 5),
        "moments": (Literal["keep", "drop"], "keep"),
        "learning_rate": (_Rate, None),
    },
    "freeze": {"frozen": (Literal["lowest", "highest"], ...), "trained_layers": (_Count, None)},
    "surgical": {"third": (Literal["first", "middle", "last"], ...)},
    "cached": {},
    # None: the idle layers of the schedule are dropped; else each layer survives by chance, the last one with this
    "stochastic-depth": {"last_survival": (Annotated[float, Field(gt=0, lt=1)] | None, None)},
    "mezo": {"epsilon": (Annotated[float, Field(gt=0)], 1e-3), "learning_rate": (_Rate, None)},
}
_OF_BACKWARD: dict[str, dict[str, tuple[Any, Any]]] = {
    "certified": {"min_cosine": (_Cosine, 0.5), "refresh_every": (PositiveInt, 50)},
}
_OF_SCHEDULE: dict[str, dict[str, tuple[Any, Any]]] = {
    "importance": {"refresh_every": (PositiveInt, 50)},
    "fixed": {"fixed_layers": (Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)], ...)},
    "depth-weighted": {"depth_exponent": (float, 1.0)},
    "adaptive": {
        "min_cosine": (_Cosine, 0.5),
        "refresh_every": (PositiveInt, 50),
        "seconds_per_step": (_Rate, None),
    },
}

# What a method fixes of an arm: backward modes (the first is the default), idle policies, schedules. `any` is free.
_EXACT_OR_SHORTCUT = ("exact", "identity", "mlp")
_FIXES: dict[str, dict[str, tuple[str, ...]]] = {
    "lcsb": {},
    "lisa": {"backward": _EXACT_OR_SHORTCUT, "idle": ("frozen",), "schedule": ("cyclic",)},
    "freeze": {"backward": _EXACT_OR_SHORTCUT, "idle": ("frozen",), "schedule": ("cyclic",)},
    "surgical": {"backward": _EXACT_OR_SHORTCUT, "idle": ("frozen",), "schedule": ("cyclic",)},
    "cached": {"backward": ("exact",)},
    "stochastic-depth": {"backward": ("exact",)},
    "mezo": {"backward": ("full",), "schedule": ("cyclic",)},
}


@cache
def _options_model(method: str, backward: str, schedule: str) -> type[BaseModel]:
    fields = {
        **_OF_METHOD.get(method, {}),
        **_OF_BACKWARD.get(backward, {}),
        **_OF_SCHEDULE.get(schedule, {}),
    }
    return create_model("ArmOptions", __base__=Settings, **fields)  # type: ignore[no-any-return, call-overload]


class ArmConfig(Settings):
    """One arm of a run.

    Attributes:
        method: `lcsb`, or a baseline: `lisa` (a few random layers, drawn anew every `period` steps), `freeze` (the
            lowest or highest layers are never trained), `surgical` (only one contiguous third is), `cached` (idle
            layers reuse their last true gradient), `stochastic-depth` (the branches of idle layers are dropped in the
            forward pass too), `mezo` (zeroth order).
        backward, idle, schedule: as in LCSB; a method that has its own way of choosing or treating layers refuses
            another one.
        learning_rate_rule: the arm's learning rate as a function of the run's.
        options: what the method, the backward mode and the schedule leave open, by name; all of them are listed once
            the arm has been read.

    >>> ArmConfig(name="lisa", method="lisa", options={"period": 3}).options["active_layers"] is None
    True
    """

    name: Name
    method: MethodName = "lcsb"
    backward: Backward
    idle: Idle = "momentum"
    schedule: ScheduleName = "cyclic"
    learning_rate_rule: LearningRateRule = "eta"
    options: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Fill in what the method fixes, and check the options of this method, backward mode and schedule."""
        if not isinstance(given, Mapping):
            return given
        arm = dict(given)
        method = arm.get("method", "lcsb")
        if method not in get_args(MethodName):
            return {"backward": "exact", **arm}  # the field says so, and nothing more is asked for
        for field, allowed in _FIXES[method].items():
            found = arm.setdefault(field, allowed[0])
            if found not in allowed:
                raise ValueError(
                    f"{field} is {found!r}, expected {' or '.join(allowed)} for the method {method!r}"
                )
        cls._refuse_pairs(arm)
        options = arm.get("options", {})
        if isinstance(options, Mapping):
            arm["options"] = cls._checked(arm, options)
        return arm

    @staticmethod
    def _refuse_pairs(arm: Mapping[str, Any]) -> None:
        """Modes and schedules that exist and do not go together."""
        backward, schedule = arm.get("backward"), arm.get("schedule", "cyclic")
        if schedule == "greedy":
            raise ValueError(
                "schedule is 'greedy', which is for simulations only (it measures every block a step)"
            )
        if backward == "certified" and schedule in ("importance", "depth-weighted"):
            raise ValueError(f"backward 'certified' needs a schedule with blocks, found {schedule!r}")
        options = arm.get("options", {})
        budget = isinstance(options, Mapping) and options.get("seconds_per_step") is not None
        if schedule == "adaptive" and backward not in ("identity", "mlp") and not budget:
            raise ValueError(
                f"schedule 'adaptive' goes by the fidelity of identity or mlp, found backward {backward!r}; "
                "give options.seconds_per_step to adapt to a time budget"
            )

    @staticmethod
    def _checked(arm: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        keys = ("method", "lcsb"), ("backward", ""), ("schedule", "cyclic")
        what = tuple(str(arm.get(key, default)) for key, default in keys)
        model = _options_model(*what)
        unknown = [key for key in options if key not in model.model_fields]
        if unknown:
            takes = (
                expected(str(unknown[0]), model.model_fields) if model.model_fields else "no option at all"
            )
            words = f"method {what[0]!r}, backward {what[1]!r}, schedule {what[2]!r}"
            raise ValueError(f"unknown option {unknown[0]!r} for {words}, expected {takes}")
        try:
            return model.model_validate(dict(options)).model_dump(mode="json")
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "missing":
                raise ValueError(
                    f"options.{name} is missing for {what[0]!r} with schedule {what[2]!r}"
                ) from None
            message = f"{problem['msg'][0].lower()}{problem['msg'][1:]}"
            raise ValueError(f"options.{name} is {problem['input']!r}: {message}") from None

    def learning_rate(self, learning_rate: float, cycle_length: int) -> float:
        """The arm's own learning rate if it has one; else eta, eta / sqrt(p) or eta / p for the run's eta (T9)."""
        own = self.options.get("learning_rate")
        if own is not None:
            return float(own)
        divisor = {"eta": 1.0, "eta/sqrt(p)": math.sqrt(cycle_length), "eta/p": float(cycle_length)}
        return learning_rate / divisor[self.learning_rate_rule]

    @property
    def trains_whole_layers(self) -> bool:
        """Whether the weights themselves are trained and not adapters beside them."""
        return self.options.get("parameters") == "layers"


DEFAULT_ARMS: tuple[ArmConfig, ...] = (
    ArmConfig(name="full", backward="full"),
    ArmConfig(name="exact-momentum", backward="exact"),
    ArmConfig(name="exact-frozen", backward="exact", idle="frozen"),
    ArmConfig(name="identity-momentum", backward="identity"),
    ArmConfig(name="mlp-momentum", backward="mlp"),
    ArmConfig(name="full-eta-over-sqrt-p", backward="full", learning_rate_rule="eta/sqrt(p)"),
    ArmConfig(name="full-eta-over-p", backward="full", learning_rate_rule="eta/p"),
)


def _arm(name: str, **settings: Any) -> ArmConfig:
    return ArmConfig.model_validate({"name": name, **settings})


NAMED_ARMS: dict[str, ArmConfig] = {
    arm.name: arm
    for arm in (
        *DEFAULT_ARMS,
        _arm("identity-frozen", backward="identity", idle="frozen"),
        _arm("mlp-frozen", backward="mlp", idle="frozen"),
        _arm("certified", backward="certified"),
        _arm("certified-frozen", backward="certified", idle="frozen"),
        # schedules, all in mode exact and with idle momentum
        *(
            _arm(name, backward="exact", schedule=name)
            for name in ("reversed", "interleaved", "shuffled", "random", "importance", "depth-weighted")
        ),
        _arm("adaptive", backward="mlp", schedule="adaptive"),
        # baselines
        _arm("lisa", method="lisa"),
        _arm("lisa-layers", method="lisa", options={"parameters": "layers"}),
        _arm("freeze-lowest", method="freeze", options={"frozen": "lowest"}),
        _arm("freeze-highest", method="freeze", options={"frozen": "highest"}),
        *(
            _arm(f"surgical-{third}", method="surgical", options={"third": third})
            for third in ("first", "middle", "last")
        ),
        _arm("cached", method="cached"),
        _arm("stochastic-depth", method="stochastic-depth"),
        _arm("stochastic-depth-survival", method="stochastic-depth", options={"last_survival": 0.5}),
        _arm("mezo", method="mezo"),
    )
}
"""Every arm that a run can ask for by name alone."""
