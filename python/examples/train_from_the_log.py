"""Appends rollouts to a log and reads complete groups where they lie: python train_from_the_log.py DIRECTORY"""

import sys

import driftless_rl
import numpy as np

rng = np.random.default_rng(0)
with driftless_rl.RolloutLog(sys.argv[1], run_id="00" * 16) as log:
    for prompt in range(3):
        for number in range(4):
            tokens, log_probs = rng.integers(0, 1000, 20), -rng.random(12)
            reward = float(rng.random() < 0.5)
            log.append(
                sample_id=prompt * 4 + number, group_id=prompt, rollout_id=0,
                tokens=tokens, prompt_len=8, log_probs=log_probs, reward=reward,
            )
    for group in log.groups(samples=4, completed_from=log.cursor("trainer")):
        rewards = np.array([sample.reward for sample in group.samples])
        advantages = rewards - rewards.mean()
        print(f"group {group.group_id}: {sum(len(sample.tokens) for sample in group.samples)} tokens, {advantages}")
        log.commit("trainer", group.completed + 1)
