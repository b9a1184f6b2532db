"""Hands the figures of a run to W&B or trackio: ``python -m driftless_rl.watch RUN --wandb``."""

import argparse
import contextlib
import importlib
import json
import time
from collections.abc import Iterator
from pathlib import Path


def scalars(line: dict, path: str = "") -> dict[str, float]:
    """The numbers of a line of ``metrics.jsonl``, with ``/`` between the levels. Lists are left out."""
    found = {}
    for name, value in line.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{path}{name}/")
        elif isinstance(value, (int, float)):
            found[path + name] = float(value)
    return found


def steps(path: Path, done: int, poll: float | None) -> Iterator[dict]:
    """The steps behind ``done``, each once; without ``poll`` those that are there. A run that goes on cuts the file back."""
    seen = None
    while True:
        now = path.stat() if path.exists() else None
        before, seen = seen, now and (now.st_ino, now.st_size)
        for line in path.read_bytes().splitlines() if seen != before and now else []:
            with contextlib.suppress(ValueError, TypeError):  # Half written, by now or for ever.
                if (step := dict(json.loads(line))).get("rollout_id", -1) > done:
                    done = step["rollout_id"]
                    yield step
        if poll is None:
            return
        time.sleep(poll)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m driftless_rl.watch", description=__doc__)
    parser.add_argument("run", type=Path, help="directory of the run, as `train --save` has it")
    to = parser.add_mutually_exclusive_group(required=True)
    for kind in ("wandb", "trackio"):
        to.add_argument(f"--{kind}", dest="to", action="store_const", const=kind)
    parser.add_argument("--project", default="driftless")
    parser.add_argument("--once", action="store_true", help="end after the steps that are there")
    args = parser.parse_args(given)
    name, mark = args.run.resolve().name, args.run / f"watch.{args.to}"
    done = int(mark.read_text()) if mark.exists() else -1
    again = {"resume": "allow"} | ({"id": name} if args.to == "wandb" else {})
    run = importlib.import_module(args.to).init(project=args.project, name=name, **again)
    with contextlib.ExitStack() as end, contextlib.suppress(KeyboardInterrupt):
        end.callback(run.finish)
        for step in steps(args.run / "metrics.jsonl", done, None if args.once else 2.0):
            run.log(scalars(step), step=step["rollout_id"])
            mark.write_text(str(step["rollout_id"]))


if __name__ == "__main__":
    main()
