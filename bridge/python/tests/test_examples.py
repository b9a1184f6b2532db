"""The examples, as a reader would run them."""

import os
import subprocess
import sys
from pathlib import Path

import driftless

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, *arguments: str, **environment: str) -> list[str]:
    command = [sys.executable, EXAMPLES / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_example_publishes_from_pytorch(store):
    # The baseline is where users have it by default.
    lines = run_example("publish_from_pytorch.py", store.url, "run", XDG_CACHE_HOME=str(store.root / "cache"))
    assert [line.split(":")[0] for line in lines] == [f"version {version}" for version in range(4)]
    with driftless.Follower(store.url, "run", store.root / "host") as follower:
        assert follower.advance() == 3
    assert (store.root / "cache/driftless/baselines").is_dir()


def test_example_trains_from_the_log_once(tmp_path):
    assert len(run_example("train_from_the_log.py", str(tmp_path))) == 3
    with driftless.RolloutLog(tmp_path, "00" * 16) as log:
        assert log.groups(4, completed_from=log.cursor("trainer")) == []


def test_every_example_is_short():
    assert all(len(path.read_text().splitlines()) <= 30 for path in EXAMPLES.glob("*.py"))
