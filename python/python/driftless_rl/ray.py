"""Followers on the nodes of a Ray cluster.

    hosts = followers("s3://bucket/weights", "my-run", "/dev/shm/policy")
    ray.get([host.advance.remote() for host in hosts])

Trainers need nothing of their own: each actor of a training has a ``driftless_rl.Publisher``.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ._errors import BusyError
from ._follower import Follower

__all__ = ["followers"]

# Seconds for which a process that was killed may still hold its directory.
_HELD = 60.0


def followers(
    store: str | os.PathLike[str],
    run: str,
    checkpoint_dir: str | os.PathLike[str],
    *,
    resource: str | None = None,
    **settings: Any,
) -> list[Any]:
    """Starts an actor on each node that is alive, which keeps a checkpoint directory of that node at the run's versions.

    The actors have the methods of ``driftless_rl.Follower``: ``advance``, ``status`` and ``close``. They take no CPU of the
    cluster's count. One whose process ends is started again, waits up to a minute until the directory is free, and goes on
    with it; the call that it was in is repeated, three times at most. ``ray.get`` raises an error of driftless as what it is.

    Args:
        store, run, checkpoint_dir: as for ``driftless_rl.Follower``; the directory is the same path on every node.
        resource: only nodes that have this resource of Ray's, such as ``GPU``.
        settings: further arguments of ``driftless_rl.Follower``, save ``id``.

    Returns:
        Handles of the actors, by node id. An actor ends with its last handle.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and (resource is None or node["Resources"].get(resource))]
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=3, max_concurrency=2)(_Follower)
    arguments = (os.fspath(store), run, os.fspath(checkpoint_dir), settings)
    place = lambda node: NodeAffinitySchedulingStrategy(node, soft=False)
    return [actor.options(scheduling_strategy=place(node)).remote(node, *arguments) for node in sorted(nodes)]


class _Follower:
    """A follower in a process of Ray's."""

    def __init__(self, node: str, store: str, run: str, checkpoint_dir: str, settings: dict[str, Any]) -> None:
        # Hosts can have more than one node.
        name = f"{socket.gethostname()}-{node[:8]}"
        until = time.monotonic() + _HELD
        while True:
            try:
                self._follower = Follower(store, run, checkpoint_dir, id=name, **settings)
                return
            except BusyError:
                # Ray does not start an actor again whose creation fails.
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def advance(self, version: int | None = None) -> int:
        return self._follower.advance(version)

    def status(self) -> dict[str, Any]:
        return self._follower.status()

    def close(self) -> None:
        self._follower.close()
