"""Problems and rewards of reasoning-gym (`pip install reasoning-gym`), for two hooks of `driftless train`:

    hook="python3 examples/reasoning_gym_task.py chain_sum"
    driftless train --data-source-command "$hook" --custom-rm-command "$hook" --apply-chat-template …

See docs/hooks.md.
"""

import json
import sys

import reasoning_gym

# Problem i is a function of seed and i: a run that goes on after a crash meets the same ones.
problems = reasoning_gym.create_dataset(sys.argv[1], seed=42, size=1 << 31)


def reward(sample):
    answer = sample["response"].rsplit("</think>", 1)[-1].strip()
    return problems.score_answer(answer, entry=problems[sample["metadata"]["number"]])


for line in sys.stdin:
    ask = json.loads(line)
    if ask["hook"] == "prompt":
        number = ask["number"]
        answer = {"row": {"input": problems[number]["question"], "metadata": {"number": number}}}
    else:
        answer = {"rewards": [reward(sample) for sample in ask["samples"]]}
    print(json.dumps({"id": ask["id"], **answer}), flush=True)
