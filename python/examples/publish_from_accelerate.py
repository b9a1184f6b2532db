"""Publishes what accelerate has distributed, each process its part:

accelerate launch --use_fsdp --fsdp_version 2 publish_from_accelerate.py MODEL file:///shared/store my-run my-job /scratch
"""

import sys

import driftless_rl
import torch
from accelerate import Accelerator
from driftless_rl.torch import slices
from driftless_rl.transformers import hf_state_dict
from transformers import AutoModelForCausalLM

start, store, run, job, scratch = sys.argv[1:]
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(start)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
rank, ranks = accelerator.process_index, accelerator.num_processes
where = dict(rank=rank, ranks=ranks, baseline_dir=f"{scratch}/baseline-{rank}", hf_checkpoint=start)
with driftless_rl.Publisher(store, run, **where) as publisher:
    for step in range(3):
        ids = torch.randint(model.config.vocab_size, (2, 16), device=accelerator.device)
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        publisher.publish(slices(hf_state_dict(model), rank=rank), step=step, attempt=f"{job}-{step}")
    accelerator.print(f"version {publisher.version}")
