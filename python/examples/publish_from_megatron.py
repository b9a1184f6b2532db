"""Publishes a Qwen3 that Megatron saved as one rank:

python publish_from_megatron.py CHECKPOINT MODEL file:///shared/store my-run

CHECKPOINT is `iter_0000010/mp_rank_00/model_optim_rng.pt` of a training with `--ckpt-format torch`; MODEL is the Hugging
Face directory that has the configuration and the tokenizer.
"""

import sys

import driftless_rl
import torch
from driftless_rl.megatron import hf_tensors
from transformers import AutoConfig

checkpoint, model, store, run = sys.argv[1:]
config = AutoConfig.from_pretrained(model)
# Mapped, not read. The file holds Python objects too: load what you have written yourself.
state = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=False)["model"]
tensors = [pair for name, tensor in state.items() for pair in hf_tensors(name, tensor, config)]
with driftless_rl.Publisher(store, run, hf_checkpoint=model) as publisher:
    published = publisher.publish(tensors)
    print(f"version {published.version}: {published.publication_bytes} bytes")
