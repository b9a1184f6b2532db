"""The room that each rank of an engine takes for deltas, as native code is told of it."""

import types
from pathlib import Path

import pytest
import torch
from driftless_rl import _patchable
from safetensors.torch import save_file
from sglang_models import make
from torch import nn

RANKS = 2


class Part(nn.Module):
    """One rank of an engine: its part of the rows of each matrix, but of experts those that it has, and they whole."""

    def __init__(self, tensors: dict[str, torch.Tensor], rank: int) -> None:
        super().__init__()
        self.rank = rank
        parts = {name: self._part(name, tensor) for name, tensor in tensors.items()}
        empty = {self._key(name): torch.zeros_like(part) for name, part in parts.items() if part is not None}
        self.held = nn.ParameterDict({key: nn.Parameter(part, requires_grad=False) for key, part in empty.items()})

    @staticmethod
    def _key(name: str) -> str:
        return name.replace(".", "/")

    def _part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if ".experts." in name:
            return tensor if int(name.split(".experts.")[1].split(".")[0]) % RANKS == self.rank else None
        if tensor.dim() == 1:
            return tensor
        rows = len(tensor) // RANKS
        return tensor.narrow(0, self.rank * rows, rows)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            part = self._part(name, tensor)
            if part is not None:
                self.held[self._key(name)].data.copy_(part)


class Told:
    """Stands in for native code: what it was told of each rank."""

    def __init__(self, monkeypatch) -> None:
        self.arenas: dict[tuple[int, int, int], int] = {}
        self.held: dict[tuple[int, int, int], int] = {}
        monkeypatch.setattr(_patchable, "LiveModel", self._model)

    def _model(
        self, directory, rank, tensors, live, tables, copies, slots, device, arena, ties_head
    ) -> types.SimpleNamespace:
        self.arenas[rank] = arena
        self.held[rank] = sum(flat.nbytes for _, flat in live)
        return types.SimpleNamespace(loaded=None, announce_compare=None)


def learn(root: Path, tensors: dict[str, torch.Tensor], rank: int) -> None:
    _patchable.live_model(Part(tensors, rank), root / "base", root / "plugins", (30000, rank, RANKS))


@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_arena_of_every_rank_is_a_24th_of_the_whole_checkpoint(kind, monkeypatch, tmp_path):
    told, tensors = Told(monkeypatch), make(tmp_path / "base", kind, 1)
    for rank in range(RANKS):
        learn(tmp_path, tensors, rank)
    whole = sum(tensor.nbytes for tensor in tensors.values())
    assert all(held < 0.6 * whole for held in told.held.values()), (told.held, whole)
    assert told.arenas == {(30000, rank, RANKS): whole // 24 for rank in range(RANKS)}


def test_arena_of_several_dtypes_counts_the_bytes_of_each(monkeypatch, tmp_path):
    told = Told(monkeypatch)
    tensors = {
        "a.weight": torch.zeros(48, 10, dtype=torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.zeros(24, 2, dtype=torch.float32),
        "norm.weight": torch.zeros(24, dtype=torch.bfloat16),
    }
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "base/config.json").write_text("{}")
    learn(tmp_path, tensors, 0)
    assert told.arenas == {(30000, 0, RANKS): (480 + 192 + 48) // 24}
