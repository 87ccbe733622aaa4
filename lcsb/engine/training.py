"""`lcsb train RUN --ram`: one arm of a run by the memory engine, in a process that imports torch alone.

The records, the rule for divergence and the adapter's format are those of `lcsb.train`; the loop is the same code. Idle
momentum's owed steps are taken at the end of each step, where their movement is recorded. What the engine does not
compute is refused before anything is written.
"""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bcd_theory.geometry import PROJECTIONS
from lcsb.arm_loop import ArmLoop, OpenArm, Writer, open_arm
from lcsb.config import LCSBConfig
from lcsb.data import IGNORED, Corpus, Examples
from lcsb.engine.adapter_start import drawn_adapters
from lcsb.engine.architecture import Architecture
from lcsb.engine.engine import Engine, Gradient, LoRASettings, Residency
from lcsb.engine.find_packed import packed_model
from lcsb.engine.mapped import MappedFolder
from lcsb.engine.planner import Plan, plan
from lcsb.engine.ram import peak_bytes, tame_allocator
from lcsb.engine.saving import load_state, save_adapter, save_state
from lcsb.engine.states import AdamWSettings, LayerStates
from lcsb.engine.tokens import read_windows
from lcsb.launch import launched_processes
from lcsb.selective import NonFiniteError
from reports.records import ArmConfig, RunConfig, RunFolder, read_metrics

THREADS = 1  # as every process of a run
WINDOWS = "windows.safetensors"


@dataclass(frozen=True)
class Trained:
    """How a budgeted training ended.

    Attributes:
        status: `done` or `diverged`.
        plan: what was kept in memory; None where the arm was finished already.
        peak_bytes: VmHWM of this process.
    """

    status: str
    plan: Plan | None
    peak_bytes: int


def train_within(folder: RunFolder, arm_name: str, seed: int, ram: int | None) -> Trained:
    """Train one arm with one seed by the memory engine, from its newest checkpoint if there is one.

    Args:
        ram: bytes of the whole process; None: all stays in memory.

    Raises:
        ValueError: what `lcsb.train.train_arm` refuses; an arm or setting that the engine does not compute; no packed
            form of the model.
        BudgetError: a budget that cannot be met; says the least that could.
    """
    opened = open_arm(folder, arm_name, seed)
    if opened.status is not None:
        return Trained(opened.status, None, peak_bytes())
    refuse(opened.config, opened.arm)
    torch.set_num_threads(THREADS)
    model = packed_model(opened.config.model)
    architecture = checked_architecture(opened.config, model)
    config = lcsb_config(opened.config, opened.arm, architecture.layers)
    corpus = read_windows(opened.config, model, folder.root / WINDOWS)
    scratch = opened.place.root / "scratch"
    floor, chunk = _as_begun(opened)
    found = planned(opened.config, config, model, architecture, ram, scratch, floor, chunk)
    if found.tame:
        tame_allocator()
    loop = _EngineArm(opened, model, config, corpus, found.residency, ram)
    blocks = [list(block) for block in loop.engine.schedule.blocks]
    header = opened.header(
        blocks, architecture.layers, "none: the memory engine keeps no copies to check T6 against", ram=ram,
        plan={"peak": found.peak.total, "floor": floor, "residency": found.as_dict()["residency"] | {"folder": None}},
    )  # fmt: skip
    try:
        status = loop.run(header)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Trained(status, found, peak_bytes())


def _as_begun(opened: OpenArm) -> tuple[int, int | None]:
    """Floor to plan with, and the head's chunk where a checkpoint goes on: both as the run began.

    The chunk gives the order of the head's sums; chosen anew (another budget, a floor that is a page larger), it would
    change the last bits of every number after the resume.
    """
    if opened.place.checkpoints():
        header = read_metrics(opened.place.metrics).header
        begun = getattr(header, "plan", None)
        if begun is not None:
            return begun.get("floor", peak_bytes()), begun["residency"]["chunk_logits"]
    return peak_bytes(), None


def refuse(config: RunConfig, arm: ArmConfig) -> None:
    """Raise ValueError for the first setting that the engine does not compute."""
    lora = config.lora
    targets = [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules
    odd = [name for name in targets if name not in (*PROJECTIONS, "all-linear")]
    reasons = (
        (arm.method != "lcsb", f"arm {arm.name}: method is {arm.method!r}", "lcsb"),
        (
            arm.backward == "certified",
            f"arm {arm.name}: backward is 'certified'",
            "full, exact, identity or mlp",
        ),
        (
            arm.schedule in ("importance", "adaptive"),
            f"arm {arm.name}: schedule is {arm.schedule!r}",
            "one that measures nothing",
        ),
        (config.quantization != "nf4", f"quantization is {config.quantization!r}", "nf4"),
        (config.double_quant, "double_quant is true", "false"),
        (config.compute_dtype == "bfloat16", "compute_dtype is bfloat16", "auto or float32"),
        (lora.dropout > 0, f"lora.dropout is {lora.dropout}", "0"),
        (lora.use_rslora, "lora.use_rslora is true", "false (choose alpha for the same scale)"),
        (bool(odd), f"lora.target_modules has {odd[0] if odd else ''!r}", ", ".join(PROJECTIONS)),
        (launched_processes() > 1, f"started in {launched_processes()} processes", "1"),
    )
    for wrong, found, expected in reasons:
        if wrong:
            raise ValueError(f"{found}: within a memory budget expected {expected}; or train without --ram")


def checked_architecture(config: RunConfig, model: Path) -> Architecture:
    """Architecture of a packed folder. Raises ValueError for windows longer than the model takes."""
    mapped = MappedFolder(model)
    longest = mapped.config.get("max_position_embeddings")
    if longest is not None and config.data.tokens > longest:
        raise ValueError(
            f"data.tokens: found {config.data.tokens}, expected at most {longest}, the longest of {config.model}"
        )
    return Architecture.from_config(mapped.config, str(model / "config.json"))


def lcsb_config(config: RunConfig, arm: ArmConfig, layers: int) -> LCSBConfig:
    """The arm's settings on a model of so many layers, as `lcsb.methods.open_method` has them."""
    k = None if arm.schedule == "fixed" else config.layers_per_step(layers)
    return LCSBConfig(arm.backward, arm.idle, arm.schedule, layers_per_step=k, **arm.options)


def lora_settings(config: RunConfig) -> LoRASettings:
    """Rank, alpha and targets."""
    named = config.lora.target_modules
    chosen = [named] if isinstance(named, str) else named
    targets = PROJECTIONS if named == "all-linear" else tuple(p for p in PROJECTIONS if p in chosen)
    return LoRASettings(config.lora.r, config.lora.alpha, targets)


def planned(
    config: RunConfig,
    lcsb: LCSBConfig,
    model: Path,
    architecture: Architecture,
    ram: int | None,
    scratch: Path,
    floor: int | None = None,
    chunk: int | None = None,
) -> Plan:
    """The plan of a run's steps in this process. `floor`: its memory before (default: so far); `chunk` as in `plan`."""
    mapped = MappedFolder(model)
    return plan(
        architecture,
        tokens=config.data.tokens,
        rows=config.batch_size,
        config=lcsb,
        lora=lora_settings(config),
        ram=ram,
        floor=peak_bytes() if floor is None else floor,
        folder_bytes=sum(mapped.nbytes(name) for name in mapped.names()),
        scratch=scratch,
        chunk=chunk,
    )


def make_engine(
    config: RunConfig, lcsb: LCSBConfig, model: Path, residency: Residency, seed: int, learning_rate: float
) -> Engine:
    """An engine with the run's adapters at their start and AdamW's settings."""
    if not residency.states and residency.folder is not None:
        shutil.rmtree(residency.folder, ignore_errors=True)  # of a killed process
    if residency.folder is not None:
        residency.folder.mkdir(parents=True, exist_ok=True)
    settings = config.optimizer
    adamw = AdamWSettings(learning_rate, settings.betas, settings.eps, settings.weight_decay)
    engine = Engine(
        model, lcsb, lora=lora_settings(config), optimizer=adamw, residency=residency, seed=seed,
        compute_dtype="float32",
    )  # fmt: skip
    for index, flat in enumerate(drawn_adapters(engine.layout, engine.states.layers, seed)):
        engine.states.x(index).copy_(flat)
        engine.states.release(index)
    return engine


def engine_batch(windows: Tensor | Examples) -> tuple[Tensor, Tensor]:
    """ids and labels [rows, tokens] of windows, or of a task's rows, cut to the longest of the batch."""
    if isinstance(windows, Tensor):
        return windows, windows
    width = int(windows.attention_mask.sum(dim=1).max())
    return windows.input_ids[:, :width], windows.labels[:, :width]


def engine_held_out_loss(engine: Engine, windows: Tensor | Examples, rows: int) -> tuple[float, int]:
    """Mean loss per target over held-out windows, in nats, and the number of targets; `rows` windows at a time."""
    total, count = 0.0, 0
    for part in windows.split(rows):
        loss, targets = engine.evaluate(*engine_batch(part))
        total, count = total + loss, count + targets
    return total / count, count


class MovingStates:
    """`LayerStates` that note how far each layer has moved, |x_after - x_before|_2, since `taken` was last called."""

    def __init__(self, states: LayerStates) -> None:
        self._states = states
        self._moved = [0.0] * states.layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._states, name)

    def step(self, layer: int, gradient: Tensor, settings: AdamWSettings) -> None:
        """As there."""
        before = self._states.x(layer).clone()
        self._states.step(layer, gradient, settings)
        self._moved[layer] = float((self._states.x(layer) - before).double().norm())

    def idle_steps(self, layer: int, count: int, settings: AdamWSettings) -> None:
        """As there."""
        if count < 1:
            return
        before = self._states.x(layer).clone()
        self._states.idle_steps(layer, count, settings)
        self._moved[layer] = float((self._states.x(layer) - before).double().norm())

    def taken(self) -> list[float]:
        """The movements, which are then forgotten."""
        moved, self._moved = self._moved, [0.0] * len(self._moved)
        return moved


class _EngineArm(ArmLoop):
    """Steps by the memory engine."""

    def __init__(
        self,
        opened: OpenArm,
        model: Path,
        lcsb: LCSBConfig,
        corpus: Corpus,
        residency: Residency,
        ram: int | None,
    ) -> None:
        self.engine = make_engine(opened.config, lcsb, model, residency, opened.seed, opened.learning_rate)
        super().__init__(opened, self.engine.states.layers)
        self.corpus, self.ram = corpus, ram
        self.windows = corpus.held_out[: self.config.eval_windows]
        self.states = MovingStates(self.engine.states)
        self.engine.states = self.states  # type: ignore[assignment]

    def _restore(self, checkpoint: Path) -> dict[str, Any]:
        return load_state(checkpoint, self.engine)

    def _step(self, writer: Writer) -> None:
        engine, t = self.engine, self.progress.t
        begin = time.perf_counter()
        found = self._gradient(t)
        if not math.isfinite(found.loss):
            raise NonFiniteError(f"step {t}: the training loss is {found.loss}; the step was not taken")
        record = engine.take_step(found)
        if engine.config.idle == "momentum":
            engine.settle()
        seconds = time.perf_counter() - begin
        moved = self.states.taken()
        idle = math.sqrt(sum(m * m for i, m in enumerate(moved) if i not in record.selected))
        writer.write(
            {
                "kind": "step",
                "t": t,
                "loss": found.loss,
                "lcsb/block": record.block,
                "lcsb/selected": list(record.selected),
                "lcsb/grad_norm": record.grad_norm,
                "lcsb/displacement_idle": idle,
                "displacement": moved,
                "seconds": seconds,
            }
        )
        self.progress.add(found.loss, moved, seconds)

    def _gradient(self, t: int) -> Gradient:
        """Of the mean loss over the targets of all the step's batches."""
        config = self.config
        rows = self.corpus.batch(self.seed, t, config.batch_size * config.accumulation)
        batches = [engine_batch(part) for part in rows.split(config.batch_size)]
        if len(batches) == 1:
            return self.engine.loss_and_gradient(*batches[0])
        targets = sum(int((labels[:, 1:] != IGNORED).sum()) for _, labels in batches)
        whole = Gradient(0.0, targets)
        for batch in batches:
            part = self.engine.loss_and_gradient(*batch)
            weight = part.targets / targets
            whole.loss += part.loss * weight
            for index, gradient in part.by_layer.items():
                gradient.mul_(weight)
                there = whole.by_layer.get(index)
                whole.by_layer[index] = gradient if there is None else there.add_(gradient)
        return whole

    def _held_out_loss(self) -> tuple[float, int]:
        return engine_held_out_loss(self.engine, self.windows, self.config.batch_size)

    def _write_checkpoint(self, folder: Path, facts: dict[str, Any]) -> None:
        save_state(folder, self.engine, facts)

    def _layer_rms(self) -> list[float]:
        states = self.engine.states
        found = []
        for index, start in enumerate(drawn_adapters(self.engine.layout, states.layers, self.seed)):
            found.append(math.sqrt(float((states.x(index).double() - start.double()).square().mean())))
            states.release(index)
        return found

    def _save_trained(self) -> None:
        save_adapter(self.place.adapter, self.engine, self.config.model)

    def _closing(self, writer: Writer) -> dict[str, Any]:
        peak = peak_bytes()
        if self.ram is not None and peak > self.ram:
            writer.write(
                {
                    "kind": "event",
                    "t": self.progress.t,
                    "event": "over-budget",
                    "peak_bytes": peak,
                    "ram": self.ram,
                }
            )
        return {"peak_bytes": peak, "ram": self.ram}
