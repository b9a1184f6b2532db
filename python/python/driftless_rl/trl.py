"""Rollouts for TRL's ``GRPOTrainer`` from a fleet of engines that stand apart from it.

    publish = PublishCallback("file:///shared/store", "my-run")
    trainer = GRPOTrainer(…, rollout_func=fleet_rollouts(fleet, publish), callbacks=[publish])
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list

from ._errors import UsageError
from ._fleet import Fleet

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from .transformers import PublishCallback

__all__ = ["fleet_rollouts"]


def fleet_rollouts(fleet: Fleet, publish: PublishCallback | None = None) -> Callable[[list[Any], GRPOTrainer], dict[str, Any]]:
    """A ``rollout_func`` that draws a completion for each prompt from ``fleet``.

    Temperature, top-p, top-k and the length of completions are the trainer's. Engines end a completion with the end token of
    the model's own generation config. Reward functions are also given ``versions``: which weights drew which tokens.

    Args:
        fleet: engines that serve the trainer's model.
        publish: what publishes the trainer's model. No token is then drawn by weights older than it published last.

    The function raises:
        UsageError: ``min_p`` or ``repetition_penalty`` of the trainer, which a fleet does not know.
        driftless_rl.Error: what ``Fleet.generate`` raises ends the training.
    """

    def rollouts(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        for name, default in (("min_p", (None, 0.0)), ("repetition_penalty", (None, 1.0))):
            if (found := getattr(trainer, name)) not in default:
                raise UsageError(f"{name}: expected {default[-1]}, found {found}", kind="Usage", code=2)
        published = publish.published if publish is not None else None
        # The first process alone knows it.
        label = broadcast_object_list([published and published.label])[0]
        prompt_ids = _tokenized(prompts, trainer)
        asked: list[Future[Any]] = [
            fleet.submit(
                ids,
                min_version=label,
                max_new_tokens=trainer.max_completion_length,
                temperature=trainer.temperature,
                top_p=trainer.top_p,
                # Of the trainer, 0 keeps all.
                top_k=trainer.top_k or -1,
            )
            for ids in prompt_ids
        ]
        try:
            made = [one.result() for one in asked]
        finally:
            for one in asked:
                one.cancel()
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [one.output_ids for one in made],
            "logprobs": [one.log_probs for one in made],
            "versions": [one.versions for one in made],
        }

    return rollouts


def _tokenized(prompts: list[Any], trainer: GRPOTrainer) -> list[list[int]]:
    """The prompts as the trainer's model reads them: texts, or conversations by its chat template."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return tokenizer(text=prompts)["input_ids"]
    return [
        tokenizer.apply_chat_template(
            prompt,
            tools=trainer.tools or None,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )["input_ids"]
        for prompt in prompts
    ]
