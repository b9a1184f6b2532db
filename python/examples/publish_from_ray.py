"""Actors publish halves of a model, and nodes follow: python publish_from_ray.py file:///shared/store my-run DIRECTORY"""

import sys

import driftless_rl
import numpy as np
import ray
from driftless_rl.ray import followers

store, run, directory = sys.argv[1:]


@ray.remote
class Trainer:
    def __init__(self, rank, ranks):
        where = dict(rank=rank, ranks=ranks, baseline_dir=f"{directory}/baseline-{rank}", files={"config.json": b"{}"})
        self.rank, self.publisher = rank, driftless_rl.Publisher(store, run, **where)
        self.half = np.zeros((32, 64), np.float32)

    def step(self, number):
        self.half += 1
        part = driftless_rl.Slice(self.half, shape=(64, 64), start=self.rank * self.half.size)
        self.publisher.publish({"weight": part}, step=number, attempt=f"job-{number}")
        return self.publisher.version


trainers, hosts = [Trainer.remote(rank, 2) for rank in range(2)], followers(store, run, f"{directory}/policy")
for number in range(3):
    version = ray.get([trainer.step.remote(number) for trainer in trainers])[0]
    print(f"version {version}: on nodes {ray.get([host.advance.remote(version) for host in hosts])}")
