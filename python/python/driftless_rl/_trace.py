"""Learns where a model keeps each element of each Hugging Face tensor, from the model's own ``load_weights``.

``load_weights`` is fed tensors on the device ``meta``: they have a shape, a dtype, strides and a storage of their own,
but no bytes. A dispatch mode sees every operator. One that would write into a live tensor is noted down and swallowed:
which view of the tensor goes to which view of the live storage. Nothing is written.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
# The result's elements are those of the source, at the same indices.
_SAME_INDEX = {_aten._to_copy.default, _aten.clone.default}
_FILLS = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}


class Untraceable(Exception):
    """A model whose weights cannot be learned. Its text says why."""


@dataclass(frozen=True)
class View:
    """A view of a storage: offset, sizes and strides, in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        return cls(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))

    def is_nested(self) -> bool:
        """Whether an element's place tells its index: each stride spans all that is inside it."""
        extent = 1
        for stride, size in sorted(self._dims()):
            if stride < extent:
                return False
            extent += stride * (size - 1)
        return True

    def run(self) -> int | None:
        """Its length, if it is one unbroken run in row-major order."""
        expected = 1
        for stride, size in reversed(self._dims()):
            if stride != expected:
                return None
            expected *= size
        return expected

    def is_whole(self) -> bool:
        """Whether it is one unbroken run in row-major order from the storage's first element."""
        return self.run() is not None and self.offset == 0

    def _dims(self) -> list[tuple[int, int]]:
        return [(stride, size) for stride, size in zip(self.stride, self.size) if size != 1]


@dataclass(frozen=True)
class Copy:
    """A recorded copy: ``source`` of the contiguous Hugging Face tensor to ``target`` of the live ``storage``."""

    source: View
    target: View
    storage: int


@dataclass(frozen=True)
class Map:
    """Where a model keeps its weights.

    Attributes:
        copies: of each tensor by its Hugging Face name, where it goes; one that this rank does not hold is missing.
        live: by storage, all of it as a flat tensor, and the name of a parameter or buffer in it.
        slots: the parameters and buffers that are written: the dict and key that hold each, and its address.
        device: where all of them lie.
        derive: computes what the model derives from them, if it does.
    """

    copies: dict[str, list[Copy]]
    live: dict[int, tuple[str, torch.Tensor]]
    slots: list[tuple[dict, str, int]]
    device: torch.device
    derive: Callable[[], None] | None


def learn(model: torch.nn.Module, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> Map:
    """Learns the map of a model from the names, shapes and dtypes of its checkpoint. The weights stay as they are.

    Raises:
        Untraceable: weights that are not copies of the tensors, or not all of them.
    """
    live = _live(model)
    kept = _kept(model, live)
    recorder = _Recorder(live)

    def feed():
        for name, (shape, dtype) in tensors.items():
            probe = torch.empty(shape, dtype=dtype, device="meta")
            recorder.probes[_key(probe)] = _Probe(name, None, probe)
            yield name, probe

    try:
        with torch.no_grad(), _one_thread(), recorder:
            model.load_weights(feed())
    except Untraceable:
        raise
    except Exception as error:  # whatever a loader does with tensors that have no content
        raise Untraceable(f"load_weights: {type(error).__name__}: {error}") from error
    _check_covered(model, recorder)
    if stale := kept.items() & _kept(model, live).items():
        name = min(place for place, _ in stale)
        raise Untraceable(f"{name} may be made of weights, and loading them does not make it anew")
    written = {copy.storage for copies in recorder.copies.values() for copy in copies}
    slots = [
        (held, key, tensor.data_ptr())
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
        if tensor is not None and _key(tensor) in written
    ]
    device = next(flat for _, flat in live.values()).device
    derive = getattr(model, "post_load_weights", None)
    return Map(recorder.copies, {key: live[key] for key in written}, slots, device, derive)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Has loaders that hand their copies to threads make them at once, on this thread: the mode is this thread's."""

    def submit(executor, function, /, *args, **kwargs):
        future = concurrent.futures.Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    with mock.patch.object(concurrent.futures.ThreadPoolExecutor, "submit", submit):
        yield


@dataclass(frozen=True)
class _Probe:
    """A tensor without content. ``view`` is set for a copy of a probe: which view of the probe it is a copy of."""

    name: str
    view: View | None
    tensor: torch.Tensor  # held, so that nothing else gets its storage's key


class _Recorder(TorchDispatchMode):
    def __init__(self, live: dict[int, tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.live = live
        self.probes: dict[int, _Probe] = {}
        self.copies: dict[str, list[Copy]] = {}
        self.filled: dict[int, list[View]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        for tensor in written:
            if _key(tensor) in self.live:
                return self._write(func, tensor, args)
        source = next((leaf for leaf in tree_leaves((args, kwargs)) if self._probe(leaf) is not None), None)
        if source is None:
            return func(*args, **kwargs)
        name = self._probe(source).name
        if written:
            raise Untraceable(f"{name}: {func} on a temporary")
        if func in _SAME_INDEX:
            return self._copy_of(source, kwargs.get("dtype") or source.dtype)
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and self._probe(leaf) is None:  # no view: cat, arithmetic, ...
                raise Untraceable(f"{name}: {func}")
        return out

    def _probe(self, leaf) -> _Probe | None:
        return self.probes.get(_key(leaf)) if isinstance(leaf, torch.Tensor) else None

    def _copy_of(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy, whatever its device should be: it stays on ``meta``, and remembers what it is a copy of."""
        probe = self._probe(source)
        if probe.view is not None:
            raise Untraceable(f"{probe.name}: a copy of a copy")
        if dtype != source.dtype:
            raise Untraceable(f"{probe.name}: {source.dtype} in the checkpoint, {dtype} in the model")
        out = torch.empty(source.shape, dtype=dtype, device="meta")
        self.probes[_key(out)] = _Probe(probe.name, View.of(source), out)
        return out

    def _write(self, func, target: torch.Tensor, args) -> torch.Tensor:
        if func in _FILLS:
            self.filled.setdefault(_key(target), []).append(View.of(target))
            return target
        source = args[1] if func is _aten.copy_.default else None
        probe = self._probe(source)
        if probe is None:
            raise Untraceable(f"{func} into {self.live[_key(target)][0]}, of no tensor")
        if source.dtype != target.dtype:
            raise Untraceable(f"{probe.name}: {source.dtype} in the checkpoint, {target.dtype} in the model")
        if source.shape != target.shape:
            source = source.expand(target.shape)
        view = View.of(source)
        if probe.view is not None:
            if view.size != tuple(probe.tensor.shape) or not view.is_whole():
                raise Untraceable(f"{probe.name}: a part of a copy")
            view = probe.view
        place = View.of(target)
        if not view.is_nested() or not place.is_nested():
            raise Untraceable(f"{probe.name}: a view that overlaps itself")
        copies = self.copies.setdefault(probe.name, [])
        copy = Copy(view, place, _key(target))
        if copy not in copies:
            copies.append(copy)
        return target


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func, args, kwargs) -> list[torch.Tensor]:
    """The arguments that an operator writes to."""
    names = func._schema.arguments
    named = list(zip(names, args)) + [(name, kwargs[name.name]) for name in names if name.name in kwargs]
    writes = [value for name, value in named if name.alias_info is not None and name.alias_info.is_write]
    return [value for value in writes if isinstance(value, torch.Tensor)]


def _live(model: torch.nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """By storage, all of it as a flat tensor, and the name of a parameter or buffer in it."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    out, devices = {}, {}
    for name, tensor in named:
        devices.setdefault(tensor.device, name)
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
        out.setdefault(_key(tensor), (name, flat))
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        places = ", ".join(f"{name} on {device}" for device, name in devices.items()) or "no weights"
        raise Untraceable(f"{places}; weights are patched in host memory, or on one CUDA device")
    return out


def _kept(model: torch.nn.Module, live: dict) -> dict[str, tuple[int, int]]:
    """The matrices that modules keep beside their weights, by their places: a repacked weight would be stale."""
    out = {}
    for name, module in model.named_modules():
        if next(module.parameters(), None) is None:  # it has no weights: the caches of a rotary embedding
            continue
        for key, value in vars(module).items():
            for number, tensor in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and _key(tensor) not in live:
                    version = 0 if tensor.is_inference() else tensor._version
                    out[f"{name}.{key}[{number}]"] = (tensor.data_ptr(), version)
    return out


def _check_covered(model: torch.nn.Module, recorder: _Recorder) -> None:
    """Refuses a parameter with an element that no tensor and no constant writes, or that two tensors write."""
    targets: dict[int, list[View]] = {}
    for copies in recorder.copies.values():
        for copy in copies:
            targets.setdefault(copy.storage, []).append(copy.target)
    parameters: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in model.named_parameters():
        parameters.setdefault(_key(parameter), []).append((name, parameter))
    for key, held in parameters.items():
        written, filled = targets.get(key, []), recorder.filled.get(key, [])
        if _is_tiled(written, [View.of(parameter) for _, parameter in held]):
            continue
        covered = torch.zeros(recorder.live[key][1].numel(), dtype=torch.bool)

        def part(view: View) -> torch.Tensor:
            return covered.as_strided(view.size, view.stride, view.offset)

        for view in written:
            if part(view).any():
                raise Untraceable(f"{held[0][0]}: two tensors write the same elements")
            part(view).fill_(True)
        for view in filled:
            part(view).fill_(True)
        for name, parameter in held:
            if not part(View.of(parameter)).all():
                raise Untraceable(f"{name}: no tensor of the checkpoint writes all of it")


def _is_tiled(written: list[View], parameters: list[View]) -> bool:
    """Whether unbroken runs lie one behind the other, and all parameters in them: most storages, seen at a glance."""
    runs = sorted((view.offset, view.run()) for view in written)
    if not runs or any(length is None for _, length in runs):
        return False
    ends = [start + length for start, length in runs]
    first, last = runs[0][0], ends[-1]
    tiled = all(end == start for end, (start, _) in zip(ends, runs[1:]))
    inside = [(view.offset, view.run()) for view in parameters]
    return tiled and all(length and first <= start and start + length <= last for start, length in inside)
