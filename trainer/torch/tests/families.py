"""What transformers computes for the models of tests/families.rs: families.py DIR [CHECKPOINT].

Writes a small random checkpoint of every family, with a tied and a separate head, with plain and stretched
rotary frequencies, to DIR/<name>, and its logits beside it: DIR/<name>/logits-{float32,bfloat16}, f32 in row-major
order, for the tokens in DIR/<name>/tokens.json. With a CHECKPOINT, DIR/real holds the same of that model and a chat.

bf16 matrices are multiplied in f32 and rounded once, as the model does on a CPU. The logits of transformers by torch's
own bf16 kernel differ from these by up to 2.9 units in the last place of the largest.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
POSITIONS, VOCABULARY, HEADS, HEAD_DIM = 4096, 96, 4, 16
# Of the eight wave lengths, from 6 to 20,000 positions, four are short, one lies between, and three are long.
STRETCHED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
CHAT = [{"role": "user", "content": "Mia sold 48 clips in April and half as many in May. How many in all?"}]


def fresh(family, tied, stretched):
    """A model whose every weight is drawn, so that a bias or a norm that is left out shows."""
    config_of, model_of = FAMILIES[family]
    options = {"head_dim": HEAD_DIM} if family == "qwen3" else {}
    config = config_of(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_theta": 10000.0, **(STRETCHED if stretched else {"rope_type": "default"})},
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **options,
    )
    model = model_of(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
    # What bf16 holds, so that both dtypes have the same weights.
    return model.to(torch.bfloat16).to(torch.float32)


def write_logits(checkpoint, tokens, to):
    (to / "tokens.json").write_text(json.dumps(tokens))
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="sdpa")
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].float()
        (to / f"logits-{str(dtype).removeprefix('torch.')}").write_bytes(logits.numpy().tobytes())


def multiply_in_f32():
    linear = torch.nn.functional.linear

    def rounded_once(x, weight, bias=None):
        return linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    torch.nn.functional.linear = rounded_once


def main(directory, real=None):
    multiply_in_f32()
    torch.manual_seed(5)
    for family in FAMILIES:
        for tied in (True, False):
            for stretched in (False, True):
                head, rope = "tied" if tied else "untied", "stretched" if stretched else "plain"
                to = directory / f"{family}-{head}-{rope}"
                fresh(family, tied, stretched).save_pretrained(to)
                write_logits(to, torch.randint(VOCABULARY, (POSITIONS,)).tolist(), to)
    if real is not None:
        (directory / "real").mkdir()
        tokenizer = AutoTokenizer.from_pretrained(real)
        text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
        write_logits(real, tokenizer(text)["input_ids"], directory / "real")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
