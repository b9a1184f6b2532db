"""Publishing from ``transformers.Trainer``, and from what builds on it, such as TRL's trainers.

    trainer = Trainer(model, args, …, callbacks=[PublishCallback("file:///shared/store", "my-run")])
"""

from __future__ import annotations

import copy
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from . import torch as driftless_torch
from ._errors import UsageError
from ._publisher import Publisher

__all__ = ["PublishCallback", "hf_state_dict"]


class PublishCallback(TrainerCallback):
    """Publishes the model before the first step, after every ``publish_every`` optimiser steps, and after the last one.
    With ``load_best_model_at_end`` the newest version is the best model, which the trainer ends with.

    A training that goes on from a Trainer's checkpoint goes on with the run. Others begin one, or with ``resume="auto"``
    go on with the one that is there. Of a trainer with several processes, the first one publishes; of a model that FSDP2
    has distributed, every process publishes its shards. ``config.json``, the generation config and the tokenizer are
    those of the model and of the trainer's ``processing_class``, unless ``hf_checkpoint`` names a directory to take them
    from.

    Args:
        store, run: as for ``driftless_rl.Publisher``.
        publish_every: optimiser steps between two versions.
        dtype: publish floating-point tensors as this; by default as they are. Casting makes a copy of the model in host
            memory, and so does a model on a GPU.
        settings: further arguments of ``driftless_rl.Publisher``. FSDP2 needs ``baseline_dir``, in which each process has a
            directory of its own.

    Attributes:
        published: the numbers of the newest version that this callback published, a ``driftless_rl.Published``.

    Raises:
        UsageError: ``publish_every`` below 1; when training begins, a model with adapters, which have to be merged first, or
            one that FSDP1 or DeepSpeed ZeRO-3 has taken apart.
        driftless_rl.Error: what ``Publisher.publish`` raises ends the training.
    """

    def __init__(
        self, store: str | os.PathLike[str], run: str, *, publish_every: int = 1, dtype: Any = None, **settings: Any
    ) -> None:
        if publish_every < 1:
            raise UsageError(f"publish_every: expected at least 1, found {publish_every}", kind="Usage", code=2)
        self._where = (store, run)
        self._publish_every = publish_every
        self._dtype = dtype
        self._settings = settings
        self._publisher: Publisher | None = None
        self._rank: int | None = None
        self._attempts = ""
        self._step: int | None = None
        self._count = 0
        self.published = None

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **others):
        model = _unwrapped(model)
        # On every process: one that goes on alone would wait for the others.
        _check(model)
        settings = {"resume": state.global_step > 0, **self._settings}
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            settings |= self._ranks(args.process_index, args.world_size)
        elif not state.is_world_process_zero:
            return
        if "hf_checkpoint" in settings or self._rank:
            self._publisher = Publisher(*self._where, **settings)
        else:
            with tempfile.TemporaryDirectory() as directory:
                _save_files(directory, model, processing_class)
                self._publisher = Publisher(*self._where, **{**settings, "hf_checkpoint": directory})
        # Of a run that goes on too: the model may be another one than the newest version is.
        self._publish(model, state.global_step)

    def on_step_end(self, args, state, control, model=None, **others):
        if state.global_step % self._publish_every == 0:
            self._publish(model, state.global_step)

    def on_train_end(self, args, state, control, model=None, **others):
        # The trainer has put the best weights of its checkpoints into the model.
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if best or self._step != state.global_step:
            self._publish(model, state.global_step)
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _ranks(self, rank: int, ranks: int) -> dict[str, Any]:
        """Settings of a process that publishes shards."""
        if self._settings.get("baseline_dir") is None:
            raise UsageError(
                "baseline_dir: expected a directory, in which each process of FSDP2 has one of its own, found none",
                kind="Usage",
                code=2,
            )
        # A training that was started again attempts the same steps again.
        attempts = [uuid.uuid4().hex]
        torch.distributed.broadcast_object_list(attempts)
        self._rank, self._attempts = rank, attempts[0]
        return {"rank": rank, "ranks": ranks, "baseline_dir": Path(self._settings["baseline_dir"], f"rank-{rank}")}

    def _publish(self, model: Any, step: int) -> None:
        if self._publisher is None:
            return
        tensors = hf_state_dict(model, self._dtype)
        if self._rank is None:
            self.published = self._publisher.publish(tensors, step=step)
        else:
            parts = driftless_torch.slices(tensors, rank=self._rank)
            # A step is published twice where the model is another one at the end.
            attempt = f"{self._attempts}-{self._count}"
            self.published = self._publisher.publish(parts, step=step, attempt=attempt)
        self._step = step
        self._count += 1


def hf_state_dict(model: Any, dtype: Any = None) -> dict[str, Any]:
    """The tensors of a transformers model under the names that its checkpoints have, contiguous and in host memory.

    What is both already, and of ``dtype`` (where given and floating-point), is not copied. Tensors that share their
    memory stand once, as ``save_pretrained`` has it. The wrappers of ``torch.compile``, ``DistributedDataParallel`` and
    ``accelerate`` are taken off.

    Of a model that FSDP2 has distributed they are ``DTensor``s, for ``driftless_rl.torch.slices``. Every process has to call it:
    what transformers fuses and checkpoints have apart, such as experts, is gathered on each.
    """
    model = _unwrapped(model)
    tied = getattr(model, "all_tied_weights_keys", None) or dict.fromkeys(getattr(model, "_tied_weights_keys", None) or ())
    state = model.state_dict()
    owners = {_memory(tensor) for name, tensor in state.items() if name not in tied}
    tensors = {name: tensor for name, tensor in state.items() if name not in tied or _memory(tensor) not in owners}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        # Before transformers 5, models have the names of their checkpoints.
        pass
    else:
        tensors = revert_weight_conversion(model, tensors)
    cast = lambda tensor: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    return {name: cast(tensor.detach()).cpu().contiguous() for name, tensor in tensors.items()}


def _memory(tensor: torch.Tensor) -> int:
    """Where a tensor, or this process's shard of it, begins."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()


def _unwrapped(model: Any) -> Any:
    """The model in the wrappers that leave it whole on every process."""
    while True:
        if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def _check(model: Any) -> None:
    """Refuses models whose state dict is not the checkpoint."""
    if getattr(model, "peft_config", None):
        expected, found = "one without adapters (`merge_and_unload()`)", type(model).__name__
    elif any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        expected, found = "a whole one, or FSDP2 (`fsdp_version: 2`)", "one that FSDP1 has sharded"
    elif any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        expected, found = "a whole one, or FSDP2", "one that DeepSpeed ZeRO-3 has partitioned"
    else:
        return
    raise UsageError(f"model: expected {expected}, found {found}", kind="Usage", code=2)


def _save_files(directory: str, model: Any, processing_class: Any) -> None:
    """Writes the files that belong to a checkpoint beside its weights."""
    config = copy.deepcopy(model.config)
    # FSDP2 puts its name before the class's.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)
    if hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(directory)
