"""Random checkpoints of a few ten thousand parameters, of the shapes that engines lay out differently."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, EXPERTS = 32, 64, 2, 4, 2, 8, 100, 4


def make(
    directory: Path, kind: str, seed: int, head_dim: int = HEAD_DIM, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint of ``kind`` ``untied``, ``tied`` or ``moe``, and returns its tensors. Those of large models are
    drawn faster on a ``device``."""
    random = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        return drawn.normal_(0.0, 0.2, generator=random).cpu()

    def norm(length: int) -> torch.Tensor:
        return torch.ones(length, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": norm(HIDDEN)}
    if kind != "tied":
        tensors["lm_head.weight"] = matrix(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        place = f"model.layers.{layer}."
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{place}self_attn.{name}_proj.weight"] = matrix(rows * head_dim, HIDDEN)
        tensors[f"{place}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * head_dim)
        mlps = [f"{place}mlp."]
        if kind == "moe":
            tensors[f"{place}mlp.gate.weight"] = matrix(EXPERTS, HIDDEN)
            mlps = [f"{place}mlp.experts.{expert}." for expert in range(EXPERTS)]
        for mlp in mlps:
            tensors[f"{mlp}gate_proj.weight"] = matrix(INNER, HIDDEN)
            tensors[f"{mlp}up_proj.weight"] = matrix(INNER, HIDDEN)
            tensors[f"{mlp}down_proj.weight"] = matrix(HIDDEN, INNER)
        for name, length in (("self_attn.q", head_dim), ("self_attn.k", head_dim)):
            tensors[f"{place}{name}_norm.weight"] = norm(length)
        for name in ("input", "post_attention"):
            tensors[f"{place}{name}_layernorm.weight"] = norm(HIDDEN)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(kind, head_dim)))
    return tensors


def step(tensors: dict[str, torch.Tensor], seed: int, density: float) -> dict[str, torch.Tensor]:
    """A successor: in each tensor about so many of the elements differ, one at least, by low bits of the mantissa."""
    random = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in tensors.items():
        new = tensor.clone()
        flat = new.view(-1).view(torch.int16)
        chosen = torch.rand(flat.numel(), generator=random) < density
        chosen[seed % flat.numel()] = True
        flat ^= torch.where(chosen, torch.randint(1, 4, (flat.numel(),), generator=random), 0).to(torch.int16)
        out[name] = new
    return out


def _config(kind: str, head_dim: int) -> dict:
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if kind == "moe" else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if kind == "moe" else "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": kind == "tied",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind == "moe":
        config |= {"moe_intermediate_size": INNER, "num_experts": EXPERTS, "num_experts_per_tok": 2}
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return config
