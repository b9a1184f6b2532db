"""Publishing a trainer's tensors."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import _native
from ._native import Published
from ._errors import BusyError, UsageError

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_log = logging.getLogger(__name__)


class Slice(NamedTuple):
    """What one rank holds of a tensor: consecutive elements in flat row-major order.

    Attributes:
        tensor: the elements, as a contiguous numpy array or torch tensor of any shape.
        shape: the shape of the whole tensor, outermost extent first.
        start: the first element's place in the whole tensor, counted in elements.
    """

    tensor: Any
    shape: Sequence[int]
    start: int


class LazyTensor(NamedTuple):
    """A tensor that is read when it is its turn, so that memory holds few of them at a time.

    Attributes:
        shape: its shape, outermost extent first.
        dtype: its element type, as torch or numpy name it.
        read: returns it, as a contiguous numpy array or torch tensor in host memory; perhaps more than once, on another
            thread, each time the same.
    """

    shape: Sequence[int]
    dtype: Any
    read: Callable[[], Any]


class Publisher:
    """Publishes the versions of one model of a run, one after the other.

    It keeps a copy of the newest version, the baseline, which the next delta starts from. One publisher serves a run and
    a model at a time. A version exists once ``publish`` has returned, and never half: neither an exception, nor Ctrl-C,
    nor the end of the process leaves a part of one.

    Args:
        store: where versions go: ``file:///dir``, a path, ``s3://bucket/prefix``, ``gs://…``, ``az://…``. Object stores
            take credentials, region and endpoint from the environment (``AWS_…``, ``GOOGLE_…``, ``AZURE_…``).
        run: name of the run in the store.
        resume: go on with the run; otherwise begin it, which a taken name refuses. ``auto`` goes on with the run if there is
            one, and otherwise begins it, as a job needs that is started again.
        model: name of the model within the run.
        baseline_dir: directory of the baseline; by default one in the user's cache, by store, run and model. It takes as
            much space as the model.
        hf_checkpoint: Hugging Face directory whose ``config.json``, tokenizer and other files travel with every version;
            its weights are left alone.
        files: further files: names to contents, or paths. They win over those of ``hf_checkpoint``.
        profile: ``wire`` for deltas as small as they get, ``fast`` for deltas that are quick to decode.
        anchor_every: also carry full tensors in every version whose number is a multiple of this.
        anchor_share: also carry full tensors when the deltas since the last ones weigh this share of the model.
        allow_layout_change: publish in full what has other tensors, shapes or types than the version before.
        allow_non_finite: publish NaN and infinities.
        sign_key: file of the key to sign versions with, as ``driftless keygen`` makes it.
        trust_keys: files of public keys whose versions are gone on from as well.
        notify: followers that look at the store as soon as a version is there, by the URLs of their ``--listen`` addresses.
            ``publish`` waits for none of them; with ``rank=`` those of rank 0 are told.
        notify_token: the token that these followers want.
        threads: threads that encode; by default as many as there are cores, up to 8.
        buffer_bytes: memory for tensors on their way, 1.5 GiB by default.
        device_base: where what was published last of tensors on a GPU is kept, which their next delta starts from:
            ``device`` memory, as much as the model takes; pinned ``host`` memory, which takes longer; ``off`` copies
            such tensors to the host, which encodes them.
        rank, ranks: for a trainer whose ranks hold parts of the model: this rank, from 0, and their number. Every rank
            has a publisher, and a ``baseline_dir``, of its own; rank 0 begins the run and brings the files.
        join_deadline: seconds that ranks wait for each other.

    Raises:
        RunError: the run's name is taken, or there is no such run.
        UsageError: a setting that cannot be.
        BusyError: another process has the baseline.
        StoreError, DeadlineError, RefusedError: what the store or the file system said.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        run: str,
        *,
        resume: bool | Literal["auto"] = False,
        model: str = "policy",
        baseline_dir: str | os.PathLike[str] | None = None,
        hf_checkpoint: str | os.PathLike[str] | None = None,
        files: Mapping[str, bytes] | Iterable[str | os.PathLike[str]] = (),
        profile: Literal["wire", "fast"] = "wire",
        anchor_every: int | None = None,
        anchor_share: float | None = None,
        allow_layout_change: bool = False,
        allow_non_finite: bool = False,
        sign_key: str | os.PathLike[str] | None = None,
        trust_keys: Iterable[str | os.PathLike[str]] = (),
        notify: Iterable[str] = (),
        notify_token: str | None = None,
        threads: int | None = None,
        buffer_bytes: int | None = None,
        device_base: Literal["device", "host", "off"] = "device",
        rank: int | None = None,
        ranks: int | None = None,
        join_deadline: float = 600.0,
    ) -> None:
        if (rank is None) != (ranks is None):
            raise UsageError("rank and ranks: expected both or neither, found one", kind="Usage", code=2)
        self._native = _native.Publisher(
            {
                "store": os.fspath(store),
                "run": run,
                "model": model,
                "resume": resume,
                "baseline_dir": baseline_dir,
                "files": _files(files),
                "hf_checkpoint": hf_checkpoint,
                "profile": profile,
                "anchor_every": anchor_every,
                "anchor_share": anchor_share,
                "allow_layout_change": allow_layout_change,
                "allow_non_finite": allow_non_finite,
                "sign_key": sign_key,
                "trust_keys": list(trust_keys),
                "notify": list(notify),
                "notify_token": notify_token,
                "threads": threads,
                "buffer_bytes": buffer_bytes,
                "device_base": device_base,
                "rank": None if rank is None else (rank, ranks),
                "join_deadline": join_deadline,
                "gpu": _gpu(),
            }
        )
        self._lock = threading.Lock()
        self._warned = False
        self._left_out: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[Published | None] | None = None

    @property
    def run_id(self) -> str:
        """The run's id, 32 hex digits.

        Raises:
            BusyError: ``publish_async`` is under way; its future's ``result`` ends that.
        """
        return self._native.state()[0]

    @property
    def version(self) -> int | None:
        """The newest version that this publisher knows to be committed; None before the first.

        Raises:
            BusyError: ``publish_async`` is under way; its future's ``result`` ends that.
        """
        return self._native.state()[1]

    def publish(
        self,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
        *,
        step: int = 0,
        mode: Literal["delta", "full"] = "delta",
        checkpoint: str | None = None,
        attempt: str | None = None,
    ) -> Published | None:
        """Publishes tensors as the next version, and returns once it is committed.

        The tensors are read in place, without the interpreter's lock: nobody may write to them meanwhile. They have to be
        contiguous. Element types are those of safetensors of a byte or more, bf16 and fp8 included.

        A torch tensor on a CUDA GPU is encoded there, as soon as what the current stream does to it is done: only what
        changed comes to the host. The first version, one in full and one with ``anchor_every`` or ``anchor_share`` are
        copied to the host; so is what the GPU cannot take, of which the first case is a ``RuntimeWarning``.

        Tensors that share their memory are published once, under each of their names. An output head (``lm_head.weight``)
        that ``config.json`` ties to the word embeddings is left out, which is logged once: engines take the embeddings for
        it. It stays where the version before has it, and with ``rank=``.

        Args:
            tensors: Hugging Face names to tensors, such as ``model.state_dict()``, or pairs of them. A value is a numpy
                array, a torch tensor, a ``LazyTensor``, or with ``rank=`` a ``Slice``.
            step: the trainer's step, for the record.
            mode: ``delta`` is the difference to the version before, in full where there is none; ``full`` is all of it.
            checkpoint: the trainer's own checkpoint that belongs to the version, for the record.
            attempt: with ``rank=``: a name that all ranks of this publication share and no other one has, such as
                ``<job id>-<step>``.

        Returns:
            The version's numbers; None on the ranks behind 0, whose ``version`` has moved.

        Raises:
            TensorError: a tensor that cannot be read, or that changed meanwhile; a tied output head that is not the word
                embeddings. Nothing is published.
            LayoutChangedError: other tensors, shapes or types than in the version before.
            NotFiniteError: NaN or infinities.
            RunError: another publisher was faster, or ranks contradict each other.
            DeadlineError: the store or another rank did not answer in time.
            BusyError: a publication is under way.
            ForkedError: the publisher belongs to the parent of this process.
            KeyboardInterrupt: Ctrl-C. The version before stays the newest, unless this one was being committed.
        """
        published, because = self._native.publish(_given(tensors), step, mode, checkpoint, attempt)
        self._warn(because)
        if published is not None:
            self._say(published.left_out)
        return published

    def prepare(self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Makes GPUs ready for the first delta behind ``publish_reference`` or ``resume=True``.

        That delta would do so otherwise: have the GPU compile what encodes, and copy there what the newest version has. Of
        tensors that still have it, as those of a checkpoint that was just loaded, the copy is made on the GPU; of others,
        from the baseline. The call waits until the baseline is on disk. The copy takes its memory now, before the first
        step of the optimiser takes its own.

        Args:
            tensors: what is to be published next, as for ``publish``.

        Raises:
            TensorError, BusyError, ForkedError, KeyboardInterrupt: as ``publish``.
        """
        self._warn(self._native.prepare(_given(tensors)))

    def _warn(self, because: str | None) -> None:
        """Says once why the host has to encode tensors."""
        if because is not None and not self._warned:
            self._warned = True
            warnings.warn(f"tensors on a GPU are copied to the host to be published: {because}", RuntimeWarning, stacklevel=3)

    def _say(self, left_out: Mapping[str, str]) -> None:
        """Says of each tensor once that it is left out."""
        for name in left_out.keys() - self._left_out:
            self._left_out.add(name)
            _log.warning("`%s` is left out: config.json ties it to `%s`, which engines take for it", name, left_out[name])

    def publish_async(
        self,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
        **arguments: Any,
    ) -> Future[Published | None]:
        """``publish`` on a thread. The tensors belong to it until the future is done. Pairs are taken before the call returns.

        One publication is under way at a time: wait for ``result(timeout)``, or ask ``done()``, before the next call and
        before the optimiser writes to the tensors. The interpreter waits for it before it ends.

        Raises:
            BusyError: the one before is not done.
            ClosedError: the publisher was closed.
        """
        # It is slow to import, and many programs never need it.
        from concurrent.futures import ThreadPoolExecutor

        # Said here, where the caller is; the thread that would say it is not in a forked child.
        self._native.check()
        with self._lock:
            if self._last is not None and not self._last.done():
                raise BusyError("a publication is under way; wait for its future", kind="Busy", retryable=True)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="driftless-publish")
            # Here: the thread has streams of its own, and pairs may come from a generator that makes them on this one's.
            pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
            _synchronize(getattr(value, "tensor", value) for _, value in pairs)
            self._last = self._pool.submit(self.publish, pairs, **arguments)
            return self._last

    def publish_reference(self, checkpoint: str | os.PathLike[str], *, step: int = 0) -> Published:
        """Publishes version 0 as the digests of a checkpoint directory that every host has already.

        Raises:
            UsageError: the run has a version already.
        """
        return self._native.publish_reference(checkpoint, step, _gpu())

    def cancel(self) -> None:
        """Ends the publication that is under way, before its next tensor: it raises ``CancelledError``."""
        self._native.cancel()

    def close(self) -> None:
        """Waits for what is under way, and lets go of the baseline. The publisher cannot be used afterwards."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self._native.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _given(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> list[tuple[str, Any, tuple[list[int], int] | None]]:
    """Tensors as they are passed on, when nothing on a GPU writes to them any more."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    given = [
        (name, value.tensor, (list(value.shape), value.start)) if isinstance(value, Slice) else (name, value, None)
        for name, value in pairs
    ]
    _synchronize(tensor for _, tensor, _ in given)
    return given


def _gpu() -> int | None:
    """The GPU that this thread of a trainer works on, if it works on one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    _load_runtime_compiler()
    return torch.cuda.current_device()


def _synchronize(tensors: Iterable[Any]) -> None:
    """Waits for what the current streams do to tensors on GPUs."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    devices = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cuda}
    if devices:
        _load_runtime_compiler()
    for device in devices or {torch.cuda.current_device()}:
        torch.cuda.current_stream(device).synchronize()


@functools.cache
def _load_runtime_compiler() -> None:
    """Loads CUDA's runtime compiler from where PyPI's packages have it: the dynamic loader does not look there."""
    # Slow to import, and rarely needed.
    import ctypes
    import glob
    import importlib.util

    packages = importlib.util.find_spec("nvidia")
    for folder in packages.submodule_search_locations or () if packages else ():
        for path in sorted(glob.glob(os.path.join(folder, "*", "lib", "libnvrtc.so.*"))):
            try:
                ctypes.CDLL(path)
            except OSError:
                continue
            return


def _files(files: Mapping[str, bytes] | Iterable[str | os.PathLike[str]]) -> list[tuple[str, bytes]]:
    """Names and contents."""
    if isinstance(files, Mapping):
        return [(name, bytes(content)) for name, content in files.items()]
    found = []
    for path in files:
        with open(path, "rb") as file:
            found.append((os.path.basename(os.fspath(path)), file.read()))
    return found
