"""Checkpoints of ``torch.distributed.checkpoint`` (DCP), published one tensor after the other.

    publisher.publish(dcp_tensors("checkpoints/step-10", prefix="model."), step=10)
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ._errors import StoreError, UsageError
from ._publisher import LazyTensor

__all__ = ["dcp_tensors"]


def dcp_tensors(
    checkpoint: str | os.PathLike[str],
    *,
    prefix: str = "",
    dtype: torch.dtype | None = None,
) -> dict[str, LazyTensor]:
    """The tensors of a checkpoint directory, each put together from the shards that ranks saved when it is published.

    Memory holds a few tensors at a time, as the publisher's ``buffer_bytes`` says. torch reads the checkpoint's metadata
    by pickle: read only what you have written.

    Args:
        checkpoint: the directory that ``torch.distributed.checkpoint.save`` wrote.
        prefix: only tensors whose names begin so, without it: ``model.`` of ``{"model": …, "optimizer": …}``.
        dtype: floating-point tensors as this; by default as they were saved.

    Raises:
        UsageError: no checkpoint there, or none of its tensors begins so.
    """
    reader = _Reader(checkpoint)
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
    lazy = {}
    for name, entry in chosen.items():
        kind = entry.properties.dtype
        kind = dtype if dtype is not None and kind.is_floating_point else kind
        lazy[name[len(prefix) :]] = LazyTensor(entry.size, kind, functools.partial(_read, reader, name, entry, kind))
    return lazy


class _Reader(FileSystemReader):
    """One that reads the metadata once: they are as large as a checkpoint has tensors."""

    @functools.cached_property
    def _found(self) -> Any:
        return super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self._found


def _read(reader: _Reader, name: str, entry: TensorStorageMetadata, kind: torch.dtype) -> torch.Tensor:
    """A tensor, put together from its shards."""
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    try:
        with warnings.catch_warnings():
            # That one process reads it is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(state, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError) as error:
        raise StoreError(f"checkpoint `{reader.path}`: `{name}` could not be read: {_cause(error)}", kind="Dcp") from error
    return state[name].to(kind)


def _cause(error: BaseException) -> Any:
    """What the first rank raised."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error
