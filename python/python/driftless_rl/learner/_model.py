"""A causal language model of transformers: loaded, sharded, asked for log-probs."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from . import _attention
from ._batch import Batch
from ._options import Options
from ._ranks import Ranks, Refused

# Bytes of f32 logits that are looked at together, unless `--log-probs-chunk-size` says otherwise.
CHUNK_BYTES = 512 << 20


class Model:
    """A model of one checkpoint directory, on every rank.

    Attributes:
        module: the model of transformers.
        vocabulary: how many tokens it knows.
        padded: whether samples get rows of their own. They are packed where the model keeps them apart.
    """

    def __init__(self, directory: str, options: Options, dtype: torch.dtype, ranks: Ranks, attention: str | None) -> None:
        self.module = _load(directory, dtype, attention)
        # Without dropout: log-probs are those of the weights.
        self.module.eval()
        self.vocabulary = self.module.get_input_embeddings().weight.shape[0]
        self._options = options
        self._keeps = "logits_to_keep" in inspect.signature(self.module.forward).parameters
        self._bounded = False
        layers = _layers(self.module, set(self.module._no_split_modules or ()))
        if options.recompute_granularity == "full":
            for layer in layers:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        if ranks.sharded:
            _shard(self.module, layers, dtype, ranks)
        else:
            self.module.to(ranks.device)
        self.padded = _attention.is_chunked(self.module.config) or not self._keeps_apart(ranks)
        if attention is None and not self.padded and _attention.takes(ranks.device, dtype):
            self._choose_flash(ranks)

    def pad(self) -> None:
        """Gives samples rows of their own from now on, which the kernel for packed ones does not take."""
        self.padded = True
        if self._bounded:
            self._leave_flash()

    def log_probs(self, batch: Batch, *, entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the trained tokens, f32 ``[m]`` each, at the temperature of the run."""
        # Hidden states go through the head only where a token is asked for, if the model can do that.
        keeps = {"logits_to_keep": batch.places} if self._keeps and batch.mask is None else {}
        rows = {"position_ids": batch.positions} if batch.mask is None else {"attention_mask": batch.mask}
        if self._bounded and batch.mask is None:
            rows[_attention.BOUNDS] = batch.bounds
        logits = self.module(input_ids=batch.tokens, use_cache=False, **rows, **keeps).logits
        logits = logits.reshape(-1, logits.shape[-1])
        if not keeps:
            logits = logits[batch.places]
        rows = self._options.log_probs_chunk_size or max(CHUNK_BYTES // (4 * logits.shape[-1]), 1)
        chosen = functools.partial(_chosen, temperature=self._options.temperature, entropy_gradient=entropy_gradient)
        found = [
            # What lies between logits and log-probs is computed again on the way back, not held.
            checkpoint(chosen, *some, use_reentrant=False) if torch.is_grad_enabled() else chosen(*some)
            for some in zip(logits.split(rows), batch.labels.split(rows), strict=True)
        ]
        new, entropy = zip(*found, strict=True)
        return torch.cat(new), torch.cat(entropy)


    @torch.enable_grad()
    def _keeps_apart(self, ranks: Ranks) -> bool:
        """Whether two sequences in one row, told apart by their positions, are nothing to each other.

        The gradient of what the second one says, by what the first one is, is exactly 0 then. State-space layers, and
        attention that does not look at positions, carry something over.
        """
        length, embedding = 4, self.module.get_input_embeddings().weight
        inputs = torch.randn(1, 2 * length, embedding.shape[1], generator=torch.Generator().manual_seed(0))
        inputs = inputs.to(ranks.device, embedding.dtype).requires_grad_()
        rows: dict[str, Any] = {"position_ids": torch.arange(length, device=ranks.device).repeat(2).unsqueeze(0)}
        if self._bounded:
            starts = torch.arange(0, 3 * length, length, dtype=torch.int32, device=ranks.device)
            rows[_attention.BOUNDS] = starts, length
        try:
            logits = self.module(inputs_embeds=inputs, use_cache=False, **rows).logits
        except (TypeError, ValueError, Refused):
            return False
        logits[0, length:].float().square().sum().backward()
        self.module.zero_grad(set_to_none=True)
        first, second = inputs.grad[0, :length], inputs.grad[0, length:]
        return bool((first == 0).all()) and bool((second != 0).any())

    def _choose_flash(self, ranks: Ranks) -> None:
        """Takes the kernel for packed samples, if the model can be computed with it."""
        self._before = self.module.config._attn_implementation
        try:
            self.module.set_attn_implementation(_attention.NAME)
        except ValueError:
            return
        self._bounded = True
        if self._keeps_apart(ranks):
            return
        if ranks.sharded:
            # FSDP2 does not go on after a pass that broke off.
            kind = self.module.config.model_type
            raise Refused(f"attention of {kind}: the kernel for packed samples cannot compute it; --attn-implementation sdpa")
        self._leave_flash()

    def _leave_flash(self) -> None:
        self._bounded = False
        self.module.set_attn_implementation(self._before)


def _chosen(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of ``labels`` ``[c]`` and entropies ``[c]``, from logits ``[c, vocabulary]``."""
    log_probs = torch.log_softmax(logits.float() / temperature, -1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy


def _load(directory: str, dtype: torch.dtype, attention: str | None) -> Any:
    """A model all of whose parameters are in the checkpoint. transformers would draw others at random, with a warning."""
    asked: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    # The loop logs each line.
    logging.disable_progress_bar()
    try:
        module, loaded = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **asked
        )
    except (ValueError, KeyError, ImportError) as error:
        raise Refused(f"checkpoint {directory}: {error}") from error
    kind, state = type(module).__name__, dict(module.named_parameters())
    for name, found, expected in sorted(loaded["mismatched_keys"]):
        text = f"tensor `{name}`: expected shape {list(expected)}, as `config.json` says, found {list(found)}"
        raise Refused(f"checkpoint {directory}: {text}; give the weights that belong to it")
    # Tied parameters are there under another name, and buffers are computed.
    missing = sorted(name for name in loaded["missing_keys"] if name in state)
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        text = f"expected all parameters of {kind}, found none for `{missing[0]}`{more}"
        raise Refused(f"checkpoint {directory}: {text}; save the whole model")
    return module


def _layers(module: torch.nn.Module, names: set[str]) -> list[torch.nn.Module]:
    """The outermost modules of these classes."""
    if type(module).__name__ in names:
        return [module]
    return [layer for child in module.children() for layer in _layers(child, names)]


def _shard(module: torch.nn.Module, layers: list[torch.nn.Module], dtype: torch.dtype, ranks: Ranks) -> None:
    """Distributes a model: each layer is whole while it computes; gradients are summed in f32."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(reduce_dtype=None if dtype == torch.float32 else torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    # Buffers of no parameter, such as those of rotary embeddings, have stayed behind.
    for name, buffer in list(module.named_buffers()):
        if buffer.device.type != ranks.device.type:
            owner = module.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], buffer.to(ranks.device))
