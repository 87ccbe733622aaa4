"""`EngineSelection`: `selective_backward` on an `EngineModel`, whose forward pass asks it for the selected layers."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from lcsb.config import LCSBConfig
from lcsb.selective import SelectiveBackward

if TYPE_CHECKING:
    from lcsb.engine.module import EngineModel


class EngineSelection(SelectiveBackward):
    """As `SelectiveBackward`, for a model that computes its own selective backward pass.

    Args:
        model: it holds the adapters by layer.
        config: must be the model's own, which the engine was planned for.
        seed, t: as in `selective_backward`.

    Raises:
        ValueError: another configuration than the model's; names the fields.
    """

    model: EngineModel

    def __init__(self, model: EngineModel, config: LCSBConfig, seed: int = 0, t: int = 0) -> None:
        differ = [
            f"{field.name} is {getattr(config, field.name)!r} here and {getattr(model.lcsb_config, field.name)!r} there"
            for field in dataclasses.fields(LCSBConfig)
            if getattr(config, field.name) != getattr(model.lcsb_config, field.name)
        ]
        if differ:
            raise ValueError(
                f"LCSBConfig: not the one that the EngineModel was built with: {'; '.join(differ)}"
            )
        # The layers are given, since there is no embedding module to find them beside.
        super().__init__(model, dataclasses.replace(config, ram_budget=None, layers=model.layers()), seed, t)
        self.config = config

    def __enter__(self) -> EngineSelection:
        if self.model.selection is not None:
            raise RuntimeError(
                "selective_backward: this model is already inside a selective_backward context"
            )
        self.model.selection = self
        return self

    def __exit__(self, *exception: object) -> None:
        self.roles = None
        self.model.selection = None

    def begin(self) -> tuple[int, ...]:
        """Select the layers of step t; returns them, ascending."""
        if self.model.selection is not self:
            raise RuntimeError("begin: not inside `with selective_backward(...)`")
        self._started = time.perf_counter()
        self.selected = self.refresh.begin(self.t)
        self._set_roles()
        return self.selected
