"""Publishes a checkpoint of torch.distributed.checkpoint, such as FSDP saves it, from its shards:

python publish_from_dcp.py CHECKPOINT PREFIX MODEL file:///shared/store my-run

PREFIX is what the names of the model's tensors begin with, such as `model.`; MODEL is the Hugging Face directory that has
the configuration and the tokenizer.
"""

import sys

import driftless_rl
import torch
from driftless_rl.dcp import dcp_tensors

checkpoint, prefix, model, store, run = sys.argv[1:]
tensors = dcp_tensors(checkpoint, prefix=prefix, dtype=torch.bfloat16)
with driftless_rl.Publisher(store, run, hf_checkpoint=model) as publisher:
    published = publisher.publish(tensors)
    print(f"version {published.version}: {published.publication_bytes} bytes")
