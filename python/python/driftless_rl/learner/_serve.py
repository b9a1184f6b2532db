"""The socket of the loop: a call a line, a reply a line (``docs/wire/learner.md``)."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from ._ranks import Ranks, Refused

PROTOCOL = 3
# What rank 0 tells the others instead of a call; JSON has no tuples.
END, WAIT = ("end",), ("wait",)


class Answers(Protocol):
    """What calls are answered by."""

    def hello(self) -> dict[str, Any]: ...
    def answer(self, call: dict[str, Any]) -> dict[str, Any]: ...


def serve(path: str, ranks: Ranks, begin: Callable[[dict[str, Any]], Answers]) -> None:
    """Answers calls until the loop closes the socket at ``path``. ``begin`` makes a learner of ``hello``.

    Rank 0 has the socket, and tells the others each call. What is not ``Refused`` ends the process, after the reply.
    """
    connection, lines = None, None
    if ranks.rank == 0:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError as error:
            raise Refused(f"socket {path}: expected the loop behind it, found {error}") from error
        lines = connection.makefile("rb")
    learner: Answers | None = None
    while True:
        call = ranks.tell(_next(lines, ranks) if lines is not None else None)
        if call == END:
            return
        if call == WAIT:
            continue
        failure = None
        try:
            if not isinstance(call, dict):
                raise Refused(f"a call: expected a JSON object with `id` and `call`, found {str(call)[:200]}")
            if call.get("call") == "hello":
                _check_hello(call, learner)
                learner = begin(call)
                reply = learner.hello()
            elif learner is None:
                raise Refused(f"the first call: expected `hello`, found `{call.get('call')}`")
            else:
                reply = ranks.together(lambda: learner.answer(call))
        except Refused as error:
            reply = {"error": str(error)}
        except Exception as error:
            # Other ranks may be in the middle of it: nothing can go on from here.
            reply, failure = {"error": f"{type(error).__name__}: {error}"}, error
        if connection is not None:
            given = call.get("id") if isinstance(call, dict) else None
            try:
                connection.sendall(json.dumps({"id": given, **reply}, allow_nan=False).encode() + b"\n")
            except (BrokenPipeError, ConnectionResetError):
                # The next look at the socket finds its end.
                pass
        if failure is not None:
            raise failure


def _next(lines: BinaryIO, ranks: Ranks) -> Any:
    """The next call, ``END``, or ``WAIT`` so that other ranks, which wait with a deadline, know that this one is there."""
    # A call is answered before the next one is sent: no line is left in the buffer.
    ready = select.select([lines], [], [], ranks.deadline / 4 if ranks.sharded else None)[0]
    if not ready:
        return WAIT
    try:
        line = lines.readline()
    except ConnectionResetError:
        return END
    if not line.endswith(b"\n"):
        return END
    try:
        return json.loads(line)
    except ValueError:
        return repr(line)


def _check_hello(call: dict[str, Any], learner: Answers | None) -> None:
    if learner is not None:
        raise Refused("hello: expected once, found a second one")
    if call.get("protocol") != PROTOCOL:
        raise Refused(f"hello: expected protocol {PROTOCOL}, found {call.get('protocol')}")
    for name in ("hf_checkpoint", "save", "log", "store", "run", "model", "baseline_dir"):
        if not isinstance(call.get(name), str):
            raise Refused(f"hello: expected `{name}`, a string, found {call.get(name)!r}")
