"""Hands the figures of a run to W&B or trackio: ``python -m driftless_rl.watch RUN --wandb``."""

import argparse
import contextlib
import importlib
import io
import json
import sys
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
    """The steps behind ``done``, each once; without ``poll`` those that are there. A run that goes on has another file."""
    known, read = None, 0
    while True:
        with path.open("rb") if path.exists() else io.BytesIO() as file:
            now = path.stat() if path.exists() else None
            if now and known and (now.st_ino != known or now.st_size < read):
                print(f"{path} begins anew: steps up to {done} keep the figures that were told first", file=sys.stderr)
                read = 0
            known = now and now.st_ino
            file.seek(read)
            while (line := file.readline()).endswith(b"\n"):  # One that is half written waits for its end.
                read += len(line)
                with contextlib.suppress(ValueError, TypeError):
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
    name, mark, fresh = args.run.resolve().name, args.run / f"watch.{args.to}", args.run / f"watch.{args.to}.new"
    done = int((mark.read_text() if mark.exists() else "") or -1)
    again = {"resume": "allow"} | ({"id": name} if args.to == "wandb" else {})
    run = importlib.import_module(args.to).init(project=args.project, name=name, **again)
    with contextlib.ExitStack() as end, contextlib.suppress(KeyboardInterrupt):
        end.callback(run.finish)
        for step in steps(args.run / "metrics.jsonl", done, None if args.once else 2.0):
            run.log(scalars(step), step=step["rollout_id"])
            fresh.write_text(str(step["rollout_id"]))
            fresh.replace(mark)


if __name__ == "__main__":
    main()
