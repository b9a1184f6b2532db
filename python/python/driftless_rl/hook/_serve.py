"""Questions of the loop, many at once: a line each (docs/hooks.md)."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from . import _functions
from ._turn import BlockingTurn, Failed, Turn, sample

PROTOCOL = 2
# Answers that are open at once; the loop waits with others.
OPEN = 512


class _Server(asyncio.Protocol):
    """Reads questions, and runs a task for each."""

    def __init__(self, path: str, lines: BinaryIO) -> None:
        self.path, self.lines = path, lines
        self.loop = asyncio.get_running_loop()
        self.ended = self.loop.create_future()
        self.parts: list[bytes] = []
        self.open: dict[int, _Task] = {}

    def data_received(self, data: bytes) -> None:
        first, *rest = data.split(b"\n")
        self.parts.append(first)
        for part in rest:
            self.take(json.loads(b"".join(self.parts)))
            self.parts = [part]

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc)
        for task in self.open.values():
            task.take({"cancel": True})

    def take(self, given: dict[str, Any]) -> None:
        number = given["id"]
        if "hook" in given:
            self.open[number] = _Task(self, number, given)
        elif number in self.open:
            # Else its last line was on the way when this one was sent.
            self.open[number].take(given)

    def send(self, number: int, said: dict[str, Any]) -> None:
        line = json.dumps({"id": number, **said}, allow_nan=False).encode() + b"\n"
        if not self.ended.done():
            self.lines.write(line)
            self.lines.flush()


class _Task:
    """An open question."""

    def __init__(self, server: _Server, number: int, question: dict[str, Any]) -> None:
        self.server, self.number = server, number
        self.is_cancelled = False
        self.function = _functions.functions.get(question["hook"])
        self.is_async = inspect.iscoroutinefunction(self.function)
        self.turn: Turn | None = None
        if question["hook"] == "generate":
            self.turn = Turn(question, self.send)
        self.task = server.loop.create_task(self.answer(question))

    def send(self, said: dict[str, Any]) -> None:
        """Says something of the turn that it is in."""
        self.server.send(self.number, said if self.turn is None else {"turn": self.turn._generations, **said})

    def take(self, given: dict[str, Any]) -> None:
        if "cancel" not in given:
            if self.turn is not None:
                self.turn._tell(given["generation"])
            return
        self.is_cancelled = True
        if self.turn is not None:
            self.turn._cancel()
        if self.is_async:
            self.task.cancel()

    async def answer(self, question: dict[str, Any]) -> None:
        try:
            try:
                said = await self.reply(question)
            finally:
                if self.turn is not None and not self.is_cancelled:
                    await self.turn._settled()
            self.send(said)
        except (Exception, asyncio.CancelledError) as error:
            if self.is_cancelled:
                said = {"cancelled": True}
            else:
                _print(error)
                said = {"error": self.describe(error), **_outcome(error)}
            self.send(said)
        finally:
            del self.server.open[self.number]

    async def reply(self, question: dict[str, Any]) -> dict[str, Any]:
        name = question["hook"]
        if self.function is None:
            raise LookupError(f"{self.server.path} has no function for the question `{name}`: decorate one")
        if self.turn is not None:
            await self.call(self.turn if self.is_async else BlockingTurn(self.turn, self.server.loop))
            return {"samples": self.turn._samples or [{}]}
        if name == "prompt":
            return _functions.answer(name, await self.call(question["number"]), self.describe)
        samples = [sample(given) for given in question["samples"]]
        # The run asks about no samples before it starts.
        return _functions.answer(name, await self.call(samples) if samples else [], self.describe)

    def describe(self, error: BaseException) -> str:
        return _describe(error, self.server.path)

    async def call(self, given: Any) -> Any:
        assert self.function is not None
        if self.is_async:
            return await self.function(given)
        return await _in_thread(self.function, given)


async def _in_thread(function: Callable[[Any], Any], given: Any) -> Any:
    """Calls a function in a thread that keeps the process from nothing, also from its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def tell(ended: tuple[Any, BaseException | None]) -> None:
        # The caller of a late call has gone on.
        if not done.done():
            done.set_result(ended)

    def run() -> None:
        try:
            ended: tuple[Any, BaseException | None] = function(given), None
        except BaseException as error:  # raised where it is waited for
            ended = None, error
        loop.call_soon_threadsafe(tell, ended)

    threading.Thread(target=run, daemon=True).start()
    result, error = await done
    if error is not None:
        raise error
    return result


def _outcome(error: BaseException) -> dict[str, str]:
    """Which failure it is. The loop knows of a hook's other errors what the answer had run into."""
    match error:
        case Failed():
            return {"outcome": error.outcome}
        case TimeoutError():
            return {"outcome": "deadline"}
    return {}


def _print(error: BaseException) -> None:
    """The traceback, without the frames of this package that every call has. What the function itself tells of has none."""
    if isinstance(error, Failed) and error.__cause__ is None:
        return
    here, frames = os.path.dirname(__file__), error.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename.startswith(here):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _describe(error: BaseException, path: str) -> str:
    """The last line of a traceback, with the place in the user's file if it has one there."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == path), frames[-1] if frames else None)
    place = f" ({os.path.basename(frame.filename)}:{frame.lineno})" if frame else ""
    said = error.why if isinstance(error, Failed) else traceback.format_exception_only(error)[-1].strip()
    return said + place


def _load(path: str) -> None:
    """Runs the user's file, which finds its neighbours as a script does."""
    sys.path.insert(0, os.path.dirname(path))
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: expected a file of Python, by the name *.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


async def _serve(path: str, open_max: int, asked: BinaryIO, lines: BinaryIO) -> None:
    server = _Server(path, lines)
    lines.write(json.dumps({"announced": {"protocol": PROTOCOL, "open": open_max}}).encode() + b"\n")
    lines.flush()
    await server.loop.connect_read_pipe(lambda: server, asked)
    await server.ended


def serve(path: str, open_max: int, load: Callable[[], None]) -> int:
    """Answers the loop, ``open_max`` questions at once, until it closes the standard input.

    Args:
        path: the file that a failure is traced back to.
        load: makes the functions known.
    """
    # The protocol has these two pipes to itself: prints, also of libraries and children, go to standard error.
    asked, lines = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    load()
    if not _functions.functions:
        print(f"{path}: expected a function decorated by driftless_rl.hook, found none", file=sys.stderr)
        return 2
    asyncio.run(_serve(path, open_max, asked, lines))
    return 0


def main(arguments: list[str]) -> int:
    """Runs a file of hooks."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m driftless_rl.hook FILE.py [ARGUMENT…]; see docs/hooks.md", file=sys.stderr)
        return 2
    path = os.path.abspath(arguments[0])
    sys.argv = arguments
    return serve(path, OPEN, lambda: _load(path))
