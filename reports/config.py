"""RunConfig: the settings of one run, from presets, a YAML file and `--set key=value` overrides."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from reports.arms import DEFAULT_ARMS as DEFAULT_ARMS
from reports.arms import NAMED_ARMS, Name, PositiveInt, Settings, expected
from reports.arms import ArmConfig as ArmConfig

Size = Literal["quick", "standard", "full"]


class LoraConfig(Settings):
    """LoRA adapters: rank r, scale alpha / r (alpha / sqrt(r) with `use_rslora`)."""

    r: PositiveInt = 16
    alpha: float = Field(default=32, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: str | list[str] = "all-linear"
    use_rslora: bool = False


class OptimizerConfig(Settings):
    """AdamW at a constant learning rate: no warm-up, no clipping."""

    name: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=1e-4, gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)  # a block not yet selected would be 0/0 at eps = 0
    weight_decay: float = Field(default=0.0, ge=0)


class DataConfig(Settings):
    """Corpus: 'pydoc', a task's name, the path of a UTF-8 text or JSONL file, or owner/name of the hub.

    Windows (of text) or rows (of a task) of `tokens` tokens at most. path: folder with the named tasks' files.
    rows: read at most so many rows.
    """

    source: str = "pydoc"
    path: str | None = None
    rows: PositiveInt | None = None
    tokens: Annotated[int, Field(ge=2)] = 128
    text_field: str = "text"
    held_out: float = Field(default=0.1, gt=0, lt=1)


def _arms_by_name(value: Any) -> Any:
    """Let an entry of `arms` be the name of a known arm, and `arms` a comma-separated list of names."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, Sequence):
        return value
    known = NAMED_ARMS
    arms: list[Any] = []
    for entry in value:
        if isinstance(entry, str) and entry not in known:
            raise ValueError(f"found the arm name {entry!r}, expected {expected(entry, known)}")
        arms.append(known[entry] if isinstance(entry, str) else entry)
    return arms


class RunConfig(Settings):
    """All settings of a run. p = `cycle_length`, N layers: k = ceil(N / p) layers a step."""

    name: Name = "validate"
    model: Annotated[str, Field(min_length=1)] = "smollm2-135m"
    quantization: Literal["nf4", "fp4", "int8"] | None = "nf4"
    double_quant: bool = False
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # arithmetic; auto is float32 on a CPU
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [0, 1, 2]  # noqa: RUF012
    steps: PositiveInt = 60
    cycle_length: PositiveInt = 4
    batch_size: PositiveInt = 1  # rows of one backward pass, over all processes
    accumulation: PositiveInt = 1  # backward passes of one step, each of batch_size rows
    eval_every: PositiveInt = 30
    eval_windows: PositiveInt = 8
    checkpoint_every: PositiveInt = 20
    recompute: bool = True  # of the timing and memory measurements: what a memory-bound device would run
    recompute_arms: bool = (
        False  # trajectories are the same bit for bit either way; without it they are faster
    )
    workers: PositiveInt = 2
    timing_repeats: PositiveInt = 3
    timing_cycle_lengths: Annotated[list[PositiveInt], Field(min_length=1)] = [1, 2, 4, 8]  # noqa: RUF012
    fidelity_batches: PositiveInt = 8
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    arms: Annotated[list[ArmConfig], Field(min_length=1), BeforeValidator(_arms_by_name)] = list(  # noqa: RUF012
        DEFAULT_ARMS
    )

    @model_validator(mode="after")
    def _unique(self) -> RunConfig:
        for field, values in (
            ("seeds", list(map(str, self.seeds))),
            ("timing_cycle_lengths", list(map(str, self.timing_cycle_lengths))),
            ("arms", [arm.name for arm in self.arms]),
        ):
            twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
            if twice is not None:
                raise ValueError(f"{field}: found {twice} twice, expected each once")
        return self

    @model_validator(mode="after")
    def _whole_layers_unquantised(self) -> RunConfig:
        whole = next((arm.name for arm in self.arms if arm.trains_whole_layers), None)
        if whole is not None and self.quantization is not None:
            raise ValueError(
                f"arm {whole} trains whole layers, which needs an unquantised base: found quantization "
                f"{self.quantization!r}, expected null (or parameters: adapters)"
            )
        return self

    @classmethod
    def preset(cls, size: str) -> RunConfig:
        """The settings of `size` quick, standard or full. Raises ValueError for another name."""
        if size not in PRESETS:
            raise ValueError(f"size is {size!r}, expected {expected(size, PRESETS)}")
        return cls.from_mapping(PRESETS[size], source=f"preset {size}")

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any], source: str = "settings") -> RunConfig:
        """Check `settings`. Raises ValueError: one line per wrong setting with the nearest known key."""
        try:
            return cls.model_validate(dict(settings))
        except ValidationError as error:
            lines = [_explain(problem, source) for problem in error.errors()]
            raise ValueError("\n".join(dict.fromkeys(lines))) from None

    @classmethod
    def read(cls, path: Path | str) -> RunConfig:
        """Read a YAML file. Raises ValueError that names the file and the setting."""
        return cls.from_mapping(read_yaml(Path(path)), source=str(path))

    @classmethod
    def build(
        cls, size: str = "standard", file: Path | str | None = None, overrides: Iterable[str] = ()
    ) -> RunConfig:
        """Preset, then the YAML file's settings, then `key=value` overrides; later ones win."""
        settings = cls.preset(size).to_mapping()
        source = f"preset {size}"
        if file is not None:
            _merge(settings, read_yaml(Path(file)))
            source = str(file)
            # Checked here, so that a mistake in the file is not blamed on --set.
            settings = cls.from_mapping(settings, source).to_mapping()
        overrides = list(overrides)
        for override in overrides:
            _override(settings, override)
        return cls.from_mapping(settings, "--set" if overrides else source)

    def override(self, overrides: Iterable[str]) -> RunConfig:
        """These settings with dotted `key=value` overrides, for example `optimizer.learning_rate=3e-4`."""
        settings = self.to_mapping()
        for override in overrides:
            _override(settings, override)
        return self.from_mapping(settings, "--set")

    def to_mapping(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars; `from_mapping` gives the same settings back."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The settings as YAML in the order of the fields."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False, allow_unicode=True)

    def layers_per_step(self, n_layers: int, cycle_length: int | None = None) -> int:
        """k = ceil(N / p). Raises ValueError when ceil(N / k) is not p, or p > N."""
        # Here, not above: the package behind it brings sympy and scipy, and reading settings must stay quick.
        from bcd_theory.partition import n_blocks

        p = self.cycle_length if cycle_length is None else cycle_length
        possible = sorted({n_blocks(n_layers, k) for k in range(1, n_layers + 1)})
        if p not in possible:
            near = min(possible, key=lambda q: (abs(q - p), q))
            raise ValueError(
                f"cycle_length is {p}, expected ceil({n_layers} / k) for some k; nearest: {near}"
            )
        return -(-n_layers // p)


PRESETS: dict[str, dict[str, Any]] = {
    # One seed: enough to see that everything runs, never enough for a verdict.
    "quick": {
        "name": "quick", "seeds": [0], "steps": 8, "eval_every": 4, "eval_windows": 4, "checkpoint_every": 4,
        "timing_repeats": 1, "timing_cycle_lengths": [1, 4], "fidelity_batches": 2,
    },
    "standard": {},
    "full": {
        "name": "full", "seeds": [0, 1, 2, 3, 4], "steps": 200, "eval_windows": 64, "timing_repeats": 5,
    },
}  # fmt: skip


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping; an empty one is an empty mapping. Raises ValueError that names the file."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as text ({error})") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: found {type(settings).__name__}, expected a mapping of settings")
    return settings


def _merge(settings: dict[str, Any], newer: Mapping[str, Any]) -> None:
    for key, value in newer.items():
        if isinstance(value, Mapping) and isinstance(settings.get(key), dict):
            _merge(settings[key], value)
        else:
            settings[key] = value


def _override(settings: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError(f"--set {override}: expected key=value, for example optimizer.learning_rate=3e-4")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {key}: {text!r} is not YAML: {' '.join(str(error).split())}") from None
    *parents, last = key.split(".")
    place: Any = settings
    for depth, part in enumerate(parents):
        place = _step_into(place, part, ".".join(parents[: depth + 1]), override)
        if not isinstance(place, (dict, list)):
            raise ValueError(f"--set {override}: {'.'.join(parents[: depth + 1])} has no settings inside")
    if isinstance(place, list):
        _step_into(place, last, key, override)
        i = _index(place, last)
        assert i is not None  # _step_into has refused it otherwise
        place[i] = value
    elif last not in place and parents[-1:] != ["options"]:  # an arm checks its options itself
        raise ValueError(f"--set {override}: unknown key {key!r}, expected {expected(last, place)}")
    else:
        place[last] = _arms_in_full(value) if key == "arms" else value


def _arms_in_full(value: Any) -> Any:
    """Arms given by name as mappings, so that a later override finds their settings; what is wrong stays as it is."""
    try:
        arms = _arms_by_name(value)
    except ValueError:
        return value
    if not isinstance(arms, list):
        return value
    return [arm.model_dump(mode="json") if isinstance(arm, ArmConfig) else arm for arm in arms]


def _step_into(place: Any, part: str, key: str, override: str) -> Any:
    if isinstance(place, list):
        i = _index(place, part)
        if i is None:
            names = [entry["name"] for entry in place if isinstance(entry, dict) and "name" in entry]
            choices = expected(part, names) if names else f"0 to {len(place) - 1}"
            raise ValueError(f"--set {override}: no entry {key!r}, expected {choices}")
        return place[i]
    if part not in place:
        raise ValueError(f"--set {override}: unknown key {key!r}, expected {expected(part, place)}")
    return place[part]


def _index(place: Sequence[Any], part: str) -> int | None:
    """A list entry by its number or, for arms, by its name."""
    for i, entry in enumerate(place):
        if part == str(i) or (isinstance(entry, dict) and entry.get("name") == part):
            return i
    return None


def _explain(problem: Any, source: str) -> str:
    location: tuple[Any, ...] = problem["loc"]
    # Parts of a union or a validator's name are no keys of the file.
    where = ".".join(str(part) for part in location if not (isinstance(part, str) and "[" in part))
    found = problem["input"]
    if problem["type"] == "extra_forbidden":
        model = _model_at(location[:-1])
        return f"{source}: unknown key {where!r}, expected {expected(str(location[-1]), model.model_fields)}"
    if problem["type"] == "literal_error":
        known = [part.strip("' ") for part in problem["ctx"]["expected"].replace(" or ", ", ").split(",")]
        return f"{source}: {where} is {found!r}, expected {expected(str(found), known)}"
    if problem["type"] == "missing":
        return f"{source}: {where} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{source}: {where + ': ' if where else ''}{message}"
    return f"{source}: {where} is {found!r}: {message[0].lower()}{message[1:]}"


def _model_at(location: Sequence[Any]) -> type[BaseModel]:
    model: type[BaseModel] = RunConfig
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, tuple, Annotated, Union, types.UnionType):
        return next(filter(None, map(_model_in, get_args(annotation))), None)
    return None
