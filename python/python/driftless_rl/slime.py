"""A hook of slime that publishes what slime has written.

    --update-weight-transport disk --update-weight-disk-dir /shared/weights
    --custom-update-weight-post-write-path driftless_rl.slime.publish --custom-config-path driftless.yaml

with ``driftless_store`` and ``driftless_run`` in ``driftless.yaml``.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ._native import Published
from ._errors import UsageError
from ._publisher import Publisher

__all__ = ["publish"]

_log = logging.getLogger(__name__)
_VERSION = re.compile(r"weight_v(\d+)")
# slime calls a function, and a run has one publisher.
_publishers: dict[tuple[str, str], Publisher] = {}


def publish(args: Any, version_dir: str, rollout_engines: Sequence[Any]) -> Published | None:
    """Publishes the checkpoint in ``version_dir`` as the run's next version, on the first rank.

    slime calls it on every rank once all of them have written, and waits for it. The run is begun if the store has none
    of its name, and otherwise gone on with, as a trainer that was started again does. slime's number of the version is
    recorded as its step.

    Args:
        args: slime's. ``driftless_store`` and ``driftless_run`` are as for ``driftless_rl.Publisher``, and the mapping
            ``driftless_settings`` has further arguments of it.
        version_dir: the directory of the version.
        rollout_engines: not used: slime has its own engines load the directory.

    Returns:
        The version's numbers; None on the ranks behind the first.

    Raises:
        UsageError: a setting that is missing, or deltas of slime: ``driftless follow --layout slime`` follows these.
        driftless_rl.Error: what ``Publisher.publish`` raises ends the training.
    """
    # On every rank: one that goes on alone would wait for the first.
    mode = getattr(args, "update_weight_mode", "full")
    if mode != "full":
        expected = "`full`; `driftless follow --layout slime` follows slime's deltas"
        raise UsageError(f"--update-weight-mode: expected {expected}, found `{mode}`", kind="Usage", code=2)
    store, run = (_setting(args, name) for name in ("driftless_store", "driftless_run"))
    directory = Path(version_dir)
    number = _VERSION.fullmatch(directory.name)
    if number is None:
        text = f"version_dir: expected a directory named weight_v and a number, found `{version_dir}`"
        raise UsageError(text, kind="Usage", code=2)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        return None
    publisher = _publishers.get((store, run))
    if publisher is None:
        settings = {"hf_checkpoint": directory, "resume": "auto", **(getattr(args, "driftless_settings", None) or {})}
        publisher = _publishers[store, run] = Publisher(store, run, **settings)
    with contextlib.ExitStack() as files:
        published = publisher.publish(_tensors(directory, files), step=int(number[1]))
    _log.info("published %s as version %d, %d bytes", directory, published.version, published.publication_bytes)
    return published


def _setting(args: Any, name: str) -> str:
    found = getattr(args, name, None)
    if not found:
        raise UsageError(f"{name}: expected it in the file of --custom-config-path, found none", kind="Usage", code=2)
    return found


def _tensors(directory: Path, files: contextlib.ExitStack) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint, mapped."""
    from safetensors import safe_open

    found = []
    for path in sorted(directory.glob("*.safetensors")):
        file = files.enter_context(safe_open(path, framework="pt"))
        found += [(name, file.get_tensor(name)) for name in file.keys()]
    return found
