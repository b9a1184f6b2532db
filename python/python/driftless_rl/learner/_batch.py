"""From records of the log to tensors. A hidden state at place t predicts token t + 1: a sample's last token is only
predicted, never read."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import RolloutReader
from .. import Sample as Record
from ._ranks import Ranks, Refused


@dataclass(frozen=True)
class Sample:
    """A record with what the loop says about it. Arrays are views of the log's map.

    Attributes:
        record: tokens ``[prompt + response]`` i32, and log-probs ``[response]`` f32 of the engine.
        trained: bool ``[response]``: what is trained on.
        rollout_id: samples of one id share a denominator.
        advantage: of every token of the response.
    """

    record: Record
    trained: np.ndarray
    rollout_id: int
    advantage: float

    def __len__(self) -> int:
        return len(self.record.tokens)


@dataclass(frozen=True)
class Batch:
    """Some samples as one input of the model: n tokens in r rows, of which m are trained on.

    Attributes:
        order: numbers of the samples, in the order of their tokens.
        tokens, positions: i64 ``[r, n]``. Packed: one row, whose positions begin anew with each sample. Padded: a row each.
        mask: i64 ``[r, n]``, 1 where a padded row has a token; None if packed.
        bounds: i32 ``[s + 1]``, the first places of s packed samples, and n; and the length of the longest.
        places: i64 ``[m]``: places in the flat ``tokens`` that predict a trained token.
        labels: i64 ``[m]``: the trained token.
        samples: i64 ``[m]``: the place in ``order`` of its sample.
        weights, rollout_log_probs, advantages: f32 ``[m]``: share in the loss, log-prob of the engine, advantage.
        old_log_probs: f32 ``[m]``: log-prob of the old policy; None if it is the one that is trained.
    """

    order: list[int]
    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None
    bounds: tuple[torch.Tensor, int]
    places: torch.Tensor
    labels: torch.Tensor
    samples: torch.Tensor
    weights: torch.Tensor
    rollout_log_probs: torch.Tensor
    advantages: torch.Tensor
    old_log_probs: torch.Tensor | None = None


class LogProbs:
    """Log-probs of the trained tokens of some samples, as batches of all ranks compute them."""

    def __init__(self, samples: list[Sample]) -> None:
        self._trained = [torch.from_numpy(sample.trained) for sample in samples]
        self._values = [torch.zeros(len(trained), dtype=torch.float64) for trained in self._trained]

    def put(self, order: list[int], log_probs: torch.Tensor) -> None:
        """Takes those ``[m]`` of the samples that ``order`` numbers."""
        parts = log_probs.detach().double().cpu().split([int(self._trained[index].sum()) for index in order])
        for index, part in zip(order, parts, strict=True):
            self._values[index][self._trained[index]] = part

    def rows(self, ranks: Ranks) -> list[list[float]]:
        """A number for each response token of each sample, 0 where it is not trained on."""
        return [values.tolist() for values in self._sum(ranks).split([len(values) for values in self._values])]

    def text(self, ranks: Ranks) -> str:
        """Base64 of a little-endian f32 for each response token, sample after sample; NaN where it is not trained on."""
        values = self._sum(ranks).masked_fill(~torch.cat([torch.zeros(0, dtype=torch.bool), *self._trained]), torch.nan)
        return base64.b64encode(values.numpy().astype("<f4").tobytes()).decode()

    def _sum(self, ranks: Ranks) -> torch.Tensor:
        return ranks.sum(torch.cat([torch.zeros(0, dtype=torch.float64), *self._values]))


def read(log: RolloutReader, given: Any, vocabulary: int, *, whole: bool = False) -> list[Sample]:
    """The samples of a call, by position. ``whole`` trains on every token of a response.

    Raises:
        Refused: no such record, or one that cannot be learned from.
        StoreError, RefusedError: retention removed a record, or its bytes have changed.
    """
    if not isinstance(given, list) or not all(isinstance(sample, dict) for sample in given):
        raise Refused(f"samples: expected a list of objects, found {str(given)[:200]}")
    if given:
        # Looks for what was appended since the last call; the loop names what is durable.
        log.wait(max(_number(sample, "position", int) for sample in given), 0.0)
    return [_sample(log, sample, vocabulary, whole) for sample in given]


def _sample(log: RolloutReader, given: dict[str, Any], vocabulary: int, whole: bool) -> Sample:
    position = _number(given, "position", int)
    record = log.get(position)
    if record is None:
        raise Refused(f"position {position}: expected a record of the log, found none before {log.end}")
    tokens, log_probs, mask = record.tokens, record.log_probs, record.loss_mask
    response = len(tokens) - record.prompt_len
    where = f"position {position}: "
    if record.prompt_len < 1 or response < 1:
        found = f"a prompt of {record.prompt_len} in {len(tokens)} tokens"
        raise Refused(f"{where}expected a prompt and a response, found {found}")
    if len(log_probs) != response or len(mask) not in (0, response):
        found = f"{len(log_probs)} and {len(mask)}"
        raise Refused(f"{where}expected {response} log-probs and as many values of the loss mask, found {found}")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise Refused(f"{where}expected token ids 0..{vocabulary}, found {tokens.min()}..={tokens.max()}")
    if not np.isfinite(log_probs).all():
        raise Refused(f"{where}expected finite log-probs, found NaN or infinity")
    trained = np.ones(response, bool) if whole or len(mask) == 0 else mask != 0
    if not whole:
        trained[: _number({"stale": 0, **given}, "stale", int)] = False
    return Sample(record, trained, _number(given, "rollout_id", int), _number(given, "advantage", float))


def _number(given: dict[str, Any], name: str, kind: type) -> Any:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not np.isfinite(value):
        expected = "a number" if kind is float else "a whole number"
        raise Refused(f"samples: expected `{name}`, {expected}, found {value!r}")
    if kind is int and value < 0:
        raise Refused(f"samples: expected `{name}`, 0 or more, found {value}")
    return value


def token_weights(samples: list[Sample], per_token: bool) -> list[float]:
    """The weight of a trained token of each sample: their sum over all is the mean over tokens, or over each rollout's
    tokens and then over rollouts."""
    counts: dict[int, int] = {}
    for sample in samples:
        counts[sample.rollout_id] = counts.get(sample.rollout_id, 0) + int(sample.trained.sum())
    if per_token:
        return [1.0 / max(sum(counts.values()), 1)] * len(samples)
    return [1.0 / (len(counts) * max(counts[sample.rollout_id], 1)) for sample in samples]


def steps(rollouts: list[int], global_batch_size: int | None) -> list[list[int]]:
    """Indices of ``rollouts``, the ids of samples, in the fewest optimiser steps of at most so many rollouts each, in their
    order and as equal as can be: answers that failed are absent."""
    together = len(set(rollouts))
    count = -(-together // (global_batch_size or max(together, 1)))
    places: dict[int, int] = {}
    found: list[list[int]] = []
    for index, rollout in enumerate(rollouts):
        step = places.setdefault(rollout, len(places)) * count // together
        if step == len(found):
            found.append([])
        found[step].append(index)
    return found


def micro_batches(
    lengths: list[int], max_tokens: int, *, ranks: int, padded: bool, max_samples: int | None = None
) -> list[list[int]]:
    """Indices of ``lengths`` in micro-batches of at most ``max_tokens`` tokens, padding included, longest first.

    A longer sample has one of its own. Where there are enough samples, they are small enough for each of ``ranks`` to have one.
    """
    limit = min(max_tokens, max([-(-sum(lengths) // ranks), *lengths]))
    batches: list[list[int]] = []
    taken: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        for at, batch in enumerate(batches):
            more = lengths[batch[0]] if padded else lengths[index]
            if taken[at] + more <= limit and len(batch) < (max_samples or len(lengths)):
                batch.append(index)
                taken[at] += more
                break
        else:
            batches.append([index])
            taken.append(lengths[index])
    return batches


def pack(samples: list[Sample], weights: list[float], order: list[int], *, padded: bool, device: torch.device) -> Batch:
    """The samples that ``order`` numbers as one input; ``weights`` are those of ``token_weights``."""
    lengths = [len(samples[index]) - 1 for index in order]
    shape = (len(order), max(lengths)) if padded else (1, sum(lengths))
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.int64) if padded else None
    columns: list[list[np.ndarray]] = [[] for _ in range(6)]
    start = 0
    for at, (index, length) in enumerate(zip(order, lengths, strict=True)):
        sample, begin = samples[index], at * shape[1] if padded else start
        row = slice(begin, begin + length)
        tokens.reshape(-1)[row] = sample.record.tokens[:-1]
        positions.reshape(-1)[row] = np.arange(length)
        if mask is not None:
            mask.reshape(-1)[row] = 1
        chosen = np.flatnonzero(sample.trained)
        some = (
            begin + sample.record.prompt_len - 1 + chosen,
            sample.record.response[chosen],
            np.full(len(chosen), at),
            np.full(len(chosen), weights[index], np.float32),
            sample.record.log_probs[chosen],
            np.full(len(chosen), sample.advantage, np.float32),
        )
        for column, values in zip(columns, some, strict=True):
            column.append(values)
        start += length
    put = lambda array: None if array is None else torch.from_numpy(array).to(device)
    kinds = (np.int64, np.int64, np.int64, np.float32, np.float32, np.float32)
    bounds = put(np.cumsum([0, *lengths], dtype=np.int32)), max(lengths)
    joined = (np.concatenate(column, dtype=kind) for column, kind in zip(columns, kinds, strict=True))
    return Batch(order, put(tokens), put(positions), put(mask), bounds, *map(put, joined))
