"""The rollout log. It needs numpy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from . import _native
from ._errors import UsageError

if TYPE_CHECKING:
    import numpy as np

# Columns by their numbers in the log, with numpy's name of their elements.
_COLUMNS = {"tokens": (1, "<i4"), "log_probs": (2, "<f4"), "loss_mask": (3, "u1")}


class Sample:
    """A sample of the log. Its arrays are views of the log's map: read-only, without a copy, valid for as long as they are held,
    also after retention removed the file.

    Attributes:
        position: its number in the log.
        sample_id, group_id, rollout_id: whose it is; the samples of one prompt share ``group_id``.
        reward: scalar reward; 0 until ``scored``.
        scored: whether the reward is known. An answer is in the log the moment it ends, and its score follows.
        verdict: what the score says: ``kept``, ``masked`` (its reward counts, and no token is trained on) or ``left_out`` (no
            step learns from its group, and ``groups`` does not give it).
        evaluation: whether it was measured and is never learned from.
        times_us: when the answer was asked for, when its first token came and when its last, as Unix times in microseconds, 0
            where unknown; empty where the writer does not say.
        finish: ``stop``, ``length`` or ``abort``.
        prompt_len: how many of ``tokens`` are the prompt.
        engine: name of the engine; information only.
    """

    def __init__(self, native: _native.LogRecord) -> None:
        self._native = native
        (
            self.position,
            self.sample_id,
            self.group_id,
            self.rollout_id,
            self.reward,
            self.finish,
            self.prompt_len,
            self.engine,
        ) = native.fields()
        self.scored, self.verdict, self._rewards, self.times_us, self.evaluation = native.score()

    def _view(self, name: str) -> np.ndarray:
        import numpy as np

        number, dtype = _COLUMNS[name]
        column = self._native.column(number)
        return np.empty(0, dtype) if column is None else np.frombuffer(column, dtype)

    @property
    def tokens(self) -> np.ndarray:
        """Token ids of prompt and response: int32, ``[prompt + response]``."""
        return self._view("tokens")

    @property
    def response(self) -> np.ndarray:
        """Token ids of the response: int32, ``[response]``."""
        return self.tokens[self.prompt_len :]

    @property
    def log_probs(self) -> np.ndarray:
        """Log-probability of each response token when it was sampled: float32, ``[response]``."""
        return self._view("log_probs")

    @property
    def loss_mask(self) -> np.ndarray:
        """1 where a response token is trained on: uint8, ``[response]``. Zeros if its score masks it."""
        mask = self._view("loss_mask")
        if self.verdict != "masked":
            return mask
        import numpy as np

        return np.zeros_like(mask)

    @property
    def rewards(self) -> np.ndarray:
        """Several rewards of the answer: float32. The loop writes what was given and what is learned from; empty otherwise."""
        import numpy as np

        return np.array(self._rewards, np.float32)

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Which version generated which response tokens: ``(version, start, end)``."""
        return self._native.spans()

    @property
    def metadata(self) -> bytes:
        """The user's bytes."""
        return self._native.metadata()

    def __repr__(self) -> str:
        return f"Sample(position={self.position}, sample_id={self.sample_id}, group_id={self.group_id}, reward={self.reward})"


class Group(NamedTuple):
    """The samples of one prompt.

    Attributes:
        rollout_id: the training step that they were generated for.
        group_id: the group.
        completed: the position at which it became complete.
        versions: oldest and newest version among all tokens; None without spans.
        samples: the newest record of each sample of a complete answer, by sample id.
    """

    rollout_id: int
    group_id: int
    completed: int
    versions: tuple[int, int] | None
    samples: list[Sample]


class RolloutReader:
    """Reads a log that this process or another one writes. It sees exactly the records that are on stable storage.

    Args:
        directory: the log's directory.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._reader = _native.LogReader(directory)

    @property
    def end(self) -> int:
        """One past the last position that can be read."""
        return self._reader.end()

    def get(self, position: int) -> Sample | None:
        """The record at a position; None where there is none.

        Raises:
            RefusedError: its bytes have changed.
            StoreError: retention removed it.
        """
        found = self._reader.get(position)
        return None if found is None else Sample(found)

    def groups(
        self,
        samples: int,
        *,
        rollout_id: int | None = None,
        completed_from: int = 0,
        version_min: int | None = None,
        limit: int | None = None,
    ) -> list[Group]:
        """The groups that have at least ``samples`` answers with all their samples and scores, as they became complete.

        With ``completed_from`` behind the ``completed`` of the last group taken, each group is given exactly once.

        Args:
            samples: answers that make a group complete.
            rollout_id: only groups of this training step, by group id.
            completed_from: only groups that became complete at or after this position.
            version_min: only groups of which every token was generated by this version or a later one.
            limit: at most so many.
        """
        found = self._reader.groups(samples, rollout_id, completed_from, version_min, limit)
        return [Group(*ids, [Sample(record) for record in records]) for *ids, records in found]

    def learned(self, step: int) -> dict[int, np.ndarray]:
        """What the learner said of the samples that a training step learned from, by position: the log-probability of each
        response token under the weights before the step, float32, ``[response]``; NaN where a token was not trained on. Less
        ``log_probs`` of the sample, it is the mismatch. Empty where the log has nothing of the step.

        Raises:
            RefusedError: its bytes have changed.
            UsageError: a newer release wrote them.
        """
        import numpy as np

        return {position: np.array(values, np.float32) for position, values in self._reader.learned(step)}

    def wait(self, position: int, timeout: float) -> int:
        """Waits until something can be read at or after ``position``, ``timeout`` seconds at most. Returns the end, which is at or
        before ``position`` when the time passed. The writer wakes it; Ctrl-C ends it."""
        return self._reader.wait(position, timeout)


class _Writer:
    """What appends to a log."""

    _log: _native.RolloutLog | _native.RolloutProducer

    def append(self, **sample: Any) -> int:
        """Appends one sample and returns its position once it is on stable storage.

        Args:
            sample_id, group_id, rollout_id: whose it is.
            tokens: token ids of prompt and response, ``[prompt + response]``: from 0 on, and below 2^31.
            prompt_len: how many of them are the prompt.
            log_probs: one for each response token, finite; rounded to float32.
            loss_mask: 1 where a response token is trained on, 0 where not; by default all are.
            reward: scalar reward, finite, 0 by default; rounded to float32.
            finish: ``stop`` (by default), ``length`` or ``abort``.
            spans: ``(version, start, end)``, ascending within the response.
            engine: name of the engine.
            metadata: anything, as bytes.

        Raises:
            UsageError: values that the log cannot hold as they are, lengths that contradict each other, or a record larger
                than a segment. Nothing was appended.
            StoreError: the medium failed, and what a failed sync has left is unknown.
        """
        return self.append_all([sample])[0]

    def append_all(self, samples: Iterable[Mapping[str, Any]]) -> list[int]:
        """Appends several samples, each as for ``append``, makes them durable together, and returns their positions."""
        return self._log.append([_row(**sample) for sample in samples])

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class RolloutLog(_Writer, RolloutReader):
    """A log, open for writing: durable, in mapped files. One process has it open at a time; threads may share it, and other
    processes write to it once it is served.

    Args:
        directory: the log's directory, made if absent.
        run_id: the training run, 16 bytes or 32 hex digits; ``Publisher.run_id`` is one.
        model: the model that generates the rollouts.
        tokenizer_digest: 32 bytes that tell tokenizers apart.

    Raises:
        BusyError: another process writes it.
        RefusedError: it belongs to another run, model or tokenizer.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        run_id: bytes | str,
        *,
        model: str = "policy",
        tokenizer_digest: bytes = bytes(32),
    ) -> None:
        self._log: _native.RolloutLog = _native.RolloutLog(directory, _bytes(run_id), model, tokenizer_digest)
        self._reader = self._log.reader()

    def serve(self) -> None:
        """Lets other processes write to the log, each by a ``RolloutProducer``, until it is closed.

        Raises:
            StoreError: its socket cannot be made.
        """
        self._log.serve()

    def cursor(self, name: str) -> int:
        """The durable position called ``name``: the next record that its consumer wants; 0 until it is first committed."""
        return self._log.cursor(name)

    def commit(self, name: str, position: int) -> None:
        """Moves a cursor. On return it is on stable storage.

        Raises:
            UsageError: a position beyond the end of what is durable, or a name that is not 1 to 64 of ``A-Z a-z 0-9 . _ -``.
        """
        self._log.commit(name, position)

    def close(self) -> None:
        """Syncs and seals the log, and lets another process write it. What was read of it stays valid."""
        self._log.close()


class RolloutProducer(_Writer):
    """Appends to a log that another process has open, and serves (``RolloutLog.serve``). That one keeps all books; columns are
    written to the mapped files from here. Threads may share it, and take turns.

    Args:
        directory, run_id, model, tokenizer_digest: the log's, as for ``RolloutLog``.
        timeout: seconds until a process has to serve it. It has 60 seconds for each answer.

    Raises:
        RefusedError: the log belongs to another run, model or tokenizer.
        StoreError: no process serves it in time, or, of ``append``, it is gone. What it had not acknowledged is in the log or not.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        run_id: bytes | str,
        *,
        model: str = "policy",
        tokenizer_digest: bytes = bytes(32),
        timeout: float = 60.0,
    ) -> None:
        self._log = _native.RolloutProducer(directory, _bytes(run_id), model, tokenizer_digest, timeout)

    def close(self) -> None:
        """Ends the connection."""
        self._log.close()


def _bytes(run_id: bytes | str) -> bytes:
    return bytes.fromhex(run_id) if isinstance(run_id, str) else run_id


def _row(
    *,
    sample_id: int,
    group_id: int,
    rollout_id: int,
    tokens: Any,
    prompt_len: int,
    log_probs: Any,
    loss_mask: Any = None,
    reward: float = 0.0,
    finish: str = "stop",
    spans: Iterable[tuple[int, int, int]] = (),
    engine: str = "",
    metadata: bytes = b"",
) -> dict[str, Any]:
    import numpy as np

    log_probs = _array("log_probs", log_probs, np.float32)
    return {
        "sample_id": sample_id,
        "group_id": group_id,
        "rollout_id": rollout_id,
        "reward": reward,
        "finish": finish,
        "prompt_len": prompt_len,
        "tokens": _array("tokens", tokens, np.int32),
        "log_probs": log_probs,
        "loss_mask": np.ones(log_probs.shape, np.uint8) if loss_mask is None else _array("loss_mask", loss_mask, np.uint8),
        "spans": [tuple(span) for span in spans],
        "engine": engine,
        "metadata": metadata,
    }


def _array(name: str, values: Any, dtype: type[np.generic]) -> np.ndarray:
    """The same values as an array of ``dtype``. Only floating-point numbers may be rounded."""
    import numpy as np

    given = np.asanyarray(values)
    expected = f"values that {np.dtype(dtype).name} can hold"
    # An empty list has no dtype of its own.
    if isinstance(given, np.ma.MaskedArray) or (given.size > 0 and given.dtype.kind not in "biuf"):
        raise _refused(name, expected, f"a {type(given).__name__} of {given.dtype}")
    with np.errstate(invalid="ignore", over="ignore"):
        made = np.ascontiguousarray(given, dtype)
    if np.issubdtype(dtype, np.integer):
        for index in np.flatnonzero(given.ravel() != made.ravel())[:1]:
            raise _refused(name, expected, f"{given.ravel()[index]} at {index}")
    return made


def _refused(name: str, expected: str, found: str) -> UsageError:
    return UsageError(f"{name}: expected {expected}, found {found}", kind="Usage", code=2)
