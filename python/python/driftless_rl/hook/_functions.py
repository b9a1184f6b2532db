"""Which functions answer which questions."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from ._turn import BlockingTurn, Sample, Turn

# By the question's name, as the loop asks it.
functions: dict[str, Callable[..., Any]] = {}

Numbers = Sequence[float]
Rewards = Sequence[float | Mapping[str, Any] | BaseException]
Kept = bool | tuple[bool, str]
Function = TypeVar("Function", bound=Callable[..., Any])
Generate = TypeVar("Generate", bound=Callable[[Turn], Awaitable[None]] | Callable[[BlockingTurn], None])
Reward = TypeVar("Reward", bound=Callable[[list[Sample]], Rewards | Awaitable[Rewards]])
Processed = TypeVar("Processed", bound=Callable[[list[Sample]], Numbers | Awaitable[Numbers]])
Prompt = TypeVar("Prompt", bound=Callable[[int], dict[str, Any] | Awaitable[dict[str, Any]]])
Keep = TypeVar("Keep", bound=Callable[[list[Sample]], Kept | Awaitable[Kept]])
Remove = TypeVar("Remove", bound=Callable[[list[Sample]], Sequence[bool] | Awaitable[Sequence[bool]]])


def _answers(question: str, function: Function) -> Function:
    if question in functions:
        raise ValueError(f"{function!r}: a second function for the question `{question}`")
    functions[question] = function
    return function


def generate(function: Generate) -> Generate:
    """Makes an answer with the turn that it is given (``--custom-generate-command``)."""
    return _answers("generate", function)


def reward(function: Reward) -> Reward:
    """Gives each sample of a group a number (``--custom-rm-command``).

    A mapping ``{"reward": 0.5, "rewards": {"right": 0.0, "form": 0.5}}`` in a number's place says what it is made of. An
    exception there, as ``asyncio.gather(..., return_exceptions=True)`` returns it, says that this sample has none: its group
    goes on without it.
    """
    return _answers("rm", function)


def prompt(function: Prompt) -> Prompt:
    """Gives the row of a number, always the same one (``--data-source-command``)."""
    return _answers("prompt", function)


def dynamic_sampling_filter(function: Keep) -> Keep:
    """Says whether a group is learned from, or that and the reason (``--dynamic-sampling-filter-command``)."""
    return _answers("dynamic_sampling_filter", function)


def rollout_sample_filter(function: Remove) -> Remove:
    """Says of each sample whether it is left out (``--rollout-sample-filter-command``)."""
    return _answers("rollout_sample_filter", function)


def reward_post_process(function: Processed) -> Processed:
    """Gives the rewards that are learned from (``--custom-reward-post-process-command``)."""
    return _answers("reward_post_process", function)


def answer(question: str, result: Any, describe: Callable[[BaseException], str]) -> dict[str, Any]:
    """What a function returned, as the loop takes it."""
    match question:
        case "prompt":
            return {"row": result}
        case "rollout_sample_filter":
            return {"remove": [bool(one) for one in result]}
        case "dynamic_sampling_filter":
            keep, reason = result if isinstance(result, tuple) else (result, None)
            return {"keep": bool(keep), "reason": reason}
        case "rm":
            return {"rewards": [_rewarded(one, describe) for one in result]}
        case _:
            return {"rewards": [float(one) for one in result]}


def _rewarded(one: Any, describe: Callable[[BaseException], str]) -> float | dict[str, Any]:
    if isinstance(one, BaseException):
        return {"error": describe(one)}
    try:
        if not isinstance(one, Mapping):
            return _finite("reward", one)
        unknown = set(one) - {"reward", "rewards"}
        if "reward" not in one or unknown:
            raise ValueError(f"expected `reward` and perhaps `rewards`, found {sorted(map(str, one))}")
        parts = {str(name): _finite(name, number) for name, number in (one.get("rewards") or {}).items()}
        return {"reward": _finite("reward", one["reward"]), "rewards": parts}
    except (TypeError, ValueError) as error:
        # Its place would be here, and not in the user's file.
        return {"error": describe(error.with_traceback(None))}


def _finite(name: Any, number: Any) -> float:
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number as `{name}`, found {number}")
    return float(number)
