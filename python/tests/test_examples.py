"""The examples, as a reader would run them."""

import json
import os
import subprocess
import sys

import driftless_rl
import pytest
import test_megatron
import test_slime
import tiny
import torch
import torch.distributed.checkpoint
from conftest import EXAMPLES


def run_example(name: str, *arguments: str, **environment: str) -> list[str]:
    command = [sys.executable, EXAMPLES / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_example_publishes_from_pytorch(store):
    # The baseline is where users have it by default.
    lines = run_example("publish_from_pytorch.py", store.url, "run", XDG_CACHE_HOME=str(store.root / "cache"))
    assert [line.split(":")[0] for line in lines] == [f"version {version}" for version in range(4)]
    assert store.newest() == 3
    assert (store.root / "cache/driftless/baselines").is_dir()


def test_example_trains_from_the_log_once(tmp_path):
    assert len(run_example("train_from_the_log.py", str(tmp_path))) == 3
    with driftless_rl.RolloutLog(tmp_path, "00" * 16) as log:
        assert log.groups(4, completed_from=log.cursor("trainer")) == []


def test_example_publishes_from_trl(store, run_here, tmp_path):
    rows = [{"prompt": f"{word} b", "answer": "c"} for word in "abcd"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = run_here("publish_from_trl.py", tiny.checkpoint(tmp_path / "start"), "prompts.jsonl", store.url, "run")
    assert lines[-1].startswith("version 2:") and store.newest() == 2


def test_example_publishes_from_accelerate(store, run_here, tmp_path):
    arguments = [tiny.checkpoint(tmp_path / "start"), store.url, "run", "job", str(tmp_path)]
    assert run_here("publish_from_accelerate.py", *arguments)[-1] == "version 2" and store.newest() == 2


def test_example_publishes_from_megatron(store, run_here, tmp_path):
    model = tiny.dense(num_attention_heads=4, num_key_value_heads=2)
    model.config.save_pretrained(tmp_path / "start")
    (state,) = test_megatron.megatron(model.state_dict(), model.config, 1, True)
    torch.save({"model": state}, tmp_path / "model_optim_rng.pt")
    (line,) = run_here("publish_from_megatron.py", "model_optim_rng.pt", "start", store.url, "run")
    assert line.startswith("version 0:") and store.newest() == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_example_publishes_from_dcp(store, run_here, tmp_path):
    torch.distributed.checkpoint.save({"model": tiny.speaker().state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    arguments = [tiny.checkpoint(tmp_path / "start"), store.url, "run"]
    (line,) = run_here("publish_from_dcp.py", "dcp", "model.", *arguments)
    assert line.startswith("version 0:") and store.newest() == 0


def test_example_publishes_from_slime(store, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    slime = test_slime.Slime(store.root, "publish_from_slime.hook", **test_slime.where(store))
    slime.update_weights(test_slime.weights(1))
    test_slime.end()
    assert capsys.readouterr().out.startswith("version 0:") and store.newest() == 0


def test_every_example_is_short():
    assert all(len(path.read_text().splitlines()) <= 30 for path in EXAMPLES.glob("*.py"))
