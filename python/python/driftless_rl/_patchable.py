"""A model whose weights are patched: what its trace has learned, in native hands."""

import math
from collections.abc import Callable
from pathlib import Path

import torch

from ._native import PATCHES, REFUSES, LiveModel, Patch, checkpoint_tensors, refuse_patches
from ._errors import EngineError
from ._trace import learn

# What each rank keeps on its GPU for deltas, as a part of the checkpoint's bytes: it has the whole delta there, also of
# tensors that it holds a part of. 1 % of bf16 elements take a 25th.
_ARENA_PART = 24

# A rank of an engine: the engine's port, which rank, of how many.
Rank = tuple[int, int, int]


def refuse(where: Path, rank: Rank, why: str) -> None:
    """Tells followers that this rank never patches."""
    refuse_patches(where, rank, why)


# A vote is REFUSES, LOADS or PATCHES: what a rank would do with a patch. The least of all ranks' is what each does.
def least(vote: int, group: torch.distributed.ProcessGroup | None) -> int:
    """The least vote of all ranks of a group of this host's processes; None is one rank."""
    if group is None:
        return vote
    votes = torch.tensor([vote], device="cpu")
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group)
    return int(votes.item())


def agree(said: bytes, group: torch.distributed.ProcessGroup | None) -> bytes:
    """Of each byte the least of all ranks', each of which says as many. What one says of a comparison begins with 0 if it
    makes none."""
    if group is None:
        return said
    held = bytearray(said)
    torch.distributed.all_reduce(torch.frombuffer(held, dtype=torch.uint8), torch.distributed.ReduceOp.MIN, group)
    return bytes(held)


class Patchable:
    """The weights of one rank. A native thread prepares deltas; the scheduler's thread patches and loads."""

    def __init__(self, live: LiveModel, derive: Callable[[], None] | None, ranks: int) -> None:
        self._live, self._derive, self._ranks = live, derive, ranks
        self.loaded, self.announce_compare = live.loaded, live.announce_compare

    def patch(self, label: str, group: torch.distributed.ProcessGroup | None = None) -> Patch | None:
        """Makes the weights those of ``label``, and says how; None if they are not prepared for it at every rank.

        All ranks of ``group`` call this together, and either all or none of them has the version then.

        Raises:
            Error: they cannot be written, at one of the ranks. They are what they were, or are not known any more.
        """
        if self._ranks > 1 and group is None:
            raise EngineError(f"its {self._ranks} ranks cannot agree: this engine has no group of them")
        asked, failed = 0, None

        def agree(vote: int) -> int:
            nonlocal asked, failed
            asked += 1
            if asked > 1 and vote == PATCHES:
                try:
                    self._make_derived()
                except Exception as error:
                    vote, failed = REFUSES, error
            return least(vote, group)

        try:
            return self._live.patch(label, agree if self._derive is not None or group is not None else None)
        except Exception as error:
            if asked > 1:
                self._make_derived()
            raise failed or error

    def compare(
        self,
        label: str,
        directory: Path,
        sample: int | None,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> str:
        """Compares the weights with those of a checkpoint, all or a sample of them: what a follower is answered.

        All ranks of ``group`` call this together. Nothing changes.

        Raises:
            Error: nothing was compared: a checkpoint of another model, or one that cannot be read, at one of the ranks.
        """
        if self._ranks > 1 and group is None:
            raise EngineError(f"its {self._ranks} ranks cannot agree: this engine has no group of them")
        return self._live.compare(label, directory, sample, None if group is None else lambda said: agree(said, group))

    def _make_derived(self) -> None:
        """Makes anew what the model derives from its weights."""
        if self._derive is None:
            return
        with torch.no_grad():
            self._derive()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()


def live_model(model: torch.nn.Module, checkpoint: Path, where: Path, rank: Rank) -> Patchable:
    """Learns where the weights of a model lie that was loaded from ``checkpoint``, and begins to prepare deltas.

    Raises:
        Untraceable: a model that cannot be patched.
        Error: its checkpoint cannot be read or has tensors that are not patched, or ``where`` is not this user's alone.
    """
    ties = _ties_head(model)
    tensors = checkpoint_tensors(checkpoint, ties)
    shapes = {name: (tuple(shape), getattr(torch, dtype)) for name, dtype, shape in tensors}
    found = learn(model, shapes)
    names = {name: index for index, (name, _, _) in enumerate(tensors)}
    storages = {storage: index for index, storage in enumerate(found.live)}
    copies = [
        (
            names[name],
            storages[copy.storage],
            list(copy.source.size),
            (copy.source.offset, list(copy.source.stride)),
            (copy.target.offset, list(copy.target.stride)),
            copy.table,
        )
        for name, made in found.copies.items()
        for copy in made
    ]
    device = found.device.index if found.device.type == "cuda" else None
    arena = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values()) // _ARENA_PART
    live = list(found.live.values())
    live = LiveModel(where, rank, tensors, live, found.tables, copies, found.slots, device, arena, ties)
    return Patchable(live, found.derive, rank[2])


def _ties_head(model: torch.nn.Module) -> bool:
    """Whether the model takes its word embeddings for its output head, as its config says, its class's defaults included."""
    config = getattr(model, "config", None)
    # Models of several modalities have a config of their language model in it. Where both speak, they agree.
    parts = (config, getattr(config, "text_config", None))
    said = [getattr(part, "tie_word_embeddings", None) for part in parts]
    return True in said and False not in said
