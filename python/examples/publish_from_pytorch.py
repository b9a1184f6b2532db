"""Publishes a model after every optimiser step: python publish_from_pytorch.py file:///shared/store my-run"""

import sys

import driftless_rl
import torch

store, run = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with driftless_rl.Publisher(store, run, files={"config.json": b"{}"}) as publisher:
    for step in range(4):
        loss = model(torch.randn(32, 64, dtype=torch.bfloat16)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        published = publisher.publish(model.state_dict(), step=step)
        print(f"version {published.version}: {published.publication_bytes} of {published.full_bytes} bytes")
