"""Checkpoints of ``torch.distributed.checkpoint`` (DCP), published without a second model in memory.

    publisher.publish(dcp_tensors("checkpoints/step-10", "/scratch", prefix="model."), step=10)
"""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ._errors import StoreError, UsageError

__all__ = ["dcp_tensors"]


def dcp_tensors(
    checkpoint: str | os.PathLike[str],
    scratch_dir: str | os.PathLike[str],
    *,
    prefix: str = "",
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint directory, each put together from the shards that ranks saved.

    They are mapped files in ``scratch_dir``, which have no name any more: as large as the tensors on disk, they are gone
    with the last reference. Memory holds one shard at a time. torch reads the checkpoint's metadata by pickle: read only
    what you have written.

    Args:
        checkpoint: the directory that ``torch.distributed.checkpoint.save`` wrote.
        scratch_dir: a directory on a disk.
        prefix: only tensors whose names begin so, without it: ``model.`` of ``{"model": …, "optimizer": …}``.
        dtype: floating-point tensors as this; by default as they were saved.

    Raises:
        UsageError: no checkpoint there, or none of its tensors begins so.
        StoreError: a file that cannot be read or written.
    """
    reader = FileSystemReader(checkpoint)
    try:
        found = reader.read_metadata().state_dict_metadata
    except OSError as error:
        text = f"checkpoint: expected a directory of torch.distributed.checkpoint, found `{os.fspath(checkpoint)}`: {error}"
        raise UsageError(text, kind="Usage", code=2) from error
    tensors = {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
    chosen = {name: entry for name, entry in tensors.items() if name.startswith(prefix)}
    if not chosen:
        names = f"{len(tensors)} tensors, the first of which is `{next(iter(tensors))}`" if tensors else "no tensors"
        raise UsageError(f"prefix: expected one of tensors in `{os.fspath(checkpoint)}`, found {names}", kind="Usage", code=2)
    try:
        state = {name: _mapped(entry, scratch_dir, dtype) for name, entry in chosen.items()}
        with warnings.catch_warnings():
            # That one process reads it is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(state, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError) as error:
        text = f"checkpoint `{os.fspath(checkpoint)}`: it could not be read, or not be written to `{os.fspath(scratch_dir)}`"
        raise StoreError(f"{text}: {_cause(error)}", kind="Dcp") from error
    return {name[len(prefix) :]: tensor for name, tensor in state.items()}


def _mapped(entry: TensorStorageMetadata, directory: str | os.PathLike[str], dtype: torch.dtype | None) -> torch.Tensor:
    """Room for a tensor in a file that has no name."""
    kind = entry.properties.dtype
    kind = dtype if dtype is not None and kind.is_floating_point else kind
    elements = entry.size.numel()
    if elements == 0:
        return torch.empty(entry.size, dtype=kind)
    with tempfile.NamedTemporaryFile(dir=directory, prefix="driftless-dcp-") as file:
        # The disk is asked for the room now: a page that it could not give later would end the process.
        os.posix_fallocate(file.fileno(), 0, elements * kind.itemsize)
        return torch.from_file(file.name, shared=True, size=elements, dtype=kind).view(entry.size)


def _cause(error: BaseException) -> Any:
    """What the first rank raised."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error
