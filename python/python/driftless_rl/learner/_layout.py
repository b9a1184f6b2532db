"""The tensors of the checkpoint that the run starts from: their names, dtypes, shapes and files are those of every version
and of every Hugging Face directory that the learner writes."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from .._publisher import Slice
from ..torch import slices
from ._ranks import Ranks, Refused

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LAYER = re.compile(r"^.*?\.\d+\.")


class Layout:
    """What a checkpoint directory has.

    Attributes:
        tensors: by name: dtype and shape.
        files: weight files with their tensors' names.
        dtype: of most elements: what the model computes in unless told.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        names = [SINGLE]
        if (self.directory / INDEX).exists():
            names = sorted(set(json.loads((self.directory / INDEX).read_text())["weight_map"].values()))
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.files: dict[str, list[str]] = {}
        elements: dict[torch.dtype, int] = {}
        for file in names:
            with safe_open(self.directory / file, "pt") as opened:
                self.files[file] = list(opened.keys())
                for name in self.files[file]:
                    kind, shape = opened.get_slice(name).get_dtype(), tuple(opened.get_slice(name).get_shape())
                    if kind not in DTYPES:
                        raise Refused(f"checkpoint {directory}: tensor `{name}`: expected BF16 or F32, found {kind}")
                    self.tensors[name] = (DTYPES[kind], shape)
                    elements[DTYPES[kind]] = elements.get(DTYPES[kind], 0) + torch.Size(shape).numel()
        self.dtype = max(elements, key=elements.get, default=torch.float32)

    def check(self, module: Any) -> None:
        """Refuses a model that does not make all tensors of the checkpoint, such as one that leaves out a part."""
        state = {name: torch.empty(value.shape, device="meta") for name, value in module.state_dict().items()}
        found = {name: tuple(value.shape) for name, value, _ in self._named(module, state)}
        for name, (_, shape) in self.tensors.items():
            if found.get(name) != shape:
                text = f"tensor `{name}`: expected shape {list(shape)}, as it is there, found {found.get(name, 'none')}"
                raise Refused(f"checkpoint {self.directory}: {text} in transformers' {type(module).__name__}")

    def dtypes(self, module: Any) -> dict[str, torch.dtype]:
        """By parameter: the dtype that the checkpoint has it in, which versions have it in too.

        Raises:
            Refused: the model would hold a tensor of float32 in bfloat16.
        """
        if len({dtype for dtype, _ in self.tensors.values()}) == 1:
            return {name: self.dtype for name, _ in module.named_parameters()}
        state, found = module.state_dict(), dict[str, torch.dtype]()
        for name in state:
            dtypes = {self.tensors[one][0]: one for one in self._made_of(module, name, state)}
            if len(dtypes) > 1:
                both = " and ".join(f"`{one}` ({dtype})" for dtype, one in dtypes.items())
                raise Refused(f"checkpoint {self.directory}: expected one dtype in parameter `{name}`, found {both}")
            for dtype, one in dtypes.items():
                if (state[name].dtype, dtype) == (torch.bfloat16, torch.float32):
                    text = "expected BF16, which it would be rounded to, found F32; give `--dtype float32`"
                    raise Refused(f"checkpoint {self.directory}: tensor `{one}`: {text}")
                found[name] = dtype
        # A tied parameter has several names, of which the checkpoint may lack the first.
        held: dict[int, torch.dtype] = {}
        for name, one in module.named_parameters(remove_duplicate=False):
            if name in found and held.get(id(one)) != torch.bfloat16:
                held[id(one)] = found[name]
        return {name: held.get(id(one), self.dtype) for name, one in module.named_parameters()}

    def _made_of(self, module: Any, name: str, state: dict[str, torch.Tensor]) -> list[str]:
        """The tensors of the checkpoint that are one of the model."""
        if name in self.tensors and self.tensors[name][1] == tuple(state[name].shape):
            return [name]
        if name in module.all_tied_weights_keys:
            return []
        alone = {name: torch.empty(state[name].shape, device="meta")}
        return [one for one in revert_weight_conversion(module, alone) if one in self.tensors]

    def _named(self, module: Any, state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """The tensors under the names of the checkpoint; True for those that had others, or another shape, in the model.

        These are gathered from all ranks, a layer at a time.
        """
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in state.items():
            if name in self.tensors and self.tensors[name][1] == tuple(tensor.shape):
                yield name, tensor, False
            elif name not in module.all_tied_weights_keys:
                layer = LAYER.match(name)
                groups.setdefault(layer.group() if layer else "", {})[name] = tensor
        for group in groups.values():
            gathered = {name: whole(part) for name, part in group.items()}
            for name, tensor in revert_weight_conversion(module, gathered).items():
                if name in self.tensors:
                    yield name, tensor, True

    @torch.no_grad()
    def parts(self, module: Any, ranks: Ranks) -> list[tuple[str, Any]]:
        """What this rank publishes: names, and tensors in host memory or slices of them. What is there already, in the
        dtype of the checkpoint, is not copied."""
        found: list[tuple[str, Any]] = []
        turn = 0
        for name, tensor, converted in self._named(module, module.state_dict()):
            if not ranks.sharded:
                found.append((name, self._host(name, tensor)))
            elif converted:
                if turn % ranks.size == ranks.rank:
                    # A copy: it may be a view of all that was gathered.
                    found.append((name, Slice(self._host(name, tensor, copy=True), tuple(tensor.shape), 0)))
                turn += 1
            else:
                for _, part in slices({name: tensor}, rank=ranks.rank):
                    found.append((name, Slice(self._host(name, part.tensor), part.shape, part.start)))
        return found

    def _host(self, name: str, tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        return tensor.detach().to("cpu", self.tensors[name][0], copy=copy).contiguous()

    @torch.no_grad()
    def write(self, module: Any, ranks: Ranks, directory: Path) -> None:
        """Writes the weights as rank 0 gathers them, with all other files of the checkpoint, as ``directory``. One that
        holds another checkpoint is replaced."""
        tensors = {}
        for name, tensor, _ in self._named(module, module.state_dict()):
            tensor = whole(tensor)
            if ranks.rank == 0:
                # safetensors refuses tensors that are one in memory.
                tensors[name] = self._host(name, tensor, copy=name in module.all_tied_weights_keys)
        ranks.together(lambda: self._write(tensors, directory) if ranks.rank == 0 else None)

    def _write(self, tensors: dict[str, torch.Tensor], directory: Path) -> None:
        if directory.exists() and any(directory.iterdir()) and not (directory / "config.json").exists():
            raise Refused(f"{directory}: expected a Hugging Face directory or none, found other files")
        partial, old = (directory.with_name(f".{directory.name}.{what}") for what in ("partial", "old"))
        for left in (partial, old):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        for path in self.directory.iterdir():
            if path.is_file() and not path.name.startswith(".") and path.name not in self.files:
                shutil.copyfile(path, partial / path.name)
        for file, names in self.files.items():
            save_file({name: tensors[name] for name in names}, partial / file, metadata={"format": "pt"})
        sync(partial)
        if directory.exists():
            directory.rename(old)
        partial.rename(directory)
        sync_entry(directory.parent)
        shutil.rmtree(old, ignore_errors=True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sync(directory: Path) -> None:
    """Makes the files of a directory durable, and their names."""
    for path in directory.iterdir():
        sync_entry(path)
    sync_entry(directory)


def sync_entry(path: Path) -> None:
    """Makes a file durable, or the names in a directory."""
    entry = os.open(path, os.O_RDONLY)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)
