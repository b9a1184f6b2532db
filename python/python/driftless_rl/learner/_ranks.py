"""The processes of a learner: one, or the ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .._errors import Error

T = TypeVar("T")


class Refused(Exception):
    """What the learner cannot do, in words: what, where, expected, found. Nothing has changed."""


class Ranks:
    """This process among those of the learner. Numbers and words go over gloo, gradients over the model's own group.

    Attributes:
        rank, size: this process, from 0, and how many there are.
        device: where its part of the model is.
        deadline: seconds that ranks wait for each other.
    """

    def __init__(self, rank: int, size: int, device: torch.device, deadline: float, group: Any = None) -> None:
        self.rank, self.size, self.device, self.deadline = rank, size, device, deadline
        self._group = group

    @classmethod
    def join(cls, fsdp: bool, device: str, deadline: float) -> Ranks:
        """Meets the other ranks, where there are some."""
        rank, size, local = (int(os.environ.get(name, default)) for name, default in
                             (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        if not fsdp:
            if size > 1:
                raise Refused(f"--fsdp: expected with several ranks, found {size} ranks without it")
            return cls(0, 1, torch.device("cuda" if cuda else "cpu"), deadline)
        if "MASTER_ADDR" not in os.environ:
            raise Refused("--fsdp: expected a start by torchrun, found no MASTER_ADDR")
        if cuda:
            torch.cuda.set_device(local)
        timeout = timedelta(seconds=deadline)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
        group = dist.new_group(backend="gloo", timeout=timeout)
        return cls(rank, size, torch.device("cuda", local) if cuda else torch.device("cpu"), deadline, group)

    @property
    def sharded(self) -> bool:
        """Whether the model is distributed; FSDP2 does so on one rank too."""
        return self._group is not None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type | None, *raised: object) -> None:
        # After a failure others may be in a collective that this one will not take part in.
        if self._group is not None and kind is None:
            dist.destroy_process_group()

    def tell(self, value: Any) -> Any:
        """What rank 0 gives, on every rank."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def together(self, work: Callable[[], T]) -> T:
        """Does ``work`` on every rank. What one refuses or cannot do, all raise as ``Refused``."""
        value, error = None, None
        try:
            value = work()
        except (Refused, Error, OSError) as raised:
            error = str(raised)
        errors = [error]
        if self._group is not None:
            errors = [None] * self.size
            dist.all_gather_object(errors, error, group=self._group)
        found = list(dict.fromkeys(error for error in errors if error is not None))
        if found:
            raise Refused("; ".join(found))
        return value

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of f64 ``[n]`` on the CPU, in place."""
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """The largest over the ranks of f64 ``[n]`` on the CPU, in place."""
        if self._group is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values
