"""Refreshes: what a step measures for the steps after it, and the selection and plans that follow from it.

Mode certified and the schedules importance and adaptive (by fidelity) go by measurements. Every R steps the backward
pass of the step's first micro-batch is an exact one over all layers. The selected layers keep their gradient, which is
then the true one; from the others it is taken away again at the end of that very backward pass, before anything clips
or reads a norm. The measurements themselves are made after it, from what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bcd_theory.partition import contiguous_blocks
from bcd_theory.schedule import Schedule
from lcsb.certified import Planner
from lcsb.config import LCSBConfig
from lcsb.local import RecordedPass, first, inner
from lcsb.measured import Measured, PlanRecord


class Refresh:
    """Measurements of one run.

    Args:
        config: the run's settings.
        schedule: which of the layers that can be trained, at step t.
        layers: all decoder layers.
        trainable: positions among them of the layers with adapters, which are what the schedule counts.
        adapters: one dict (name -> parameter) a decoder layer.

    Attributes:
        measured: what steps to come go by; part of a checkpoint.
        agree: several processes: makes one tensor of each process's, by "mean" or "min" (an all-reduce).
        pending: an exact backward pass is due in this step and has not ended.
        plans: the plans that this step has made.
    """

    def __init__(
        self,
        config: LCSBConfig,
        schedule: Schedule,
        layers: Sequence[nn.Module],
        trainable: Sequence[int],
        adapters: Sequence[Mapping[str, nn.Parameter]],
    ) -> None:
        self.config, self.schedule = config, schedule
        self.layers, self.trainable, self.adapters = layers, trainable, adapters
        self.measured = Measured()
        self.agree: Callable[[torch.Tensor, str], torch.Tensor] | None = None
        self.pending = False
        self.plans: tuple[PlanRecord, ...] = ()
        self._recorded: RecordedPass | None = None  # until this step's measurements are made

    # -- what the steps go by ------------------------------------------------------------------------------------

    def plan(self, selected: tuple[int, ...]) -> PlanRecord | None:
        """The plan in force for the selected layers (mode certified)."""
        return self.measured.plans.get(selected) if self.config.backward == "certified" else None

    def block_index(self, t: int) -> int | None:
        """Number of the block that is selected at step t; None for schedules that draw single layers."""
        return self.schedule.block_index(t, self.measured.schedule)

    def blocks(self, t: int) -> list[tuple[int, ...]]:
        """The blocks of the cycle that contains step t, as decoder layers."""
        blocks: Sequence[Sequence[int]] = self.schedule.blocks
        if self.schedule.name == "adaptive":
            k = self.schedule.layers_per_step_at(t, self.measured.schedule)
            blocks = contiguous_blocks(len(self.trainable), k)
        return [tuple(self.trainable[i] for i in block) for block in blocks]

    def _by_fidelity(self) -> bool:
        return self.schedule.name == "adaptive" and self.config.seconds_per_step is None

    # -- a step --------------------------------------------------------------------------------------------------

    def begin(self, t: int) -> tuple[int, ...]:
        """Select the layers of step t; all of them where the selection must wait for a measurement."""
        self._recorded, self.plans = None, ()
        every = t % self.config.refresh_every == 0
        drawing = self.schedule.name == "importance" and (every or not self.measured.schedule)
        positions: Sequence[int] = range(len(self.trainable))
        if not drawing:
            positions = self.schedule.selected(t, self.measured.schedule)
        selected = tuple(self.trainable[i] for i in positions)
        self.pending = drawing or (every and self._by_fidelity())
        if self.config.backward == "certified":
            # A block without a plan: the schedule has changed its blocks, or the last refresh was not finite.
            self.pending = every or selected not in self.measured.plans
        if self.pending:
            self._refuse_old_gradients()
            self._recorded = RecordedPass(len(self.layers))
        return selected

    def _refuse_old_gradients(self) -> None:
        for group in self.adapters:
            for name, parameter in group.items():
                if parameter.grad is not None and bool(parameter.grad.any()):
                    raise RuntimeError(
                        f"begin: {name} still has a gradient; call optimizer.zero_grad() between steps"
                    )

    def abandon(self) -> None:
        """Forget the step under way."""
        self.pending, self._recorded = False, None

    def recording(self, index: int) -> RecordedPass | None:
        """The pass to record layer `index`'s call in: the step's first forward pass, where one is due."""
        recorded = self._recorded
        if not self.pending or recorded is None:
            return None
        if index == 0 and recorded.calls and not recorded.open:
            raise RuntimeError(
                "a second forward pass before the backward pass of a refresh: its measurements would mix two batches; "
                "call loss.backward() after each forward pass (micro-batches may follow one another)"
            )
        return recorded if len(recorded.calls) == index else None

    def watch(self, recorded: RecordedPass, output: Any, ended: Callable[[], None]) -> None:
        """Record the gradient that will arrive at the newest layer's output; `ended` runs at the end of backward."""
        hidden = first(output)
        if not hidden.requires_grad:
            return

        def top_reached() -> None:
            if self.pending:
                torch.autograd.Variable._execution_engine.queue_callback(ended)

        recorded.watch(hidden, None if recorded.open else top_reached)

    def end_of_pass(self, t: int, selected: tuple[int, ...]) -> tuple[int, ...]:
        """At the end of the exact backward pass: draw what waited for it, take the gradients of idle layers away.

        Returns:
            The selected layers.
        """
        recorded = self._recorded
        if not self.pending or recorded is None:
            return selected
        self.pending = False
        truth = recorded.truth
        for index in self.trainable:
            truth[index] = {name: p.grad for name, p in self.adapters[index].items() if p.grad is not None}
        if self.schedule.name == "importance":
            selected = self._draw(t, truth) or selected
            self._recorded = None
        chosen = set(selected)
        for index in self.trainable:
            for name, parameter in self.adapters[index].items():
                if index not in chosen:
                    parameter.grad = None
                elif self._recorded is not None and name in truth[index]:
                    truth[index][name] = truth[index][name].clone()  # more micro-batches may be added to it
        return selected

    def _norm(self, gradient: Mapping[str, torch.Tensor]) -> float:
        """2-norm of one layer's gradient; under several processes, of its mean over them."""
        if self.agree is None or not gradient:
            return inner(gradient, gradient) ** 0.5
        flat = torch.cat([g.flatten() for g in gradient.values()])
        return float(self.agree(flat, "mean").double().norm())

    def _draw(self, t: int, truth: Sequence[Mapping[str, torch.Tensor]]) -> tuple[int, ...] | None:
        norms = torch.tensor([self._norm(truth[i]) for i in self.trainable], dtype=torch.float64)
        if not bool(torch.isfinite(norms).all()):
            return None  # the step will not be taken: the gradient of all layers is not finite
        self.measured.schedule = {t: norms.tolist()}
        return tuple(self.trainable[i] for i in self.schedule.selected(t, self.measured.schedule))

    def planner(self) -> Planner | None:
        """Backward passes in any plan on this step's exact pass; None before its end or if it was not finite."""
        recorded = self._recorded
        if self.pending or recorded is None:
            return None
        agree = self.agree
        lowest = None if agree is None else (lambda values: agree(values, "min"))
        complete = torch.tensor([recorded.complete(min(self.trainable))], dtype=torch.float64)
        if not (complete if lowest is None else lowest(complete)):  # every process, or none
            return None
        return Planner(
            recorded, self.layers, self.adapters, self.config.min_cosine, self.config.cosine_margin, lowest
        )

    def finish(self, t: int) -> bool:
        """Make the step's measurements, if an exact pass has ended; returns whether there were any to make."""
        planner = self.planner()
        if not self.pending:
            self._recorded = None
        if planner is None:
            return False  # none was due, or it was not finite: the step is not taken, or the old plans stay
        if self._by_fidelity():
            mode = self.config.backward
            cosines = [planner.measure(block, planner.uniform(block, mode)) for block in self.blocks(t)]
            self.measured.schedule[t + 1] = [value for block in cosines for _, value in sorted(block.items())]
            return True
        old = self.measured.plans
        plans = [planner.plan(block, t, old.get(block)) for block in self.blocks(t)]
        self.measured.plans = {plan.block: plan for plan in plans}
        self.plans = tuple(plans)
        return True

    def note_seconds(self, t: int, seconds: float) -> None:
        """Note what step t took (schedule adaptive by a time budget)."""
        if self.schedule.name != "adaptive" or self._by_fidelity():
            return
        measured = self.measured
        measured.cycle_seconds.append(seconds)
        if self.block_index(t) == len(self.blocks(t)) - 1:
            values = torch.tensor(measured.cycle_seconds, dtype=torch.float64)
            if self.agree is not None:
                values = self.agree(values, "mean")
            # Recorded at the first step of the next cycle, which is the first to go by it.
            measured.schedule[t + 1], measured.cycle_seconds = values.tolist(), []
