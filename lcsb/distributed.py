"""Data parallel training: the same adapters in every process, gradients of the selected layers averaged once a step.

DistributedDataParallel reduces every trainable parameter in every backward pass. Here only what the step trains is
sent: after the last backward pass of the step and before clipping, in one message a dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed, nn

from lcsb.launch import launched_processes
from lcsb.selective import SelectiveBackward


class Replicas:
    """The processes that train the same adapters on different data; with one process every method does nothing.

    Args:
        alone: do not look for other processes.

    Attributes:
        rank, size: this process and their number.
        bytes_sent: bytes of gradients that this process has given to the all-reduce so far.
    """

    def __init__(self, alone: bool = False) -> None:
        joined = not alone and distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if joined else 0
        self.size = distributed.get_world_size() if joined else 1
        self.bytes_sent = 0

    def attach(self, lcsb: SelectiveBackward) -> None:
        """Give every process rank 0's adapters, check that all run the same method, and let measured plans agree.

        Raises:
            RuntimeError: the processes differ in configuration, seed, step or adapters; names the ranks.
        """
        if self.size == 1:
            return
        parameters = lcsb.parameters()
        mine: dict[str, Any] = {
            "config": str(lcsb.config),
            "schedule": str(lcsb.schedule),
            "step": lcsb.t,
            "adapters": [(name, tuple(p.shape), str(p.dtype)) for name, p in parameters.items()],
        }
        theirs: list[Any] = [None] * self.size
        distributed.all_gather_object(theirs, mine)
        for rank, other in enumerate(theirs):
            for key, value in mine.items():
                if other[key] != value:
                    raise RuntimeError(
                        f"data parallel: rank {rank} has another {key} than rank {self.rank}; start every process with "
                        "the same settings and seed"
                    )
        for parameter in parameters.values():
            distributed.broadcast(parameter.data, src=0)
        lcsb.refresh.agree = self.agree

    def average_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace each parameter's gradient by the mean over the processes; a missing one counts as zero.

        Args:
            parameters: name -> parameter, the same on every process: what the step trains, and nothing else.
        """
        if self.size == 1:
            return
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters.values():
            by_type.setdefault(parameter.dtype, []).append(parameter)
        for group in by_type.values():
            for parameter in group:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            message = torch.cat([p.grad.flatten() for p in group])  # type: ignore[union-attr]
            distributed.all_reduce(message)
            self.bytes_sent += message.numel() * message.element_size()
            message /= self.size
            for parameter, mean in zip(group, message.split([p.numel() for p in group]), strict=True):
                parameter.grad.copy_(mean.view_as(parameter))  # type: ignore[union-attr]

    def agree(self, values: torch.Tensor, how: str) -> torch.Tensor:
        """The elementwise `mean`, `min` or `sum` of a tensor over the processes."""
        if self.size == 1:
            return values
        result = values.clone()
        operation = distributed.ReduceOp.MIN if how == "min" else distributed.ReduceOp.SUM
        distributed.all_reduce(result, operation)
        return result / self.size if how == "mean" else result

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.size > 1:
            distributed.barrier()


def join() -> Replicas:
    """Join the processes that a launcher started for this run (gloo on the CPU); alone, return a single replica."""
    if launched_processes() > 1 and not distributed.is_initialized():
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return Replicas()
