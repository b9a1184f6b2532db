"""Tools of a server of MCP, by its command: ``python -m driftless_rl.hook.mcp COMMAND [ARGUMENT…]``.

This is a hook that makes answers, for ``--custom-generate-command``. Each answer has a server of its own, so that none sees
what another one changed. In a file of hooks::

    from driftless_rl.hook import Turn, generate, run_tools
    from driftless_rl.hook.mcp import mcp_tools

    @generate
    async def answer(turn: Turn) -> None:
        async with mcp_tools(["uvx", "mcp-server-time"]) as tools:
            await run_tools(turn, tools)

Needs the packages ``mcp`` and ``openai``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Any, TypeVar

from . import Failed, Tool, Turn, generate, run_tools
from ._serve import serve

try:
    import anyio
    from mcp import Client, MCPError
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage
    from mcp.types import INVALID_PARAMS, CallToolResult
    from mcp_types import jsonrpc_message_adapter
except ImportError as error:
    raise ImportError("expected the package mcp 2, found none, or another one: pip install 'mcp>=2,<3'") from error

# Answers that are open at once, each with a server.
OPEN = 128
# Seconds until a server has told its tools, and until it has ended by itself once its input is closed.
START_DEADLINE, END_DEADLINE = 60.0, 2.0
# Bytes of a line of a server, and tools and pages of them that it may have.
LINE_MAX, TOOLS_MAX, PAGES_MAX = 4 << 20, 128, 16
Answered = TypeVar("Answered")


class _Server:
    """A process that speaks MCP by lines. The package's own transport takes lines of any length."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        # What ended its connection.
        self.why: str | None = None

    @contextlib.asynccontextmanager
    async def transport(self) -> AsyncIterator[Any]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self.command, stdin=pipe, stdout=pipe, env=get_default_environment(), limit=LINE_MAX, start_new_session=True
        )
        heard, hears = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        says, said = anyio.create_memory_object_stream[SessionMessage](0)
        tasks = [asyncio.create_task(self.read(process, heard)), asyncio.create_task(self.write(process, said, heard))]
        try:
            yield hears, says
        finally:
            for stream in (heard, hears, says, said):
                stream.close()
            await asyncio.shield(self.end(process, tasks))

    async def read(self, process: asyncio.subprocess.Process, heard: Any) -> None:
        assert process.stdout is not None
        async with heard:
            try:
                while line := await process.stdout.readline():
                    try:
                        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:
                        self.why = f"expected a message of JSON-RPC, found {line[:80]!r}"
                        return
                    await heard.send(SessionMessage(message))
                self.why = self.why or "its output ended"
            except ValueError:
                self.why = f"expected lines of at most {LINE_MAX >> 20} MiB, found a longer one"
            except anyio.BrokenResourceError:
                pass  # its reader is closed

    async def write(self, process: asyncio.subprocess.Process, said: Any, heard: Any) -> None:
        assert process.stdin is not None
        try:
            async for message in said:
                line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(line.encode() + b"\n")
                await process.stdin.drain()
        except OSError:
            # What is asked from now on gets no answer.
            self.why = self.why or "its input ended"
            heard.close()

    async def end(self, process: asyncio.subprocess.Process, tasks: list[asyncio.Task[None]]) -> None:
        assert process.stdin is not None and process.stdout is not None
        stdout = process.stdout

        async def ended() -> None:
            # Its end is seen behind that of its output alone.
            while await stdout.read(1 << 16):
                pass
            await process.wait()

        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended(), END_DEADLINE)
        # Its children too, also where it has ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A child in a session of its own may keep the output open.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended(), END_DEADLINE)

    async def asked(self, answer: Awaitable[Answered]) -> Answered:
        """What it answers. Without an answer, the environment failed."""
        try:
            with _alone():
                return await answer
        except MCPError as error:
            why = self.why or str(error)
        except (ValueError, RuntimeError) as error:
            why = f"expected an answer as MCP has it: {error}"
        raise Failed("environment", f"{self.command[0]}: {why}")

    async def tools(self, client: Client) -> list[Tool]:
        tools: list[Tool] = []
        cursor = None
        for _ in range(PAGES_MAX):
            listed = await self.asked(client.list_tools(cursor=cursor))
            tools += [self.tool(client, one.name, one.description or "", one.input_schema) for one in listed.tools]
            cursor = listed.next_cursor
            if cursor is None:
                break
        if cursor is not None or not 0 < len(tools) <= TOOLS_MAX:
            raise Failed("environment", f"{self.command[0]}: expected 1 to {TOOLS_MAX} tools, found {len(tools)}")
        return tools

    def tool(self, client: Client, name: str, description: str, parameters: dict[str, Any]) -> Tool:
        async def asked(arguments: dict[str, Any]) -> CallToolResult | MCPError:
            try:
                return await client.call_tool(name, arguments)
            except MCPError as error:
                if error.code != INVALID_PARAMS:
                    raise
                return error

        async def call(arguments: dict[str, Any]) -> str:
            result = await self.asked(asked(arguments))
            if isinstance(result, MCPError):
                raise ValueError(str(result))
            text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
            if result.is_error:
                raise ValueError(text)
            return text

        return Tool(name, description, parameters, call)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Takes an exception out of the groups that tasks of the package put around it."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from error.__cause__


@contextlib.asynccontextmanager
async def mcp_tools(command: Sequence[str]) -> AsyncIterator[list[Tool]]:
    """Starts a server, gives its tools, and ends it with the block.

    It gets ``PATH``, ``HOME`` and a few more of the process's environment, and no other. A server that dies, or does not
    speak MCP, is the failure ``environment`` of the answer.
    """
    server = _Server(command)
    with _alone():
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(START_DEADLINE):
                    client = await server.asked(stack.enter_async_context(Client(server.transport())))
                    tools = await server.tools(client)
            except TimeoutError:
                why = f"{command[0]}: expected its tools within {START_DEADLINE:g} s, found none"
                raise Failed("environment", why) from None
            yield tools


def main(command: list[str]) -> int:
    """Answers with the tools of a server."""
    if not command or command[0].startswith("-"):
        print("usage: python -m driftless_rl.hook.mcp COMMAND [ARGUMENT…]; see docs/agents.md", file=sys.stderr)
        return 2
    if shutil.which(command[0]) is None:
        print(f"COMMAND: expected a program, found none by the name {command[0]}", file=sys.stderr)
        return 2

    def load() -> None:
        @generate
        async def answer(turn: Turn) -> None:
            async with mcp_tools(command) as tools:
                await run_tools(turn, tools)

    return serve(__file__, OPEN, load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
