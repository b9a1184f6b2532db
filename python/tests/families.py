"""Tiny random models of many families, with the tensors and names that transformers gives them, and what becomes of each
in a stock SGLang with our plugin."""

import contextlib
import io
import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

HEADS = 4
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD = {"head_dim": 16}
# A family without grouped heads.
WHOLE = {"num_key_value_heads": HEADS}
TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}

PATCHED = "patched"


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        config: the class of transformers that has its settings.
        settings: those that differ from ``SIZES``.
        outcome: ``PATCHED``, or why its versions are loaded.
        says: what the plugin says of it, if it is loaded: a part of that.
    """

    config: str
    settings: dict = field(default_factory=dict)
    outcome: str = PATCHED
    says: str = ""


FAMILIES = {
    "Apertus": Family("ApertusConfig", {}, "its activation has weights that are read while it loads", "Tensor.item()"),
    "Arcee": Family("ArceeConfig", HEAD),
    "Cohere": Family("CohereConfig"),
    "Cohere 2": Family("Cohere2Config"),
    "ERNIE 4.5": Family("Ernie4_5Config", HEAD),
    "ERNIE 4.5 MoE": Family(
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64},
        "a router's gate is rounded to bfloat16",
        "torch.float32 in the checkpoint, torch.bfloat16 in the model",
    ),
    "Gemma": Family("GemmaConfig", HEAD),
    "Gemma 2": Family("Gemma2Config", HEAD | {"hidden_act": "gelu_pytorch_tanh"}),
    "Gemma 3": Family("Gemma3TextConfig", HEAD),
    "GLM-4": Family("Glm4Config", HEAD),
    "GLM-4.5 MoE": Family("Glm4MoeConfig", HEAD | ROUTED | {"num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    "GPT-2": Family("GPT2Config", WHOLE | {"n_embd": 64, "n_head": HEADS, "n_layer": 2, "n_inner": 128, "n_positions": 512}),
    "Granite": Family("GraniteConfig"),
    "Granite MoE": Family("GraniteMoeConfig", LOCAL),
    "Llama": Family("LlamaConfig"),
    "Llama, tied": Family("LlamaConfig", TIED),
    "MiniMax M2": Family("MiniMaxM2Config", HEAD | LOCAL | {"scoring_func": "sigmoid"}),
    "Ministral 3": Family("Ministral3Config", HEAD),
    "Mistral": Family("MistralConfig", HEAD),
    "Mixtral": Family("MixtralConfig", LOCAL),
    "OLMo": Family("OlmoConfig", WHOLE),
    "OLMo 2": Family("Olmo2Config"),
    "OLMo 3": Family("Olmo3Config"),
    "OLMoE": Family("OlmoeConfig", WHOLE | {"num_experts": 4, "num_experts_per_tok": 2}),
    "OPT": Family("OPTConfig", WHOLE | {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "Persimmon": Family("PersimmonConfig", WHOLE, "parts of a fused tensor are put in another order", "a part of a copy"),
    "Phi-2": Family("PhiConfig", WHOLE),
    "Phi-3": Family("Phi3Config"),
    "Qwen2": Family("Qwen2Config"),
    "Qwen3": Family("Qwen3Config", HEAD),
    "Qwen3, tied": Family("Qwen3Config", HEAD | TIED),
    "Qwen3 MoE": Family("Qwen3MoeConfig", HEAD | EXPERTS),
    "Seed-OSS": Family("SeedOssConfig", HEAD),
    "SmolLM3": Family("SmolLM3Config"),
    "StableLM": Family("StableLmConfig"),
    "StarCoder2": Family("Starcoder2Config"),
}


def make(directory: Path, name: str) -> dict[str, torch.Tensor]:
    """Writes a checkpoint of a family, and returns its tensors."""
    family = FAMILIES[name]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    # Its progress bars.
    with contextlib.redirect_stderr(io.StringIO()), torch.no_grad():
        config = getattr(transformers, family.config)(**(SIZES | family.settings))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.02)
        model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def page() -> str:
    """The table of ``docs/engines.md``."""
    rows = ["| family | each version is |", "|---|---|"]
    for name, family in FAMILIES.items():
        rows.append(f"| {name} | {family.outcome if family.outcome == PATCHED else f'loaded: {family.outcome}'} |")
    return "\n".join(rows)
