"""What functions are given."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

GIVEN_UP = "the answer was given up"
# What `Failed` may say; the loop types the rest by itself.
OUTCOMES = ("environment", "deadline", "context", "refused", "parser", "hook")


class Failed(Exception):
    """An answer that came to nothing, and gets no reward: ``raise Failed("environment", "the container died")``.

    One of ``environment`` or ``deadline`` is made again, with other draws, as often as ``--hook-retries`` says. After any
    other, and after the last try, its group goes on without it, or is left out where fewer than half of its answers are left.
    ``TimeoutError`` stands for ``deadline``, any other exception for ``hook``.

    Args:
        outcome: ``environment``, ``deadline``, ``context``, ``refused``, ``parser`` or ``hook``.
        why: what happened, in a line.
    """

    def __init__(self, outcome: str, why: str) -> None:
        if outcome not in OUTCOMES:
            raise ValueError(f"Failed: expected an outcome of {', '.join(OUTCOMES)}, found {outcome!r}")
        super().__init__(outcome, why)
        self.outcome, self.why = outcome, why

    def __str__(self) -> str:
        return self.why


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine wrote."""

    text: str
    output_ids: list[int]
    log_probs: list[float]
    #: ``stop``, ``length`` or ``abort``
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of a group that is rewarded or filtered."""

    index: int
    prompt: str
    response: str
    label: Any
    metadata: Any
    truncated: bool
    response_length: int
    #: None where it has none yet
    reward: float | None = None


# Later questions may have more fields.
_SAMPLE = {field.name for field in fields(Sample)}


def sample(given: dict[str, Any]) -> Sample:
    return Sample(**{name: value for name, value in given.items() if name in _SAMPLE})


class _Answer:
    """An answer that is being made."""

    def __init__(self, question: dict[str, Any]) -> None:
        self._samples: list[dict[str, Any]] = []
        self._generations = 0
        # The first of the messages that the policy has read or written, and how many it is being told.
        self._known: list[dict[str, Any]] = list(question.get("messages") or ())
        self._asked = len(self._known)
        #: Number of the answer: the same when it is made again.
        self.index: int = question["index"]
        #: The prompt as the model reads it.
        self.prompt: str = question["prompt"]
        self.input_ids: list[int] = question["input_ids"]
        self.label: Any = question["label"]
        self.metadata: Any = question["metadata"]
        #: The conversation so far: what the prompt was rendered from, where the run has it, and what the policy said. What is
        #: appended is rendered with the run's template for the next generation.
        self.messages: list[dict[str, Any]] = list(self._known)
        #: The tools of the prompt's row.
        self.tools: list[Any] = question.get("tools") or []
        #: Of the run: ``max_new_tokens``, ``temperature``, ``stop`` and more.
        self.sampling_params: dict[str, Any] = question["sampling_params"]
        #: Whether the answer is measured, and not learned from.
        self.evaluation: bool = question["evaluation"]
        #: Where clients of OpenAI get tokens of the policy, which are a part of the answer; Anthropic's get them there without
        #: ``/v1``. None where the run has no such place.
        self.base_url: str | None = question.get("base_url")
        #: What clients have to know. It is of no use once the answer has ended.
        self.api_key: str | None = question.get("api_key")
        #: All that the last generation read and wrote; the prompt before the first.
        self.tokens: list[int] = list(self.input_ids)

    def sample(
        self,
        tokens: Sequence[int] | None = None,
        *,
        prompt_len: int | None = None,
        loss_mask: Sequence[int] | None = None,
        metadata: dict[str, Any] | None = None,
        reward: float | None = None,
        rewards: Mapping[str, float] | None = None,
    ) -> None:
        """Makes a sample a part of the answer. Without a call, the answer is what the last generation read and wrote.

        Where clients had conversations at ``base_url``, these stand in for a sample without ``tokens`` before any generation.

        Args:
            tokens: prompt and response; by default what the last generation so far read and wrote.
            prompt_len: where the response begins; by default behind the prompt.
            loss_mask: per response token, 1 to train on it and 0 not to; by default 1 for all that engines wrote.
            metadata: what rewards are given in place of the prompt's.
            reward: of the answer, which no other reward is asked about then; the last one of several samples counts.
            rewards: what the reward is made of, by name: for the log and the run's figures.
        """
        if tokens is None and self._generations == 0 and self.base_url is None:
            raise RuntimeError("turn.sample: expected `tokens`, or a generation before it, found neither")
        if tokens is None and self._generations > 0:
            tokens = self.tokens
        named: dict[str, Any] = {"tokens": None if tokens is None else list(tokens), "metadata": metadata}
        numbers = {**(rewards or {}), **({} if reward is None else {"reward": reward})}
        for name, number in numbers.items():
            if not math.isfinite(number):
                raise ValueError(f"turn.sample: expected a finite number as `{name}`, found {number!r}")
        named["prompt_len"], named["reward"] = prompt_len, None if reward is None else float(reward)
        named["rewards"] = {name: float(number) for name, number in rewards.items()} if rewards else None
        named["loss_mask"] = None if loss_mask is None else [int(one) for one in loss_mask]
        self._samples.append({name: value for name, value in named.items() if value is not None})


class Turn(_Answer):
    """An answer that an ``async def`` makes."""

    def __init__(self, question: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(question)
        self._send = send
        # The generation that engines are at, what it was asked to read, and whether it is waited for.
        self._told: asyncio.Future[Generation] | None = None
        self._reads: list[int] | None = None
        self._is_waited_for = False
        self._cancelled = False

    def _tell(self, given: dict[str, Any]) -> None:
        told, self._told = self._told, None
        self._generations += 1
        if "error" in given:
            # No engine was asked.
            if told is not None and not told.done():
                told.set_exception(ValueError(given["error"]))
            return
        said = given.get("message") or {"role": "assistant", "content": given["text"]}
        self.messages.insert(self._asked, said)
        self._known = self.messages[: self._asked + 1]
        if self._reads is not None:
            self.tokens = self._reads
        self.tokens += given.get("appended_ids", ())
        self.tokens += given["output_ids"]
        if told is not None and not told.done():
            told.set_result(Generation(given["text"], given["output_ids"], given["log_probs"], given["finish_reason"]))

    def _cancel(self) -> None:
        self._cancelled = True
        if self._told is not None:
            self._told.cancel()

    async def _settled(self) -> None:
        """Waits for a generation that nobody waits for any more: the loop takes no word before it."""
        if self._told is not None:
            await asyncio.shield(self._told)

    def _appended(self) -> list[dict[str, Any]]:
        """Messages that the policy has not read."""
        known = len(self._known)
        if self.messages[:known] != self._known:
            raise ValueError("turn.messages: expected new messages behind those so far, found others among them")
        return self.messages[known:]

    async def generate(
        self,
        append: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Generation:
        """Has an engine go on behind all so far. A generation that is no longer waited for counts all the same.

        It reads what was appended to ``messages``. The run's template may refuse that, as a ``ValueError``.

        Args:
            append: text that the model reads behind all so far, tokenised alone.
            input_ids: what the model reads in place of all so far.
            max_new_tokens: at most the run's.
            stop: texts that end the generation, in place of the run's.
            stop_token_ids: tokens that end it, in place of the run's.
        """
        if append is not None and input_ids is not None:
            raise ValueError("expected `append` or `input_ids`, found both")
        if self._is_waited_for:
            raise RuntimeError("a second generation of an answer: expected one at a time, found the first under way")
        if self._cancelled:
            raise asyncio.CancelledError(GIVEN_UP)
        stop = [stop] if isinstance(stop, str) else stop
        params: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stop and list(stop)}
        params["stop_token_ids"] = stop_token_ids and list(stop_token_ids)
        wanted: dict[str, Any] = {"sampling_params": {name: value for name, value in params.items() if value is not None}}
        if append is not None:
            wanted["append"] = append
        if input_ids is not None:
            wanted["input_ids"] = list(input_ids)
        self._is_waited_for = True
        try:
            await self._settled()
            if new := self._appended():
                if append is not None or input_ids is not None:
                    raise ValueError("expected new messages in `turn.messages`, `append` or `input_ids`, found two of them")
                wanted["append_messages"] = new
            self._asked = len(self._known) + len(new)
            self._send({"generate": wanted})
            self._reads = wanted.get("input_ids")
            self._told = asyncio.get_running_loop().create_future()
            return await asyncio.shield(self._told)
        finally:
            self._is_waited_for = False


class BlockingTurn(_Answer):
    """An answer that a plain ``def`` makes, in a thread."""

    def __init__(self, turn: Turn, loop: asyncio.AbstractEventLoop) -> None:
        # What one of them changes, the other has.
        self.__dict__ = turn.__dict__
        self._turn, self._loop = turn, loop

    def generate(
        self,
        append: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Generation:
        """As ``Turn.generate``, and waits for it."""
        wanted = self._turn.generate(
            append, input_ids=input_ids, max_new_tokens=max_new_tokens, stop=stop, stop_token_ids=stop_token_ids
        )
        try:
            return asyncio.run_coroutine_threadsafe(wanted, self._loop).result()
        except concurrent.futures.CancelledError as error:
            # That one is an `Exception`, which code around it may take for a failure to go on from.
            raise asyncio.CancelledError(GIVEN_UP) from error
