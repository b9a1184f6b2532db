"""Learns where a model keeps each element of each Hugging Face tensor, from the model's own ``load_weights``.

``load_weights`` is fed tensors on the device ``meta``: they have a shape, a dtype, strides and a storage of their own,
but no bytes. A dispatch mode sees every operator. One that would write into a live tensor is noted down and swallowed:
which view of the tensor goes to which view of the live storage, and what was made of its elements before. Nothing is
written.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ._elementwise import Step, Tables, Untraceable, moved, step

_aten = torch.ops.aten
# The result's elements are those of the source, at the same indices.
_SAME_INDEX = {_aten._to_copy.default, _aten.clone.default}
_FILLS = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}


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
    """A recorded copy: ``source`` of the contiguous Hugging Face tensor to ``target`` of the live ``storage``.

    ``steps`` were applied to each element; ``table`` is the number of the table that they are, if one is needed.
    """

    source: View
    target: View
    storage: int
    steps: tuple[Step, ...] = ()
    table: int | None = None


@dataclass(frozen=True)
class Map:
    """Where a model keeps its weights.

    Attributes:
        copies: of each tensor by its Hugging Face name, where it goes; one that this rank does not hold is missing.
        tables: what copies have instead of each value of 16 bits, in the order of its bits, beside the live storages.
        live: by storage, all of it as a flat tensor, and the name of a parameter or buffer in it.
        slots: the parameters and buffers that are written: the dict and key that hold each, and its address.
        device: where all of them lie.
        derive: computes what the model derives from them, if it does.
    """

    copies: dict[str, list[Copy]]
    tables: list[torch.Tensor]
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
    derive = getattr(model, "post_load_weights", None)
    recorder = _Recorder(live, derive is not None)

    def feed():
        for name, (shape, dtype) in tensors.items():
            probe = torch.empty(shape, dtype=dtype, device="meta")
            recorder.probes[_key(probe)] = _Probe(name, View.of(probe), (), probe)
            yield name, probe

    try:
        with torch.no_grad(), _one_thread(), recorder:
            model.load_weights(feed())
    except Untraceable:
        raise
    except Exception as error:  # whatever a loader does with tensors that have no content
        raise Untraceable(f"load_weights: {type(error).__name__}: {error}") from error
    _check_covered(model, recorder)
    tables = Tables()
    copies = {
        name: [_tabled(tables, name, tensors[name][1], copy, live[copy.storage][1]) for copy in made.values()]
        for name, made in recorder.copies.items()
    }
    if stale := kept.items() & _kept(model, live).items():
        name = min(place for place, _ in stale)
        raise Untraceable(f"{name} may be made of weights, and loading them does not make it anew")
    written = {copy.storage for made in copies.values() for copy in made}
    slots = [
        (held, key, tensor.data_ptr())
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
        if tensor is not None and _key(tensor) in written
    ]
    device = next(flat for _, flat in live.values()).device
    return Map(copies, tables.made, {key: live[key] for key in written}, slots, device, derive)


def _tabled(tables: Tables, name: str, dtype: torch.dtype, copy: Copy, live: torch.Tensor) -> Copy:
    try:
        return replace(copy, table=tables.of(dtype, copy.steps, live))
    except Untraceable as error:
        raise Untraceable(f"{name}: {error}") from error


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
    """A tensor without content: one of the checkpoint, or what ``steps`` made of a view of one, in row-major order."""

    name: str
    view: View
    steps: tuple[Step, ...]
    tensor: torch.Tensor  # held, so that nothing else gets its storage's key

    def place(self, tensor: torch.Tensor) -> View:
        """Which view of the checkpoint's tensor a view of this one is of."""
        view = View.of(tensor)
        if tensor.dtype != self.tensor.dtype:
            raise Untraceable(f"{self.name}: {self.tensor.dtype} seen as {tensor.dtype}")
        if self.view.is_whole():
            return view
        if view.size != self.view.size or not view.is_whole():
            raise Untraceable(f"{self.name}: a part of a copy")
        return self.view


@dataclass(frozen=True)
class _Joined:
    """Tensors without content that were joined along a dimension."""

    parts: tuple[torch.Tensor, ...]
    dim: int
    tensor: torch.Tensor


class _Recorder(TorchDispatchMode):
    def __init__(self, live: dict[int, tuple[str, torch.Tensor]], derives: bool) -> None:
        super().__init__()
        self.live = live
        self.derives = derives
        self.probes: dict[int, _Probe] = {}
        self.joined: dict[int, _Joined] = {}
        # By a tensor's name, and by the storage and the view that it goes to.
        self.copies: dict[str, dict[tuple[int, View], Copy]] = {}
        self.filled: dict[int, list[View]] = {}
        # Whether anything was made of live weights but views: a constant may be one of them, and change with a version.
        self.read = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        for tensor in written:
            if _key(tensor) in self.live:
                return self._write(func, tensor, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        sources = [leaf for leaf in leaves if self._probe(leaf) is not None]
        if not sources:
            if any(_key(tensor) in self.joined for tensor in written):
                raise Untraceable(f"{func} on what was joined")
            out = func(*args, **kwargs)
            if any(map(self._is_live, leaves)) and not all(map(self._is_live, tree_leaves(out))):
                self.read = True
            return out
        source = sources[0]
        if written:
            return self._change(func, args, kwargs, source)
        if func in _SAME_INDEX:
            return self._copy_of(source, kwargs.get("dtype") or source.dtype, kwargs.get("device"))
        if made := self._step(func, args, kwargs, source):
            return self._made(source, made)
        out = func(*args, **kwargs)
        if func is _aten.cat.default and self._join(sources, args[1] if len(args) > 1 else 0, out, len(args[0])):
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and self._probe(leaf) is None:  # no view: a sum, a product, ...
                raise Untraceable(f"{self._probe(source).name}: {func}")
        return out

    def _probe(self, leaf) -> _Probe | None:
        return self.probes.get(_key(leaf)) if isinstance(leaf, torch.Tensor) else None

    def _is_live(self, leaf) -> bool:
        return isinstance(leaf, torch.Tensor) and _key(leaf) in self.live

    def _step(self, func, args, kwargs, elements: torch.Tensor) -> Step | None:
        if any(self._is_live(leaf) and leaf is not elements for leaf in tree_leaves((args, kwargs))):
            return None
        made = step(func, args, kwargs, elements)
        if made and self.read and made.has_constants():
            raise Untraceable(f"{func} with a constant that may be one of the weights")
        return made

    def _copy_of(self, source: torch.Tensor, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
        """A copy, whatever its device should be: it stays on ``meta``, and remembers what it is a copy of."""
        if device is not None and device.type == "meta":
            device = None
        return self._made(source, None if dtype == source.dtype and device is None else moved(dtype, device))

    def _made(self, source: torch.Tensor, made: Step | None) -> torch.Tensor:
        """What an operator makes of each element of a tensor."""
        probe = self._probe(source)
        out = torch.empty(source.shape, dtype=made.dtype if made else source.dtype, device="meta")
        steps = probe.steps + ((made,) if made else ())
        self.probes[_key(out)] = _Probe(probe.name, probe.place(source), steps, out)
        return out

    def _join(self, sources: list[torch.Tensor], dim: int, out: torch.Tensor, count: int) -> bool:
        """Remembers of what ``out`` is joined, if that is all of it."""
        if len(sources) != count or any((part.dtype, part.dim()) != (out.dtype, out.dim()) for part in sources):
            return False
        parts = tuple(self._made(part, None) for part in sources)  # what becomes of the sources later is theirs
        self.joined[_key(out)] = _Joined(parts, dim % out.dim(), out)
        return True

    def _change(self, func, args, kwargs, source: torch.Tensor) -> torch.Tensor:
        """An operator that writes to a tensor without content: to each element of all of it."""
        probe = self._probe(source)
        made = self._step(func, args, kwargs, source) if source is args[0] else None
        if made is None or View.of(source) != View.of(probe.tensor):
            raise Untraceable(f"{probe.name}: {func} on a temporary")
        self.probes[_key(source)] = replace(probe, steps=(*probe.steps, made))
        return source

    def _write(self, func, target: torch.Tensor, args, kwargs) -> torch.Tensor:
        if func in _FILLS:
            self.filled.setdefault(_key(target), []).append(View.of(target))
        elif func is _aten.copy_.default:
            self._write_copy(args[1], target)
        elif (held := self._held(target, target)) is not None:
            name, copy = held
            made = self._step(func, args, kwargs, target)
            if made is None:
                raise Untraceable(f"{name}: {func}")
            # The operator runs where the weights are.
            self._add(name, replace(copy, steps=(*(copy.steps or (moved(target.dtype, target.device),)), made)))
        else:
            raise Untraceable(f"{func} into {self.live[_key(target)][0]}, of no tensor")
        return target

    def _write_copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        name, flat = self.live[_key(target)]
        if target.dtype != flat.dtype:
            if (source.dtype, target.dtype.itemsize) != (target.dtype, flat.dtype.itemsize):
                raise Untraceable(f"{name}: {flat.dtype} seen as {target.dtype}")
            source, target = source.view(flat.dtype), target.view(flat.dtype)  # bits that are copied as they are
        if (probe := self._probe(source)) is not None:
            self._copy(probe.name, self._source(probe, source, target), source.dtype, probe.steps, target)
        elif (joined := self.joined.get(_key(source))) is not None:
            self._write_joined(joined, source, target)
        elif (held := self._held(source, target)) is not None:
            self._copy(held[0], held[1].source, source.dtype, held[1].steps, target)
        else:
            raise Untraceable(f"{_aten.copy_.default} into {name}, of no tensor")

    @staticmethod
    def _source(probe: _Probe, source: torch.Tensor, target: torch.Tensor) -> View:
        return probe.place(source if source.shape == target.shape else source.expand(target.shape))

    def _copy(self, name: str, view: View, dtype: torch.dtype, steps: tuple[Step, ...], target: torch.Tensor) -> None:
        """Notes down that what steps make of a view, elements of a dtype, goes to a live tensor."""
        place = View.of(target)
        if not view.is_nested() or not place.is_nested():
            raise Untraceable(f"{name}: a view that overlaps itself")
        if dtype != target.dtype:
            steps = (*steps, moved(target.dtype, target.device))
        self._add(name, Copy(view, place, _key(target), steps))

    def _add(self, name: str, copy: Copy) -> None:
        self.copies.setdefault(name, {})[copy.storage, copy.target] = copy

    def _write_joined(self, joined: _Joined, source: torch.Tensor, target: torch.Tensor) -> None:
        if View.of(source) != View.of(joined.tensor) or source.shape != target.shape:
            raise Untraceable(f"{self._probe(joined.parts[0]).name}: a part of what was joined")
        start = 0
        for part in joined.parts:
            length = part.shape[joined.dim]
            self._write_copy(part, target.narrow(joined.dim, start, length))
            start += length

    def _held(self, source: torch.Tensor, target: torch.Tensor) -> tuple[str, Copy] | None:
        """The copy whose elements a live tensor has. What is derived after each load is no part of the map."""
        seen = _key(source) in self.live and source.dtype != self.live[_key(source)][1].dtype
        if self.derives or seen or source.shape != target.shape or _key(source) in self.filled:
            return None
        place = (_key(source), View.of(source))
        found = [(name, copies[place]) for name, copies in self.copies.items() if place in copies]
        return found[0] if len(found) == 1 else None


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
        for copy in copies.values():
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
