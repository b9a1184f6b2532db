"""Which functions answer which questions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ._turn import BlockingTurn, Sample, Turn

# By the question's name, as the loop asks it.
functions: dict[str, Callable[..., Any]] = {}

Rewards = Sequence[float]
Kept = bool | tuple[bool, str]
Function = TypeVar("Function", bound=Callable[..., Any])
Generate = TypeVar("Generate", bound=Callable[[Turn], Awaitable[None]] | Callable[[BlockingTurn], None])
Reward = TypeVar("Reward", bound=Callable[[list[Sample]], Rewards | Awaitable[Rewards]])
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
    """Gives each sample of a group a number (``--custom-rm-command``)."""
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


def reward_post_process(function: Reward) -> Reward:
    """Gives the rewards that are learned from (``--custom-reward-post-process-command``)."""
    return _answers("reward_post_process", function)


def answer(question: str, result: Any) -> dict[str, Any]:
    """What a function returned, as the loop takes it."""
    match question:
        case "prompt":
            return {"row": result}
        case "rollout_sample_filter":
            return {"remove": [bool(one) for one in result]}
        case "dynamic_sampling_filter":
            keep, reason = result if isinstance(result, tuple) else (result, None)
            return {"keep": bool(keep), "reason": reason}
        case _:
            return {"rewards": [float(one) for one in result]}
