"""Publishes what TRL trains, after every step: python publish_from_trl.py MODEL PROMPTS.jsonl file:///shared/store my-run

Each line of the prompts has a `prompt` and an `answer`.
"""

import sys

import torch
from datasets import load_dataset
from driftless_rl.transformers import PublishCallback
from trl import GRPOConfig, GRPOTrainer

model, prompts, store, run = sys.argv[1:]


def answered(completions, answer, **columns):
    return [float(right in completion) for completion, right in zip(completions, answer)]


short = dict(max_steps=2, num_generations=2, max_completion_length=8)
args = GRPOConfig(output_dir=f"out-{run}", use_cpu=not torch.cuda.is_available(), save_strategy="no", **short)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=answered,
    args=args,
    train_dataset=load_dataset("json", data_files=prompts, split="train"),
    callbacks=[callback := PublishCallback(store, run)],
)
trainer.train()
print(f"version {callback.published.version}: {callback.published.publication_bytes} bytes")
