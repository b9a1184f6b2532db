"""``python -m driftless_rl.environment KIND:NAME [--args JSON]``: the process that ``--environment`` starts."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import sys
from typing import Any, Protocol

from driftless_rl.hook import Failed, Sample, Turn, generate, prompt, reward
from driftless_rl.hook._serve import serve

KINDS = ("openenv", "tools", "verifiers")
# Answers that are open at once, each with programs of its own on this host.
OPEN = 128


class Environment(Protocol):
    """What a module of a kind has."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None: ...

    def row(self, number: int) -> dict[str, Any]:
        """The prompt of a number, with the metadata that an answer to it needs; always the same one."""

    async def answer(self, turn: Turn) -> dict[str, Any]:
        """Has the policy play, and gives the ``reward`` with what else is known of it."""


def _settings(text: str) -> dict[str, Any]:
    settings = json.loads(text)
    if not isinstance(settings, dict):
        raise argparse.ArgumentTypeError("expected an object of JSON")
    return settings


def _register(kind: str, name: str, settings: dict[str, Any]) -> None:
    @functools.cache
    def environment() -> Environment:
        return importlib.import_module(f"driftless_rl.environment.{kind}").Environment(name, settings)

    @prompt
    async def row(number: int) -> dict[str, Any]:
        return environment().row(number)

    @generate
    async def answer(turn: Turn) -> None:
        if turn.base_url is None:
            raise Failed("environment", "expected an address for its clients, found none: the template is of no known family")
        played = await environment().answer(turn)
        if not math.isfinite(played["reward"]):
            raise Failed("environment", f"expected a finite reward of {kind}:{name}, found {played['reward']}")
        # The reward goes with the answer: who is asked for it has no need of the environment.
        parts = played.get("rewards", {})
        turn.sample(metadata=played, rewards={name: value for name, value in parts.items() if math.isfinite(value)})

    @reward
    async def score(samples: list[Sample]) -> list[float]:
        return [sample.metadata["reward"] for sample in samples]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m driftless_rl.environment", description="Answers for an environment; --environment starts it.")
    parser.add_argument("environment", metavar="KIND:NAME", help=f"KIND is one of {', '.join(KINDS)}")
    parser.add_argument("--args", metavar="JSON", type=_settings, default={}, help="settings, by the package's own names")
    given = parser.parse_args(arguments)
    kind, _, name = given.environment.partition(":")
    if kind not in KINDS or not name:
        parser.error(f"expected KIND:NAME with KIND one of {', '.join(KINDS)}, found {given.environment!r}")
    # A server of OpenEnv has room for one episode, unless it is told otherwise. Who waits for it here is not late.
    room = given.args.get("sessions", 1) if kind == "openenv" else OPEN
    if type(room) is not int or not 1 <= room <= OPEN:
        parser.error(f"--args: expected `sessions` from 1 to {OPEN}, found {room!r}")
    return serve(__file__, room, lambda: _register(kind, name, given.args))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
