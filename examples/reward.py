"""Rewards answers in which their label occurs. `--custom-rm-command "python3 examples/reward.py"` runs it; see docs/loop.md."""

import json
import sys

for line in sys.stdin:
    ask = json.loads(line)
    rewards = [float(sample["label"] in sample["response"]) for sample in ask["samples"]]
    print(json.dumps({"id": ask["id"], "rewards": rewards}), flush=True)
