"""What a generation costs a process of hooks that has many answers open, beside the engines.

    python benches/hook.py [--answers 500] [--turns 20] [--tokens 1]

It stands in for the loop: every line of the process is answered at once with a generation of so many tokens. The time that
this program takes of the processor is in the first figure, and not in the second.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time

FUNCTION = """
from driftless_rl.hook import generate

@generate
async def answer(turn):
    for nth in range({turns}):
        await turn.generate("+" if nth else None)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Costs of `python -m driftless_rl.hook`.")
    for name, default in (("answers", 500), ("turns", 20), ("tokens", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    question = {"hook": "generate", "index": 0, "prompt": "p" * 200, "input_ids": list(range(64)), "label": "42"}
    question |= {"metadata": None, "sampling_params": {}, "evaluation": False, "generations": []}
    wrote = {"output_ids": [13] * args.tokens, "log_probs": [-1.5] * args.tokens, "text": "+" * args.tokens}
    generation = json.dumps({"appended_ids": [13], "finish_reason": "stop", **wrote})
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(FUNCTION.format(turns=args.turns))
        file.flush()
        command = [sys.executable, "-m", "driftless_rl.hook", file.name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            process.stdout.readline()
            begun, left = time.monotonic(), args.answers
            process.stdin.writelines(json.dumps({"id": number, **question}) + "\n" for number in range(args.answers))
            process.stdin.flush()
            while left:
                said = json.loads(process.stdout.readline())
                if "generate" in said:
                    line = f'{{"id": {said["id"]}, "turn": {said["turn"] + 1}, "generation": {generation}}}\n'
                    process.stdin.write(line)
                    process.stdin.flush()
                else:
                    left -= 1
            took = time.monotonic() - begun
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    calls = args.answers * args.turns / 1e3
    processor = (used.ru_utime + used.ru_stime) / calls
    print(f"{args.answers} open answers, {calls * 1e3:.0f} calls: {took / calls:.3f} ms each, {processor:.3f} ms of the processor")


if __name__ == "__main__":
    main()
