"""A live model: which version it holds, and the delta that is prepared for it."""

import json
import logging
import struct
import threading
import time
from pathlib import Path

import torch

from .._driftless import Patch, PreparedDelta
from .._errors import Error
from ._place import RankFile
from ._trace import Map, learn

_log = logging.getLogger("driftless")

# Seconds between two looks for a delta.
_LOOK = 0.01

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class NotPatched(Exception):
    """A prepared delta that could not be written. Nothing has changed."""


class LiveModel:
    """The weights of one rank.

    The scheduler's thread patches and loads; a thread of its own prepares. ``_lock`` is held for moments by both, and
    by the scheduler's for as long as it patches.
    """

    def __init__(self, model: torch.nn.Module, checkpoint: Path, rank_file: RankFile) -> None:
        """Learns where the weights lie, and begins to look for deltas.

        Raises:
            Untraceable: a model that cannot be patched.
            OSError, ValueError: the checkpoint's headers cannot be read.
        """
        began = time.perf_counter()
        self._tensors = _headers(checkpoint)
        self._map: Map = learn(model, self._tensors)
        self._rank_file = rank_file
        self._lock = threading.Lock()
        # The version that is live: its label, and its manifest's digest where it came by a delta.
        self._label: str | None = None
        self._manifest: str | None = None
        self._ready: tuple[PreparedDelta, Patch] | None = None
        count = sum(map(len, self._map.copies.values()))
        _log.info("driftless: learned %d copies in %.3f s", count, time.perf_counter() - began)

    def loaded(self, label: str | None) -> None:
        """SGLang loaded weights under this label, or without one. A fence's label counts as its version's."""
        with self._lock:
            self._label, self._manifest, self._ready = label and label.split("?")[0], None, None

    def patch(self, label: str) -> str | None:
        """Makes the weights those of ``label``, and says so; None if they are not prepared for it.

        Raises:
            NotPatched: they cannot be written. They are what they were.
        """
        with self._lock:
            ready, self._ready = self._ready, None
            if ready is None or ready[0].target[0] != label:
                return None
            delta, patch = ready
            began = time.perf_counter()
            try:
                if not self._map.is_in_place():
                    raise Error("the model's tensors are not where they were learned")
                patch.apply()
            except Exception as error:  # nothing may leave: SGLang would end
                self._label = self._manifest = None
                raise NotPatched(f"{type(error).__name__}: {error}") from error
            self._label, self._manifest = delta.target
            text = f"patched to {label}, {patch.elements} elements in {1e3 * (time.perf_counter() - began):.3f} ms"
            _log.info("driftless: %s", text)
            return text

    def watch(self, where: Path) -> None:
        """Prepares what followers offer in ``where``, for ever: on a thread of its own, mostly without the GIL."""
        seen: dict[str, tuple] = {}
        while True:
            time.sleep(_LOOK)
            try:
                seen = self._look(where, seen)
            except OSError as error:
                _log.warning("driftless: cannot look for deltas: %s", error)
                time.sleep(1)

    def _look(self, where: Path, seen: dict[str, tuple]) -> dict[str, tuple]:
        """Tries each offer once for each version that is live. ``seen``: by file, what was tried, and where it leads."""
        now = {}
        for path in where.glob("delta-*"):
            try:
                found = path.stat()
            except FileNotFoundError:  # its follower was faster
                continue
            if path.suffix == "":
                stamp, (before, target) = (found.st_ino, found.st_mtime_ns), seen.get(path.name, (None, None))
                label = self._label
                if before is None or before[0] != stamp or before[1] != label and target != label:
                    target = self._try(path)
                now[path.name] = ((stamp, label), target)
        self._rank_file.keep(set(now))
        return now

    def _try(self, path: Path) -> str | None:
        """Prepares an offer, and returns the label that it leads to."""
        target = None
        try:
            delta = PreparedDelta(path)
            target = delta.target[0]
            self._prepare(delta)
            self._rank_file.tell(path.name, target, None)
        except Error as error:
            _log.info("driftless: %s is not prepared: %s", path.name, error)
            self._rank_file.tell(path.name, target or "", str(error))
        return target

    def _prepare(self, delta: PreparedDelta) -> None:
        with self._lock:
            self._check_base(delta)
        live: dict[int, int] = {}
        copies = []
        for index, (name, dtype, shape, changed) in enumerate(delta.tensors()):
            if self._tensors.get(name) != (tuple(shape), _DTYPES.get(dtype)):
                raise Error(f"tensor {name} is {dtype} {shape} in the delta, {self._tensors.get(name)} in the model")
            for copy in self._map.copies.get(name, []) if changed else []:
                target = live.setdefault(copy.storage, len(live))
                source, place = ((view.offset, list(view.stride)) for view in (copy.source, copy.target))
                copies.append((index, target, list(copy.source.size), source, place))
        patch = delta.prepare([self._map.live[storage] for storage in live], copies)
        with self._lock:
            self._check_base(delta)
            self._ready = (delta, patch)
        _log.info("driftless: %s to %s is prepared, %d elements", delta.base[0], delta.target[0], patch.elements)

    def _check_base(self, delta: PreparedDelta) -> None:
        label, manifest = delta.base
        if self._label != label or self._manifest not in (None, manifest):
            raise Error(f"the delta starts from {label} ({manifest}), live is {self._label} ({self._manifest})")


def _headers(checkpoint: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of a checkpoint directory."""
    tensors = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > 1 << 27:
                raise ValueError(f"{path} has a header of {length} bytes")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                if entry["dtype"] not in _DTYPES:
                    raise ValueError(f"{path}: tensor {name} is {entry['dtype']}, which is not patched")
                tensors[name] = (tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    if not tensors:
        raise ValueError(f"{checkpoint} is no directory with safetensors files")
    return tensors
