"""Write a random Qwen3 checkpoint of 26 thousand parameters: make_checkpoint.py DIR SEED.

Two seeds give two checkpoints of one shape. The vocabulary is not a multiple of 64 and the
embeddings are tied, because engines pad the one and skip the other.
"""

import json
import sys

import torch
from safetensors.torch import save_file

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 32, 64, 2, 4, 2, 8, 100


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns):
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0.0, 0.2, generator=generator)

    def ones(length):
        return torch.ones(length, dtype=torch.bfloat16)

    out = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": ones(HIDDEN)}
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        out[attention + "q_proj.weight"] = matrix(HEADS * HEAD_DIM, HIDDEN)
        out[attention + "k_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        out[attention + "v_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        out[attention + "o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        out[attention + "q_norm.weight"] = ones(HEAD_DIM)
        out[attention + "k_norm.weight"] = ones(HEAD_DIM)
        out[mlp + "gate_proj.weight"] = matrix(INNER, HIDDEN)
        out[mlp + "up_proj.weight"] = matrix(INNER, HIDDEN)
        out[mlp + "down_proj.weight"] = matrix(HIDDEN, INNER)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"model.layers.{layer}.{norm}.weight"] = ones(HIDDEN)
    return out


def config():
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
    }


if __name__ == "__main__":
    directory, seed = sys.argv[1], int(sys.argv[2])
    save_file(tensors(seed), directory + "/model.safetensors", metadata={"format": "pt"})
    with open(directory + "/config.json", "w") as file:
        json.dump(config(), file, indent=2)
