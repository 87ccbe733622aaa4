"""How this process was started, read from the environment alone: a launch without a meaning here ends before any model
loads, and before torch is imported.
"""

from __future__ import annotations

import os

#: environment variables by which `accelerate launch` asks for a way of sharding the model
_SHARDING = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DeepSpeed"}


def launched_processes() -> int:
    """Number of processes that `torchrun` or `accelerate launch` started for this run; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def refuse_unsupported_launch(one_process: str | None = None) -> None:
    """Refuse a launch whose meaning is not defined here. Reads the environment only, so it costs nothing.

    Args:
        one_process: name of what must run in a single process; None if several are welcome.

    Raises:
        ValueError: FSDP or DeepSpeed was asked for, or several processes for `one_process`.
    """
    for variable, name in _SHARDING.items():
        if os.environ.get(variable, "").lower() in ("1", "true", "yes"):
            raise ValueError(
                f"{name} ({variable} is set): not supported, since it shards or gathers all layers at every step; use "
                "plain data parallel (torchrun, or accelerate launch --multi_gpu or --cpu)"
            )
    if one_process is not None and launched_processes() > 1:
        raise ValueError(
            f"{one_process} was started in {launched_processes()} processes, expected 1; data parallel training is "
            "done by LCSBTrainer or `lcsb train`"
        )
