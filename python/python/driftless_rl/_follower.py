"""A checkpoint directory at a run's newest version."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from . import _native


class Follower:
    """Keeps a checkpoint directory at the versions of a run. The command ``driftless follow`` also has engines load them.

    The directory is a plain Hugging Face checkpoint, and the follower's alone. A crash leaves it at the old version or at
    the new one, or without its ``config.json`` until the next follower has finished it. The constructor reads the directory;
    Ctrl-C is raised at its end.

    Args:
        store: where versions are, as for ``Publisher``.
        run: the run's name; it need not have begun.
        checkpoint_dir: the directory.
        id: the follower's name in the store, unique within the run; by default the host's name.
        model: the model within the run.
        hf_checkpoint: the checkpoint that version 0 refers to, when it was published by reference.
        trust_keys: files of public keys: only versions that one of them has signed are taken.
        plugin_dir: the directory of engines' plugins. While one is there, each delta is also prepared for them.

    Raises:
        BusyError: another follower has the directory.
        RefusedError: the directory holds another run or model, or is damaged.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        run: str,
        checkpoint_dir: str | os.PathLike[str],
        *,
        id: str | None = None,
        model: str = "policy",
        hf_checkpoint: str | os.PathLike[str] | None = None,
        trust_keys: Iterable[str | os.PathLike[str]] = (),
        plugin_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._native = _native.Follower(
            {
                "store": os.fspath(store),
                "run": run,
                "checkpoint_dir": checkpoint_dir,
                "id": id or os.uname().nodename,
                "model": model,
                "hf_checkpoint": hf_checkpoint,
                "trust_keys": list(trust_keys),
                "plugin_dir": plugin_dir,
            }
        )

    def advance(self, version: int | None = None) -> int:
        """Brings the directory to ``version``, or to the newest one, and returns it once it is durable.

        Ctrl-C is raised at its end.

        Raises:
            RunError: no such run or version yet.
            RefusedError: something stored is damaged, unsigned or of another run; the version before stays.
            StoreError, DeadlineError: the store or the file system failed; the version before stays.
            BusyError: another call is under way.
        """
        return self._native.advance(version)[0]

    def status(self) -> dict[str, Any]:
        """What the follower has and what hinders it, as ``GET /status`` of ``driftless follow --listen`` says it: ``newest``,
        ``applied`` (``version``, ``label``, ``manifest_digest``, …) and ``error``, among others. Never waits for a call."""
        return json.loads(self._native.status_json())

    def close(self) -> None:
        """Lets go of the directory."""
        self._native.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
