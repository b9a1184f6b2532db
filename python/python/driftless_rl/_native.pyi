"""The native half of driftless. Its public half is ``driftless_rl``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, final

__version__: str

def main(args: list[str]) -> int: ...
def end(seconds: float) -> bool: ...
@final
class Published:
    """A committed version, in numbers."""

    version: int
    """The version."""
    label: str
    """The text that engines are given for it: ``<12 hex digits of the run>:<version>``."""
    manifest_digest: str
    """Its identity."""
    full_because: str | None
    """Why it was published in full, or None."""
    left_out: dict[str, str]
    """Output heads that ``config.json`` ties to the word embeddings, and that were left out: each with the embeddings' name."""
    anchor: bool
    """Whether readers can start here."""
    publication_bytes: int
    """Bytes stored: objects and manifest."""
    full_bytes: int
    """Bytes of all tensors; tied weights count once."""
    changed: int
    """Elements that differ from the version before."""
    elements: int
    """Elements in all."""
    density: float
    """Share of elements that changed, 0 to 1."""
    encode_seconds: float
    """Until the last tensor was encoded; uploads run beside it."""
    upload_seconds: float
    """From there until the version was committed."""
    device_bytes: int
    """Bytes of tensors that were encoded on the GPU they lie on."""

@final
class Publisher:
    def __init__(self, settings: dict[str, Any]) -> None: ...
    def state(self) -> tuple[str, int | None]: ...
    def check(self) -> None: ...
    def publish(
        self,
        tensors: list[tuple[str, Any, tuple[list[int], int] | None]],
        step: int,
        mode: str,
        checkpoint: str | None,
        attempt: str | None,
    ) -> tuple[Published | None, str | None]: ...
    def publish_reference(self, checkpoint: Any, step: int, gpu: int | None) -> Published: ...
    def prepare(self, tensors: list[tuple[str, Any, tuple[list[int], int] | None]]) -> str | None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...
@final
class Codec:
    """Lossless deltas of single tensors, from buffer to buffer: floats by steps in units of the last place, other types by bytes.

    Args:
        profile: ``wire`` for payloads as small as they get, ``fast`` for payloads that are quick to decode.
    """

    def __init__(self, profile: str = "wire") -> None: ...
    def encode(self, base: Any, new: Any) -> bytes:
        """The payload that turns ``base`` into ``new``: contiguous numpy arrays or torch tensors in host memory, of one dtype
        and size. Nothing is copied, and other threads run meanwhile.

        Raises:
            TensorError: a tensor that cannot be read, or another dtype.
            RefusedError: another size.
        """
    def apply(self, tensor: Any, payload: bytes) -> int:
        """Applies a payload to ``tensor``, the base, in place; returns how many elements changed.

        Raises:
            TensorError: a tensor that cannot be written.
            RefusedError: another base, or a damaged payload. Nothing was written.
        """

@final
class Generation:
    """A finished sample."""

    output_ids: list[int]
    """The sampled token ids."""
    log_probs: list[float]
    """Log-probability of each under the distribution it was drawn from, temperature included, before top-p and top-k."""
    versions: list[tuple[str, int, int]]
    """Which weights drew which tokens: label, first output token, one past the last; contiguous and complete."""
    versions_reported: bool
    """False where the engine reports one label per reply only: a change of weights in the middle would not show."""
    finish: str
    """Why it ended: ``stop`` (a stop token, or the model's end token), ``length`` or ``abort``."""
    engine: str
    """Address of the engine that made it."""
    rid: str
    """The request's id."""
    retractions: int
    """How often a pause sent the request back to the queue."""
    cached_tokens: int | None
    """Tokens of the prompt that the engine had in its prefix cache. None where it does not say."""

@final
class EngineStatus:
    """What is known of an engine."""

    url: str
    """Its address."""
    up: bool
    """Whether it answered the last time it was asked anything."""
    serving: str | None
    """The label of the version it served then."""
    in_flight: int
    """This fleet's requests on it."""
    failure: str | None
    """Its last failure."""

@final
class Request:
    def cancel(self) -> None: ...

@final
class Fleet:
    def __init__(
        self, engines: list[str], checkpoint: Any, keys: tuple[str | None, str | None], concurrency: int, deadline: float
    ) -> None: ...
    def start(self, input_ids: list[int], sampling: dict[str, Any], min_version: str | None, done: Any) -> Request: ...
    def status(self) -> list[EngineStatus]: ...
    def close(self) -> None: ...

@final
class Follower:
    def __init__(self, settings: dict[str, Any]) -> None: ...
    def advance(self, version: int | None = None) -> tuple[int, int]: ...
    def status_json(self) -> str: ...
    def close(self) -> None: ...

def checkpoint_tensors(directory: Any, ties_head: bool) -> list[tuple[str, str, list[int]]]:
    """Name, dtype as torch calls it, and shape of each tensor of a checkpoint directory. An output head is none of them where
    the model takes its word embeddings for it.

    Raises:
        RefusedError, StoreError: it is none, or has a tensor of a dtype that is not patched.
    """

REFUSES: int
"""A rank's vote: it can neither write the delta nor have the engine load, or could not write it."""
LOADS: int
"""A rank's vote: it has nothing prepared."""
PATCHES: int
"""A rank's vote: it is ready to write the delta, or has written it."""

def plugin_dir() -> Path:
    """The directory where plugins and followers of this user meet: ``DRIFTLESS_PLUGIN_DIR``, or one in shared memory."""

def patch_refused(label: str, why: str) -> str:
    """What a follower is answered where the patch to ``label`` was not written, or nothing was compared with it."""

def refuse_patches(directory: Any, rank: tuple[int, int, int], why: str) -> None:
    """Tells followers that this rank never patches. ``directory``, ``rank``: as for :class:`LiveModel`."""

def announce_server(directory: Any, port: int) -> None:
    """Tells followers that the HTTP server of this process has its engine patched without a pause."""

@final
class Patch:
    """What a patch did at a rank."""

    def reply(self, stood_still: float, cache: str | None) -> str:
        """What a follower is answered.

        Args:
            stood_still: seconds for which the engine's thread stood still.
            cache: what became of the cache of the old weights: ``dropped``, ``kept``, or ``versioned``; None: it was left
                alone.
        """

@final
class LiveModel:
    """The weights of one rank of an engine in this process. A native thread prepares what followers offer."""

    def __init__(
        self,
        directory: Any,
        rank: tuple[int, int, int],
        tensors: list[tuple[str, str, list[int]]],
        live: list[tuple[str, Any]],
        tables: list[Any],
        copies: list[tuple[int, int, list[int], tuple[int, list[int]], tuple[int, list[int]], int | None]],
        slots: list[tuple[dict[str, Any], str, int]],
        device: int | None,
        arena: int,
        ties_head: bool,
    ) -> None:
        """Begins to look for deltas. Nothing is known of the version that is live.

        Args:
            directory: where plugins and followers meet; it is made for this user alone.
            rank: the engine's port, which rank, of how many.
            tensors: name, dtype and shape of each tensor of the checkpoint.
            live: names and flat torch tensors, each of a whole storage. They are held.
            tables: flat torch tensors: what a live tensor has instead of each value of 16 bits. They are held.
            copies: which view of which tensor lies in which live tensor: indices of both, the views' sizes, and offset and
                strides of each view, in elements; and the table that its elements go through, if they do. No two write
                the same element.
            slots: the dict and key that hold each parameter, and its address.
            device: the CUDA device that all of them lie on; None: host memory.
            arena: bytes of its memory that are taken for deltas, if they are there. Larger ones stay in host memory.
            ties_head: whether the model takes its word embeddings for its output head. Versions may have that as well.

        Raises:
            RefusedError: a directory that others can enter; a copy that does not fit; a device that cannot be used.
        """
    def loaded(self, label: str | None) -> None:
        """The engine loaded weights under a label, or somebody changed them. A fence's label counts as its version's."""
    def patch(self, label: str, least: Callable[[int], int] | None) -> Patch | None:
        """Makes the weights those of ``label``. None if they are not prepared for it at every rank. Other threads run
        meanwhile; none may read the weights.

        Args:
            label: the version's.
            least: is given this rank's vote, and returns the least of all ranks'.
                It is called before anything is written, and once more, where all ranks are ready, when all have tried to.
                None: there is one rank.

        Raises:
            RefusedError: weights that moved, or are not what they were when the delta was prepared; another rank that
                refuses. They are what they were.
        """
    def announce_compare(self) -> None:
        """Tells followers that the engine takes calls for :meth:`compare`."""
    def compare(
        self, label: str, directory: Any, sample: int | None, least: Callable[[bytes], bytes] | None
    ) -> str:
        """Compares the weights with those of a checkpoint, byte for byte: what a follower is answered. Nothing changes. Other
        threads run meanwhile; none may write the weights.

        Args:
            label: the version's.
            directory: the checkpoint's.
            sample: the number of a sample; None: all weights are compared.
            least: is given bytes of this rank, and returns of each the least of all ranks'. It is called up to three
                times. None: there is one rank.

        Raises:
            RefusedError: a checkpoint that cannot be read, or of another model; weights that moved; another rank that
                refuses.
        """

@final
class Column:
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class LogRecord:
    def fields(self) -> tuple[int, int, int, int, float, str, int, str]: ...
    def score(self) -> tuple[bool, str, list[float], list[int], bool]: ...
    def spans(self) -> list[tuple[int, int, int]]: ...
    def metadata(self) -> bytes: ...
    def column(self, id: int) -> Column | None: ...

@final
class LogReader:
    def __init__(self, directory: Any) -> None: ...
    def end(self) -> int: ...
    def get(self, position: int) -> LogRecord | None: ...
    def wait(self, position: int, seconds: float) -> int: ...
    def learned(self, step: int) -> list[tuple[int, list[float]]]: ...
    def groups(
        self,
        samples: int,
        rollout_id: int | None,
        completed_from: int,
        version_min: int | None,
        limit: int | None,
    ) -> list[tuple[int, int, int, tuple[int, int] | None, list[LogRecord]]]: ...

@final
class RolloutProducer:
    def __init__(self, directory: Any, run_id: bytes, model: str, tokenizer_digest: bytes, seconds: float) -> None: ...
    def append(self, rows: list[dict[str, Any]]) -> list[int]: ...
    def close(self) -> None: ...

@final
class RolloutLog:
    def __init__(self, directory: Any, run_id: bytes, model: str, tokenizer_digest: bytes) -> None: ...
    def append(self, rows: list[dict[str, Any]]) -> list[int]: ...
    def serve(self) -> None: ...
    def cursor(self, name: str) -> int: ...
    def commit(self, name: str, position: int) -> None: ...
    def reader(self) -> LogReader: ...
    def close(self) -> None: ...
