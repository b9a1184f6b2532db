"""The examples, as a reader would run them."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import driftless
import pytest
import test_megatron
import test_slime
import tiny
import torch
import torch.distributed.checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, *arguments: str, **environment: str) -> list[str]:
    command = [sys.executable, EXAMPLES / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def run_here(monkeypatch, capsys, tmp_path):
    """Runs an example in this process, which has imported its libraries already."""

    def run(name: str, *arguments: str) -> list[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def newest(store) -> int:
    with driftless.Follower(store.url, "run", store.root / "host") as follower:
        return follower.advance()


def test_example_publishes_from_pytorch(store):
    # The baseline is where users have it by default.
    lines = run_example("publish_from_pytorch.py", store.url, "run", XDG_CACHE_HOME=str(store.root / "cache"))
    assert [line.split(":")[0] for line in lines] == [f"version {version}" for version in range(4)]
    assert newest(store) == 3
    assert (store.root / "cache/driftless/baselines").is_dir()


def test_example_trains_from_the_log_once(tmp_path):
    assert len(run_example("train_from_the_log.py", str(tmp_path))) == 3
    with driftless.RolloutLog(tmp_path, "00" * 16) as log:
        assert log.groups(4, completed_from=log.cursor("trainer")) == []


def test_example_publishes_from_trl(store, run_here, tmp_path):
    rows = [{"prompt": f"{word} b", "answer": "c"} for word in "abcd"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = run_here("publish_from_trl.py", tiny.checkpoint(tmp_path / "start"), "prompts.jsonl", store.url, "run")
    assert lines[-1].startswith("version 2:") and newest(store) == 2


def test_example_publishes_from_accelerate(store, run_here, tmp_path):
    arguments = [tiny.checkpoint(tmp_path / "start"), store.url, "run", "job", str(tmp_path)]
    assert run_here("publish_from_accelerate.py", *arguments)[-1] == "version 2" and newest(store) == 2


def test_example_publishes_from_megatron(store, run_here, tmp_path):
    model = tiny.dense(num_attention_heads=4, num_key_value_heads=2)
    model.config.save_pretrained(tmp_path / "start")
    (state,) = test_megatron.megatron(model.state_dict(), model.config, 1, True)
    torch.save({"model": state}, tmp_path / "model_optim_rng.pt")
    (line,) = run_here("publish_from_megatron.py", "model_optim_rng.pt", "start", store.url, "run")
    assert line.startswith("version 0:") and newest(store) == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_example_publishes_from_dcp(store, run_here, tmp_path):
    torch.distributed.checkpoint.save({"model": tiny.speaker().state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    arguments = [str(tmp_path), tiny.checkpoint(tmp_path / "start"), store.url, "run"]
    (line,) = run_here("publish_from_dcp.py", "dcp", "model.", *arguments)
    assert line.startswith("version 0:") and newest(store) == 0


def test_example_publishes_from_slime(store, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    slime = test_slime.Slime(store.root, "publish_from_slime.hook", **test_slime.where(store))
    slime.update_weights(test_slime.weights(1))
    test_slime.end()
    assert capsys.readouterr().out.startswith("version 0:") and newest(store) == 0


def test_every_example_is_short():
    assert all(len(path.read_text().splitlines()) <= 30 for path in EXAMPLES.glob("*.py"))
