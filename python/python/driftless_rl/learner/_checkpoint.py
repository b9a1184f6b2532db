"""Training checkpoints: masters, moments and the loop's progress, all or nothing.

    <save>/checkpoint-00000007/rank-0.safetensors   master/<name>, mean/<name>, square/<name>: f32, the rows of rank 0
    <save>/checkpoint-00000007/state.json           optimiser steps, ranks, what model it is of, progress

A directory is written beside, synced and renamed, so that one with this name is whole. The one with the highest number is
the newest. A run goes on with any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from ._layout import sync, sync_entry
from ._optimizer import AdamW, State
from ._ranks import Ranks, Refused

PREFIX, PARTIAL, STATE = "checkpoint-", "partial", "state.json"
PARTS = ("master", "mean", "square")


def save(directory: Path, optimizer: AdamW, progress: Any, keep: int, ranks: Ranks) -> None:
    """Saves the next checkpoint below ``directory``, then deletes all but the newest ``keep``."""
    partial = directory / PARTIAL

    def begin() -> None:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write() -> None:
        tensors = {
            f"{part}/{state.name}": getattr(state, part).reshape(_rows(state)).cpu()
            for state in optimizer.states
            for part in PARTS
        }
        save_file(tensors, partial / f"rank-{ranks.rank}.safetensors")
        sync_entry(partial / f"rank-{ranks.rank}.safetensors")

    def finish() -> None:
        if ranks.rank == 0:
            state = {"steps": optimizer.steps, "ranks": ranks.size, "model": _model(optimizer), "progress": progress}
            (partial / STATE).write_text(json.dumps(state))
            sync(partial)
            found = _found(directory)
            partial.rename(directory / f"{PREFIX}{found[-1][0] + 1 if found else 1:08}")
            sync_entry(directory)
            for _, old in _found(directory)[: -max(keep, 1)]:
                shutil.rmtree(old)

    for work in (begin, write, finish):
        ranks.together(work)


def load(directory: Path, optimizer: AdamW) -> Any:
    """Puts the newest checkpoint into ``optimizer`` and the model, and returns its progress; None if there is none.

    Raises:
        Refused: it is of another model, or damaged.
    """
    found = _found(directory)
    if not found:
        return None
    path = found[-1][1]
    try:
        stored = json.loads((path / STATE).read_text())
        expected, found = _model(optimizer), stored["model"]
        if found != expected:
            raise Refused(f"{path}: expected a checkpoint of the model {expected[:12]}, found one of {found[:12]}")
        files = [safe_open(path / f"rank-{rank}.safetensors", "pt") for rank in range(stored["ranks"])]
        read = [[_read(files, f"{part}/{state.name}", state) for part in PARTS] for state in optimizer.states]
    except (ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
        raise Refused(f"{path}: expected a whole checkpoint, found {type(error).__name__}: {error}") from error
    for state, parts in zip(optimizer.states, read, strict=True):
        for part, tensor in zip(PARTS, parts, strict=True):
            getattr(state, part).copy_(tensor.reshape(getattr(state, part).shape))
    optimizer.steps = stored["steps"]
    optimizer.write_weights()
    return stored["progress"]


def _rows(state: State) -> tuple[int, ...]:
    """The shape of this rank's part with a first extent, which a scalar lacks."""
    return tuple(state.master.shape) or (1,)


def _first_row(state: State) -> int:
    """The first row of this rank's part, as torch distributes them."""
    if not isinstance(state.parameter, DTensor):
        return 0
    mesh, rows = state.parameter.device_mesh, state.shape[0]
    return min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)


def _read(files: list[Any], name: str, state: State) -> torch.Tensor:
    """This rank's rows of a tensor, from the files of the ranks that saved it, each of which has some."""
    first, at, parts = _first_row(state), 0, []
    end = first + _rows(state)[0]
    for file in files:
        part = file.get_slice(name)
        rows = part.get_shape()[0]
        low, high = max(first - at, 0), min(end - at, rows)
        if low < high:
            parts.append(part[low:high])
        at += rows
    return torch.cat(parts) if parts else torch.empty(0)


def _model(optimizer: AdamW) -> str:
    """What a checkpoint has to agree with: names and shapes of the parameters."""
    described = sorted([state.name, list(state.shape)] for state in optimizer.states)
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _found(directory: Path) -> list[tuple[int, Path]]:
    """The checkpoints with their numbers, oldest first."""
    names = [path for path in directory.iterdir() if path.name.startswith(PREFIX)] if directory.exists() else []
    numbers = [(path.name.removeprefix(PREFIX), path) for path in names]
    return sorted((int(number), path) for number, path in numbers if number.isdigit())
