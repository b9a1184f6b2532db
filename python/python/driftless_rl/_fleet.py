"""Samples from a fleet of inference engines."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from . import _native
from ._native import EngineStatus, Generation
from ._errors import ForkedError

if TYPE_CHECKING:
    from concurrent.futures import Future


def _close(native: _native.Fleet) -> None:
    try:
        native.close()
    except ForkedError:  # the parent's
        pass


class Fleet:
    """Engines that serve one model: SGLang and vLLM servers, or ``driftless serve``. Threads may share it.

    A sample goes to the engine with the fewest requests. One whose engine fails, is slow, or was drawn in part from
    weights older than ``min_version`` is asked for again. The constructor asks each engine; Ctrl-C is raised at its end.

    Args:
        engines: their addresses, ``http://host:port`` of SGLang, ``vllm+http://host:port`` of vLLM.
        checkpoint: a Hugging Face directory of the model. Engines with another configuration are refused.
        api_key, admin_key: what the engines want.
        concurrency: requests under way on one engine.
        deadline: seconds that a sample may take in all; waiting for busy engines does not count.

    Raises:
        EngineError, DeadlineError: an engine does not answer, or serves another model.
        UsageError: an address or a directory that cannot be.
    """

    def __init__(
        self,
        engines: Iterable[str],
        checkpoint: str | os.PathLike[str],
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        concurrency: int = 64,
        deadline: float = 600.0,
    ) -> None:
        self._native = _native.Fleet(list(engines), checkpoint, (api_key, admin_key), concurrency, deadline)
        # Its threads call into the interpreter: they end before an interpreter that ends.
        weakref.finalize(self, _close, self._native)

    def submit(
        self,
        input_ids: Sequence[int],
        *,
        min_version: str | None = None,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        stop_token_ids: Iterable[int] = (),
        stop: Iterable[str] = (),
        ignore_eos: bool = False,
        sampling_seed: int | None = None,
    ) -> Future[Generation]:
        """Asks for a sample, and returns at once. Cancelling the future aborts the request on its engine.

        Args:
            input_ids: the prompt's token ids.
            min_version: label of the oldest version that may draw a token: ``Published.label``.
            max_new_tokens: most tokens of the output.
            temperature: divides the logits; 0 takes the likeliest token.
            top_p: smallest set of tokens with this much probability.
            top_k: number of likeliest tokens to keep; -1 keeps all.
            stop_token_ids: tokens that end the output, in which they are.
            stop: texts that end the output.
            ignore_eos: go on behind the model's own end token.
            sampling_seed: seed of the draws, for engines with deterministic inference.

        Raises:
            UsageError: ``min_version`` is no label.
            ClosedError, ForkedError: the fleet was closed, or belongs to the parent of this process.

        The future raises what ``generate`` does.
        """
        # It is slow to import, and many programs never need it.
        from concurrent.futures import Future, InvalidStateError

        sampling = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": list(stop_token_ids),
            "stop": list(stop),
            "ignore_eos": ignore_eos,
            "sampling_seed": sampling_seed,
        }
        future: Future[Generation] = Future()

        def done(made: Generation | None, error: BaseException | None) -> None:
            try:
                future.set_exception(error) if made is None else future.set_result(made)
            except InvalidStateError:  # it was cancelled meanwhile
                pass

        request = self._native.start(list(input_ids), sampling, min_version, done)
        future.add_done_callback(lambda future: request.cancel() if future.cancelled() else None)
        return future

    def generate(self, input_ids: Sequence[int], **arguments: Any) -> Generation:
        """``submit``, and waits for the sample. Ctrl-C aborts the request.

        Raises:
            DeadlineError: no engine gave the sample in time.
            UsageError: a token id outside of the vocabulary, settings that cannot be.
            EngineError: an engine refuses the request.
            ClosedError: the fleet was closed before.
        """
        future = self.submit(input_ids, **arguments)
        try:
            return future.result()
        finally:
            future.cancel()

    async def generate_async(self, input_ids: Sequence[int], **arguments: Any) -> Generation:
        """``generate`` for a coroutine. Cancelling it aborts the request."""
        import asyncio

        return await asyncio.wrap_future(self.submit(input_ids, **arguments))

    def status(self) -> list[EngineStatus]:
        """What is known of each engine, without asking it."""
        return self._native.status()

    def close(self) -> None:
        """Gives up what is under way. The fleet cannot be used afterwards."""
        self._native.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
