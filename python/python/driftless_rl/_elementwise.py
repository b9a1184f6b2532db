"""What a loader makes of each element before it copies it: casts and arithmetic with constants.

An element of 16 bits has 65,536 values, so whatever is made of one is a table of what becomes of each. The table is
what the loader's own operators make of all values, on the devices where they run: no rounding is assumed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

_to_copy = torch.ops.aten._to_copy.default
_VALUES = 1 << 16


class Untraceable(Exception):
    """A model whose weights cannot be learned. Its text says why."""


class _Elements:
    """Stands for the elements in the arguments of an operator."""

    def __repr__(self) -> str:
        return "elements"


_ELEMENTS = _Elements()


@dataclass(frozen=True)
class _Constant:
    """A tensor of one element, as it was when the operator ran."""

    value: float
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def tensor(self) -> torch.Tensor:
        return torch.full(self.shape, self.value, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Step:
    """An operator whose result has at each index a function of the element there.

    ``leaves`` and ``spec`` are its arguments, and ``dtype`` is its result's.
    """

    func: torch._ops.OpOverload
    leaves: tuple[Any, ...]
    spec: TreeSpec
    dtype: torch.dtype

    def has_constants(self) -> bool:
        return any(isinstance(leaf, (_Constant, int, float)) for leaf in self.leaves)

    def run(self, elements: torch.Tensor) -> torch.Tensor:
        real = {_Elements: lambda leaf: elements, _Constant: _Constant.tensor}
        leaves = [real.get(type(leaf), lambda leaf: leaf)(leaf) for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        out = self.func(*args, **kwargs)
        if out.dtype != self.dtype:  # of a tensor without dimensions another one than of the table
            raise Untraceable(f"{self.func} makes {self.dtype} here, and {out.dtype} of several elements")
        return out


def moved(dtype: torch.dtype, device: torch.device | None) -> Step:
    """A copy in a dtype, on a device if it is said."""
    leaves, spec = tree_flatten(((_ELEMENTS,), {"dtype": dtype} | ({} if device is None else {"device": device})))
    return Step(_to_copy, tuple(leaves), spec, dtype)


def step(func, args, kwargs, elements: torch.Tensor) -> Step | None:
    """An operator as a step, if what it makes of each of ``elements`` is a function of that one alone."""
    if torch.Tag.pointwise not in func.tags:
        return None
    in_place, *others = [arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments]
    if any(others) or in_place and args[0] is not elements:
        return None
    leaves, spec = tree_flatten((args, kwargs))
    kept = []
    for leaf in leaves:
        if leaf is elements:
            leaf = _ELEMENTS
        elif isinstance(leaf, torch.Tensor):
            if leaf.numel() != 1 or leaf.is_meta:
                return None
            leaf = _Constant(leaf.item(), tuple(leaf.shape), leaf.dtype, leaf.device)
        kept.append(leaf)
    dtype = elements.dtype
    if not in_place:
        on_meta = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        out = func(*on_meta[0], **on_meta[1])
        if not isinstance(out, torch.Tensor) or out.shape != elements.shape:
            return None
        dtype = out.dtype
    return Step(func, tuple(kept), spec, dtype)


class Tables:
    """What becomes of each value, by what is done to it."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []
        self._known: dict[tuple, int | None] = {}

    def of(self, dtype: torch.dtype, steps: tuple[Step, ...], live: torch.Tensor) -> int | None:
        """The number of the table from elements of ``dtype`` to those of ``live``; None where each stays what it is.

        Raises:
            Untraceable: elements that have no table.
        """
        if all(step.func is _to_copy and step.dtype == dtype for step in steps):
            return None
        if dtype.itemsize != 2 or live.dtype.itemsize not in (2, 4):
            done = [str(step.func) for step in steps if step.func is not _to_copy]
            why = "only elements of 16 bits are patched as others, of 16 or 32 bits"
            said = ", ".join([f"{dtype} in the checkpoint", *done, f"{live.dtype} in the model"])
            raise Untraceable(f"{said}; {why}")
        key = (dtype, repr(steps))
        if key not in self._known:
            self._known[key] = self._make(dtype, steps, live)
        return self._known[key]

    def _make(self, dtype: torch.dtype, steps: tuple[Step, ...], live: torch.Tensor) -> int | None:
        values = torch.arange(_VALUES, device="cpu").to(torch.uint16).view(dtype)
        made = values.clone()  # a step may write to it
        for step in steps:
            made = step.run(made)
        if made.dtype == dtype and torch.equal(made.cpu().view(torch.int16), values.view(torch.int16)):
            return None
        self.made.append(made.to(live.device).contiguous())
        if live.is_cuda:  # it is read on another stream
            torch.cuda.synchronize(live.device)
        return len(self.made) - 1
