"""Qwen3, dense and MoE, from Megatron-core's names to those of its Hugging Face checkpoint.

    tensors = [pair for name, tensor in model.named_parameters() for pair in hf_tensors(name, tensor, config)]
    publisher.publish(tensors, step=step)

It needs neither Megatron nor transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ._errors import TensorError
from ._publisher import Slice

__all__ = ["hf_tensors"]

_WRAPPERS = re.compile(r"(module\.)*")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Of Transformer Engine's grouped experts, and of sequential ones.
_EXPERT = re.compile(r"mlp\.experts\.(?:(linear_fc[12])\.weight(\d+)|local_experts\.(\d+)\.(linear_fc[12])\.weight)")

# What every tensor-parallel rank has whole. Norms are fused with the linear layer behind them, or stand alone.
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def hf_tensors(
    name: str,
    tensor: Any,
    config: Any,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    etp_rank: int = 0,
    etp_size: int = 1,
    first_layer: int = 0,
    first_expert: int = 0,
) -> list[tuple[str, Any]]:
    """The Hugging Face tensors that a parameter of Megatron-core is made of, for ``Publisher.publish``.

    They are views of ``tensor``, except queries, keys and values, which Megatron interleaves: these are copied. With
    ``tp_size`` above 1 they are ``Slice``s, and what every rank has is given by rank 0 only. Rows that pad the vocabulary
    are left out, and so are ``_extra_state`` and the output layer of tied embeddings.

    Args:
        name: the parameter's name on its pipeline stage; ``module.`` of wrappers before it is ignored.
        tensor: the parameter, or this rank's shard of it.
        config: the ``Qwen3Config`` or ``Qwen3MoeConfig``, or an object with the same attributes.
        tp_rank, tp_size: the tensor-parallel rank, and their number.
        etp_rank, etp_size: the same for experts.
        first_layer: the stage's first layer in the model.
        first_expert: the rank's first expert in a layer, for expert parallelism.

    Raises:
        TensorError: another name, another shape than the configuration has, or a shard of columns, which is not
            contiguous in the whole tensor: gather it along dimension 1 and give it with ``tp_size=1`` on one rank.
    """
    bare = name[_WRAPPERS.match(name).end() :]
    if bare.endswith("_extra_state"):
        return []
    dense, expert = _Place(name, tensor, tp_rank, tp_size), _Place(name, tensor, etp_rank, etp_size)
    hidden, head = config.hidden_size, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # A dense configuration does not say it.
    experts = getattr(config, "num_experts", 0)
    if bare == "embedding.word_embeddings.weight":
        return dense.vocabulary("model.embed_tokens.weight", config)
    if bare == "output_layer.weight":
        return [] if config.tie_word_embeddings else dense.vocabulary("lm_head.weight", config)
    if bare == "decoder.final_layernorm.weight":
        return dense.whole("model.norm.weight", (hidden,))
    layer = _LAYER.fullmatch(bare) or dense.unknown()
    prefix, part = f"model.layers.{first_layer + int(layer[1])}.", layer[2]
    if part in _WHOLE:
        shapes = {"mlp.router.weight": lambda: (experts, hidden)}
        shape = shapes.get(part, lambda: (head if part.endswith(("q_layernorm.weight", "k_layernorm.weight")) else hidden,))
        return dense.whole(prefix + _WHOLE[part], shape())
    if part in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        columns = (hidden,) if part.endswith("weight") else ()
        return dense.attention(prefix + "self_attn.", part.rpartition(".")[2], config, head, columns)
    if part == "self_attention.linear_proj.weight":
        return dense.columns(prefix + "self_attn.o_proj.weight", (hidden, config.num_attention_heads * head))
    if part == "mlp.linear_fc1.weight":
        return dense.gate_up(prefix + "mlp.", (config.intermediate_size, hidden))
    if part == "mlp.linear_fc2.weight":
        return dense.columns(prefix + "mlp.down_proj.weight", (hidden, config.intermediate_size))
    found = _EXPERT.fullmatch(part) or dense.unknown()
    number = first_expert + int(found[2] or found[3])
    if number >= experts:
        dense.refuse(f"it is expert {number}", f"one of {experts}: `first_expert`")
    prefix += f"mlp.experts.{number}."
    if (found[1] or found[4]) == "linear_fc1":
        return expert.gate_up(prefix, (config.moe_intermediate_size, hidden))
    return expert.columns(prefix + "down_proj.weight", (hidden, config.moe_intermediate_size))


@dataclass(frozen=True)
class _Place:
    """A parameter, and the rank of those that share it."""

    name: str
    tensor: Any
    rank: int
    size: int

    def refuse(self, found: str, expected: str) -> NoReturn:
        raise TensorError(f"tensor `{self.name}`: {found}, expected {expected}", kind="Tensor", tensor=self.name)

    def unknown(self) -> NoReturn:
        self.refuse("its name is none of Megatron-core's Qwen3", "a parameter of a dense or MoE `GPTModel`")

    def check(self, shape: Sequence[int]) -> None:
        if tuple(self.tensor.shape) != tuple(shape):
            expected = f"{tuple(shape)} by the configuration, as rank {self.rank} of {self.size} has it"
            self.refuse(f"its shape is {tuple(self.tensor.shape)}", expected)

    def share(self, count: int, what: str) -> int:
        """This rank's number of something that is divided evenly."""
        if count % self.size:
            self.refuse(f"{count} {what} are shared by {self.size} ranks", "a number that divides them")
        return count // self.size

    def rows(self, hf_name: str, part: Any, first: int, shape: Sequence[int]) -> list[tuple[str, Any]]:
        """Rows of the tensor `hf_name`."""
        part = part.detach().contiguous()
        return [(hf_name, part if self.size == 1 else Slice(part, tuple(shape), first * math.prod(shape[1:])))]

    def whole(self, hf_name: str, shape: Sequence[int]) -> list[tuple[str, Any]]:
        self.check(shape)
        return [(hf_name, self.tensor.detach().contiguous())] if self.rank == 0 else []

    def columns(self, hf_name: str, shape: Sequence[int]) -> list[tuple[str, Any]]:
        if self.size > 1:
            expected = "rows: gather it along dimension 1, and give it with a size of 1 on one rank"
            self.refuse(f"it is the columns of rank {self.rank} of {self.size}", expected)
        return self.whole(hf_name, shape)

    def vocabulary(self, hf_name: str, config: Any) -> list[tuple[str, Any]]:
        """Rows of which the last ones may be padding."""
        rows = self.tensor.shape[0]
        self.check((rows, config.hidden_size))
        if rows * self.size < config.vocab_size:
            self.refuse(f"it has {rows} rows on each of {self.size} ranks", f"at least {config.vocab_size} in all")
        first = rows * self.rank
        part = self.tensor[: max(0, config.vocab_size - first)]
        return self.rows(hf_name, part, first, (config.vocab_size, config.hidden_size)) if part.shape[0] else []

    def gate_up(self, prefix: str, shape: Sequence[int]) -> list[tuple[str, Any]]:
        """Each rank's rows of the gate, then as many of the up projection."""
        rows = self.share(shape[0], "rows")
        self.check((2 * rows, *shape[1:]))
        gate, up = self.tensor[:rows], self.tensor[rows:]
        first = self.rank * rows
        found = self.rows(prefix + "gate_proj.weight", gate, first, shape)
        return found + self.rows(prefix + "up_proj.weight", up, first, shape)

    def attention(self, prefix: str, kind: str, config: Any, head: int, columns: Sequence[int]) -> list[tuple[str, Any]]:
        """For each group, its queries' heads, then its key's, then its value's."""
        groups = self.share(config.num_key_value_heads, "query groups")
        queries = config.num_attention_heads // config.num_key_value_heads
        self.check((groups * (queries + 2) * head, *columns))
        grouped = self.tensor.detach().view(groups, queries + 2, head, *columns)
        found = []
        for letter, begin, heads in (("q", 0, queries), ("k", queries, 1), ("v", queries + 1, 1)):
            part = grouped[:, begin : begin + heads].reshape(-1, *columns)
            first = self.rank * groups * heads * head
            shape = (config.num_key_value_heads * heads * head, *columns)
            found += self.rows(f"{prefix}{letter}_proj.{kind}", part, first, shape)
        return found
