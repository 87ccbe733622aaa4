"""Layer-cyclic selective backpropagation on real quantised language models.

The names below are loaded on first use, so that `import lcsb` and `lcsb --help` bring in no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lcsb.callback import LCSBCallback as LCSBCallback
    from lcsb.config import LCSBConfig as LCSBConfig
    from lcsb.engine.module import EngineModel as EngineModel
    from lcsb.models import attach_lora as attach_lora
    from lcsb.models import load_quantized as load_quantized
    from lcsb.selective import SelectiveBackward as SelectiveBackward
    from lcsb.selective import StepRecord as StepRecord
    from lcsb.selective import selective_backward as selective_backward
    from lcsb.trainer import LCSBTrainer as LCSBTrainer

_HOME = {
    "EngineModel": "lcsb.engine.module",
    "LCSBConfig": "lcsb.config",
    "LCSBCallback": "lcsb.callback",
    "LCSBTrainer": "lcsb.trainer",
    "SelectiveBackward": "lcsb.selective",
    "StepRecord": "lcsb.selective",
    "attach_lora": "lcsb.models",
    "load_quantized": "lcsb.models",
    "selective_backward": "lcsb.selective",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lcsb' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
