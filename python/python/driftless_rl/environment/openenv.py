"""Environments of OpenEnv: a server that runs, by its URL, or the app of an installed package.

A session of the server is an episode. Where its actions are calls of tools, the policy has these tools. Where an action is a
text, the policy writes it. Any other action is the one tool ``step``, with the action's own schema.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable
from typing import Any, Literal

from driftless_rl.hook import Failed, Tool, Turn, run_tools
from driftless_rl.hook._serve import _in_thread
from driftless_rl.hook._tools import clipped, drawn

try:
    import httpx
    from openenv.core.client_types import StepResult
    from openenv.core.generic_client import GenericEnvClient
    from pydantic import BaseModel, ConfigDict, Field
    from websockets.exceptions import ConnectionClosed

    # What `_Session` takes the place of, which earlier releases have not.
    _REPLACED = (GenericEnvClient._connect_async, GenericEnvClient._disconnect_async)
except (ImportError, AttributeError) as error:
    raise ImportError(f"expected openenv 0.10: pip install 'openenv>=0.10,<0.11' ({error})") from error

# Seconds until a server that is started has told its schema, and until one has let a session go.
START_DEADLINE, END_DEADLINE = 50.0, 5.0
MESSAGE_MIB, TOOLS_MAX = 16, 128
# What an observation is beside its fields.
BESIDE = ("done", "reward", "metadata")


class Settings(BaseModel):
    """What ``--environment-args`` may have."""

    model_config = ConfigDict(extra="forbid", strict=True)
    #: What the policy reads before the first observation.
    prompt: str = ""
    #: What `reset` is given beside the seed, which is the prompt's number.
    reset: dict[str, Any] = {}
    #: The field of the observation that the policy reads; by default all of them, and a single text as it is.
    observation: str | None = None
    reward: Literal["sum", "last"] = "sum"
    #: Episodes at once, in each process of hooks.
    sessions: int = Field(default=1, ge=1, le=128)
    max_turns: int = Field(default=16, ge=1)
    #: Seconds that the server has for each answer.
    deadline: float = Field(default=30.0, gt=0, strict=False)


class _Session(GenericEnvClient):
    """One connection. The package's client would go on behind a lost one with another episode."""

    has_connected = False

    async def _connect_async(self) -> _Session:
        if not self.has_connected:
            self.has_connected = True
            await super()._connect_async()
        return self

    async def _disconnect_async(self) -> None:
        # The server closes the connection once another session has room.
        if self._ws is not None:
            with contextlib.suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(END_DEADLINE):
                    await self._ws.send('{"type": "close"}')
                    await self._ws.wait_closed()
        await super()._disconnect_async()


class _Server:
    """Where sessions are, and the schema of their actions."""

    def __init__(self, name: str) -> None:
        self.name, self.url = name, name.rstrip("/")
        self.schema: dict[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = asyncio.Lock()
        self.app = None if "://" in name else name if ":" in name else f"{name.replace('-', '_')}.server.app:app"
        if self.app is None:
            self.read()
        elif importlib.util.find_spec(package := self.app.partition(":")[0].partition(".")[0]) is None:
            raise ImportError(f"openenv:{name}: expected the package `{package}` of the environment, found none")

    def read(self) -> None:
        at = f"{self.url}/schema"
        try:
            # A server of this process is behind no proxy.
            told = httpx.get(at, timeout=START_DEADLINE, trust_env=self.app is None, follow_redirects=True)
            action = told.raise_for_status().json()["action"]
            fields = {name: one for name, one in action["properties"].items() if name not in BESIDE}
            self.schema = {**action, "properties": fields}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, AttributeError) as error:
            why = f"openenv:{self.name}: expected the schema of a server's actions at {at}, found {error!r}"
            raise Failed("environment", why) from None

    async def started(self) -> _Server:
        """With a process that runs, where it is to have one."""
        async with self.lock:
            if self.app is not None and (self.process is None or self.process.poll() is not None):
                self.start(self.app)
            if not self.schema:
                await _in_thread(lambda _: self.read(), None)
        return self

    def start(self, app: str) -> None:
        # Who connects before the app is loaded waits. Once the process has died, connections are refused.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url, self.schema, fd = f"http://127.0.0.1:{listener.getsockname()[1]}", {}, listener.fileno()
            command = [sys.executable, "-m", "uvicorn", app, "--fd", str(fd), "--log-level", "warning"]
            # In the group of this process, so that it ends with it also where this one is killed.
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[fd])
        atexit.register(self.process.kill)


class _Episode:
    """A session from its reset on: what it told, and what it gave."""

    def __init__(self, server: _Server, settings: Settings) -> None:
        self.at, self.schema, self.settings = f"openenv:{server.name}", server.schema, settings
        most = {"message_timeout_s": settings.deadline, "max_message_size_mb": MESSAGE_MIB}
        self.session = _Session(server.url, mode="simulation", **most)
        self.rewards: list[float] = []
        self.steps, self.is_done = 0, False

    async def asked(self, answer: Awaitable[StepResult[Any]]) -> StepResult[Any]:
        """What the server answers. Without an answer, the environment failed."""
        try:
            result = await answer
        except TimeoutError:
            why = f"{self.at}: expected an answer within {self.settings.deadline:g} s, found none"
            raise Failed("deadline", why) from None
        except Exception as error:  # the package tells of what is no answer in many ways
            if "(code: VALIDATION_ERROR)" in str(error) and self.steps:
                raise ValueError(f"expected an action of this schema: {json.dumps(self.schema['properties'])}") from None
            raise Failed("environment", f"{self.at}: {str(error)[:500] or type(error).__name__}") from None
        match result:
            case StepResult(observation=dict(), reward=None | int() | float(), done=bool()):
                return result
        raise Failed("environment", f"{self.at}: expected an observation, a reward and `done`, found {str(result)[:500]}")

    async def reset(self, seed: int) -> str:
        return self.text((await self.asked(self.session.reset(**{"seed": seed, **self.settings.reset}))).observation)

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if self.is_done:
            raise ValueError("the episode has ended")
        self.steps += 1
        result = await self.asked(self.session.step(action))
        self.is_done = result.done
        if result.reward is not None:
            self.rewards.append(float(result.reward))
        return result.observation

    async def act(self, action: dict[str, Any]) -> str:
        return self.text(await self.step(action))

    def text(self, observation: dict[str, Any]) -> str:
        """What the policy reads of an observation."""
        fields = {name: one for name, one in observation.items() if name not in BESIDE}
        if (chosen := self.settings.observation) is not None:
            if chosen not in fields:
                raise Failed("environment", f"{self.at}: expected `{chosen}` in an observation, found {list(fields)}")
            fields = {chosen: fields[chosen]}
        match list(fields.values()):
            case [] | [None]:
                return ""
            case [str(text)]:
                return text
        return json.dumps(fields, ensure_ascii=False)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """What a tool of the environment says."""
        match await self.step({"type": "call_tool", "tool_name": name, "arguments": arguments}):
            case {"error": {"error_type": "timeout" | "transport_error" as kind, "message": why}}:
                raise Failed("deadline" if kind == "timeout" else "environment", f"{self.at}: {why}")
            case {"error": {"message": str(mistake)}}:
                raise ValueError(mistake)
            case {"result": {"content": [*parts]}}:
                return "\n".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in parts)
            case {"result": str(text)}:
                return text
            case {"result": result}:
                return json.dumps(result, ensure_ascii=False)
            case other:
                raise Failed("environment", f"{self.at}: expected what a tool says, found {str(other)[:500]}")

    async def tools(self) -> list[Tool]:
        """What the policy may call; none where it acts by what it writes."""
        fields = self.schema["properties"]
        if not fields or "tool_name" in fields:
            listed = (await self.asked(self.session.step({"type": "list_tools"}))).observation.get("tools") or []
            try:
                told = [(one["name"], one["description"], one["input_schema"]) for one in listed]
            except (LookupError, TypeError):
                told = []
            if not 0 < len(told) <= TOOLS_MAX:
                raise Failed("environment", f"{self.at}: expected 1 to {TOOLS_MAX} tools, found {str(listed)[:500]}")
            return [Tool(*one, functools.partial(self.call, one[0])) for one in told]
        return [] if self.written() else [Tool("step", "Acts in the environment.", self.schema, self.act)]

    def written(self) -> str | None:
        """The one field that an action needs, if it is any text."""
        fields = self.schema["properties"]
        match self.schema.get("required") or list(fields):
            case [name] if fields[name].get("type") == "string" and "enum" not in fields[name]:
                return name
        return None

    async def play(self, turn: Turn, first: str) -> None:
        """Has the policy act until the episode ends, or its turns, its tokens or its context do."""
        from openai import AsyncOpenAI

        if not first:
            raise ValueError(f"{self.at}: expected a `prompt`, as its reset tells nothing; found none")
        said: list[dict[str, Any]] = [{"role": "user", "content": clipped(first)}]
        most, seconds = self.settings.max_turns, self.settings.deadline + END_DEADLINE
        if tools := await self.tools():
            # The server's own deadline is the shorter one.
            await run_tools(turn, tools, messages=said, max_turns=most, call_deadline=seconds, is_done=lambda: self.is_done)
            return
        async with AsyncOpenAI(base_url=turn.base_url, api_key=turn.api_key, timeout=None) as client:
            for nth in range(1, most + 1):
                if await drawn(client, said, nth) in (None, "length"):
                    return
                try:
                    text = await self.act({str(self.written()): said[-1].get("content") or ""})
                except ValueError as error:
                    text = f"Error: {error}"
                if self.is_done:
                    return
                said.append({"role": "user", "content": clipped(text)})

    def outcome(self) -> dict[str, Any]:
        if self.is_done and not self.rewards:
            raise Failed("environment", f"{self.at}: expected a reward of an episode that ended, found none")
        reward = sum(self.rewards) if self.settings.reward == "sum" else (self.rewards or [0.0])[-1]
        return {"reward": reward, "steps": self.steps, "done": self.is_done}


class Environment:
    """What ``--environment`` plays."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.settings = Settings.model_validate(settings)
        self.name, self.server = name, _Server(name)

    def row(self, number: int) -> dict[str, Any]:
        return {"input": self.settings.prompt or f"openenv:{self.name} {number}", "metadata": {"seed": number}}

    async def answer(self, turn: Turn) -> dict[str, Any]:
        episode = _Episode(await self.server.started(), self.settings)
        try:
            told = await episode.reset(turn.metadata["seed"])
            await episode.play(turn, "\n\n".join(text for text in (self.settings.prompt, told) if text))
        finally:
            await episode.session.close()
        return episode.outcome()
