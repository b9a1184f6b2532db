"""Tools that the policy calls: functions, or what a server of MCP has."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._serve import _in_thread
from ._turn import Failed, Turn

# Seconds that a call may take, and characters of its answer that the policy reads.
CALL_DEADLINE = 30.0
TEXT_MAX = 16_384


@dataclass(frozen=True, slots=True)
class Tool:
    """Something that the policy may call."""

    name: str
    description: str
    #: JSON schema of its arguments
    parameters: dict[str, Any]
    #: Gives what the policy is told. A ``ValueError`` is told to it too: it is a mistake of the policy.
    call: Callable[[dict[str, Any]], Awaitable[str]]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """A function, async or not, with a type for each parameter and a docstring. A plain one runs in a thread."""
        from pydantic import TypeAdapter, ValidationError
        from pydantic_core import ArgsKwargs

        description = inspect.getdoc(function)
        if not description:
            raise ValueError(f"{function!r}: expected a docstring, which tells the policy what it does; found none")
        typed: Any = function
        adapter = TypeAdapter(typed)

        async def call(arguments: dict[str, Any]) -> str:
            given = ArgsKwargs((), arguments)
            try:
                if inspect.iscoroutinefunction(function):
                    said = await adapter.validate_python(given)
                else:
                    said = await _in_thread(adapter.validate_python, given)
            except ValidationError as error:
                wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
                raise ValueError("; ".join(wrong)) from error
            return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)

        return cls(function.__name__, description, adapter.json_schema(), call)

    async def answer(self, written: str, deadline: float) -> str:
        """What the policy is told of a call with the arguments that it wrote."""
        try:
            arguments = json.loads(written or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("expected the arguments as an object of JSON")
            async with asyncio.timeout(deadline) as timer:
                text = await self.call(arguments)
        except ValueError as error:
            text = f"Error: {error}"
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise Failed("deadline", f"tool `{self.name}`: expected an answer within {deadline:g} s, found none") from error
        return clipped(text)


def clipped(text: str) -> str:
    """What the policy reads of a text of any length."""
    # Names of files may be no text.
    text = text.encode("utf-8", "replace").decode()
    more = len(text) - TEXT_MAX
    return text if more <= 0 else f"{text[:TEXT_MAX]}\n[{more} more characters]"


async def drawn(client: Any, said: list[Any], nth: int, **offered: Any) -> str | None:
    """Appends the policy's turn to a conversation. How it ended; none where a later one found the context full."""
    from openai import BadRequestError

    try:
        choice = (await client.chat.completions.create(model="policy", messages=said, **offered)).choices[0]
    except BadRequestError as error:
        if nth > 1 and error.code == "context_length_exceeded":
            return None
        raise
    said.append(choice.message.model_dump(exclude_none=True))
    return str(choice.finish_reason)


async def run_tools(
    turn: Turn,
    tools: Sequence[Tool | Callable[..., Any]],
    *,
    messages: Sequence[dict[str, Any]] | None = None,
    max_turns: int = 16,
    call_deadline: float = CALL_DEADLINE,
    is_done: Callable[[], bool] | None = None,
) -> list[dict[str, Any]]:
    """Has the policy go on until it calls no tool any more, its tokens are used up, or its context is full.

    A tool that is late is a ``deadline``. What a tool raises is told to the policy if it is a ``ValueError``, and fails the
    answer if it is not. Needs the package ``openai``.

    Args:
        tools: functions with types and docstrings, or ``Tool``.
        messages: how the conversation begins, by default with ``turn.prompt``.
        max_turns: turns of the policy.
        call_deadline: seconds that a call may take.
        is_done: asked behind the calls of a turn, whether the conversation has ended.

    Returns:
        The conversation, as OpenAI's Chat Completions has it.
    """
    from openai import AsyncOpenAI

    if turn.base_url is None:
        raise Failed("environment", "expected an address for clients, found none: the template is of no known family")
    offered = [tool if isinstance(tool, Tool) else Tool.of(tool) for tool in tools]
    known = {tool.name: tool for tool in offered}
    if len(known) < len(offered):
        raise ValueError(f"run_tools: expected a name of its own for each tool, found {[tool.name for tool in offered]}")
    functions: list[Any] = [
        {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}}
        for tool in offered
    ]
    said: list[Any] = list(messages or [{"role": "user", "content": turn.prompt}])
    # The loop bounds each generation, so the client does not.
    async with AsyncOpenAI(base_url=turn.base_url, api_key=turn.api_key, timeout=None) as client:
        for nth in range(1, max_turns + 1):
            ended = await drawn(client, said, nth, tools=functions)
            # What the last turn's calls say is read by no one, but they may be the end of an episode.
            if ended != "tool_calls" or (nth == max_turns and is_done is None):
                break
            for call in said[-1]["tool_calls"]:
                name, text = call["function"]["name"], "Error: no tool has this name"
                if name in known:
                    text = await known[name].answer(call["function"]["arguments"], call_deadline)
                said.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            if is_done is not None and is_done():
                break
    return said
