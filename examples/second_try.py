"""Gives the model a second try where its first answer is wrong: `--custom-generate-command "python3 examples/second_try.py"`.

See docs/hooks.md.
"""

import json
import sys

WRONG = "\nThat is wrong. Try again.\n"

for line in sys.stdin:
    ask = json.loads(line)
    said = [generation["text"] for generation in ask["generations"]]
    if not said:
        answer = {"generate": {}}
    elif len(said) == 1 and ask["label"] not in said[0]:
        answer = {"generate": {"append": WRONG}}
    else:
        answer = {"samples": [{}]}
    print(json.dumps({"id": ask["id"], **answer}), flush=True)
