"""Parts of a model that torch has distributed over ranks, such as by FSDP2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ._errors import TensorError
from ._publisher import Slice

__all__ = ["slices"]


def slices(state: Mapping[str, Any], *, rank: int) -> list[tuple[str, Slice]]:
    """What this rank publishes of a state dict, so that all ranks together publish each element once.

    Of a ``DTensor`` it is the rank's shard, where the tensor is sharded along its first dimension only (FSDP2 does so); of
    replicas, the first one is published. What is no ``DTensor`` is published by rank 0. A rank's part is read in place.

        publisher = driftless_rl.Publisher(store, run, rank=rank, ranks=ranks, baseline_dir=…)
        publisher.publish(driftless_rl.torch.slices(model.state_dict(), rank=rank), step=step, attempt=f"{job}-{step}")

    Args:
        state: names to tensors, such as ``model.state_dict()`` on every rank.
        rank: this rank, as the publisher has it.

    Raises:
        TensorError: a tensor that is sharded along another dimension, by pieces of several meshes in another order, or that
            is a partial sum. ``tensor.redistribute(placements=[Shard(0)])`` makes one that can be published.
    """
    found = []
    for name, tensor in state.items():
        if not isinstance(tensor, DTensor):
            if rank == 0:
                found.append((name, Slice(tensor.detach(), tuple(tensor.shape), 0)))
            continue
        start = _first_row(name, tensor)
        if start is not None:
            row = math.prod(tensor.shape[1:])
            local = tensor.detach().to_local()
            if local.numel() > 0:
                found.append((name, Slice(local, tuple(tensor.shape), start * row)))
    return found


def _first_row(name: str, tensor: DTensor) -> int | None:
    """The first row of this rank's shard; None where another rank publishes it."""
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return None
    rows, start = (tensor.shape[0] if tensor.dim() > 0 else 1), 0
    for placement, at, ranks in zip(tensor.placements, place, mesh.shape, strict=True):
        # Other kinds of shards (strided ones, of FSDP2 over tensor parallelism) are in an order of their own.
        if type(placement) is Shard and placement.dim in (0, -tensor.dim()):
            chunk = math.ceil(rows / ranks)
            first = min(at * chunk, rows)
            start, rows = start + first, min(chunk, rows - first)
        elif isinstance(placement, Replicate):
            if at > 0:
                return None
        else:
            found = "a partial sum" if isinstance(placement, Partial) else f"{placement}"
            raise TensorError(
                f"tensor `{name}`: its placement is {found}, expected Shard(0) or Replicate: "
                "`tensor.redistribute(placements=[Shard(0)])`",
                kind="Tensor",
                tensor=name,
            )
    expected = tensor.to_local().shape[0] if tensor.dim() > 0 else 1
    if expected != rows:
        raise TensorError(
            f"tensor `{name}`: its shard has {expected} rows, expected {rows}, as torch distributes them",
            kind="Tensor",
            tensor=name,
        )
    return start
