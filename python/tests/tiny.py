"""Models and a tokenizer that are as small as they can be."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefgh"]
SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)


def dense(**settings) -> Qwen3ForCausalLM:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL | settings))


def moe(**settings) -> Qwen3MoeForCausalLM:
    torch.manual_seed(1)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL | EXPERTS | settings))


def speaker() -> Qwen3ForCausalLM:
    """A model with the vocabulary of the tokenizer."""
    return dense(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def checkpoint(directory: Path) -> str:
    """A model and a tokenizer on disk."""
    speaker().save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return str(directory)


def digits() -> PreTrainedTokenizerFast:
    """The tokenizer of ``train --task arithmetic``, a token for each character."""
    words = ["<pad>", "<bos>", "<eos>", *"0123456789+=", "<unk>"]
    made = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)
