"""The sidecar for W&B and trackio: with these packages, and against a module that keeps what it is told.

``DRIFTLESS_CLIENTS_PYTHON`` names an interpreter that has the packages.
"""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from driftless_rl import watch


class Kept(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.begun, self.logged, self.ended = [], [], 0

    def init(self, **given):
        self.begun.append(given)
        return self

    def log(self, figures, step):
        self.logged.append((step, figures))

    def finish(self):
        self.ended += 1


def line(step, **more):
    return json.dumps({"rollout_id": step, "reward": 0.5, "skipped": False, "staleness": [1], **more}) + "\n"


@pytest.mark.parametrize("to", ["wandb", "trackio"])
def test_steps_are_told_once_also_by_a_second_sidecar(tmp_path, monkeypatch, to):
    kept = Kept(to)
    monkeypatch.setitem(sys.modules, to, kept)
    run = tmp_path / "math"
    run.mkdir()
    metrics = run / "metrics.jsonl"
    metrics.write_text(line(0, publication={"density": 0.25, "hosts": {"h": []}}) + "not JSON\n[1]\n" + line(1)[:9])
    watch.main([str(run), f"--{to}", "--once"])
    assert kept.logged == [(0, {"rollout_id": 0.0, "reward": 0.5, "skipped": 0.0, "publication/density": 0.25})]
    assert kept.begun[0]["name"] == "math" and kept.begun[0]["project"] == "driftless"
    metrics.write_text(line(0) + line(1) + line(2))
    watch.main([str(run), f"--{to}", "--once"])
    assert [step for step, _ in kept.logged] == [0, 1, 2] and kept.ended == 2


CLIENTS = os.environ.get("DRIFTLESS_CLIENTS_PYTHON")


@pytest.mark.skipif(not CLIENTS, reason="DRIFTLESS_CLIENTS_PYTHON is not set")
@pytest.mark.parametrize("to", ["wandb", "trackio"])
def test_packages_have_each_step_once_behind_a_second_sidecar(tmp_path, to):
    run = tmp_path / "math"
    run.mkdir()
    own = {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_DIR": str(tmp_path), "WANDB_MODE": "offline"}
    # A loaded machine takes its time, and nothing is looked for in the network.
    own |= {"WANDB__SERVICE_WAIT": "200", "HF_HUB_OFFLINE": "1"}
    call = {"check": True, "timeout": 300, "env": {**os.environ, **own}}
    for steps in (range(2), range(3)):
        (run / "metrics.jsonl").write_text("".join(line(step, reward=step / 4, publication={"density": 0.5}) for step in steps))
        subprocess.run([CLIENTS, watch.__file__, str(run), f"--{to}", "--once"], **call)
    read = [CLIENTS, Path(__file__).with_name("sidecars.py"), to, tmp_path]
    kept = json.loads(subprocess.run(read, capture_output=True, **call).stdout)
    told = [tuple(one[name] for name in ("_step", "rollout_id", "reward", "publication/density")) for one in kept]
    assert sorted(told) == [(step, step, step / 4, 0.5) for step in range(3)]


def test_run_without_metrics_yet_is_told_of_nothing(tmp_path, monkeypatch):
    kept = Kept("wandb")
    monkeypatch.setitem(sys.modules, "wandb", kept)
    watch.main([str(tmp_path), "--wandb", "--once"])
    assert kept.logged == [] and kept.ended == 1


def test_mark_that_a_crash_left_empty_is_none_and_a_whole_one_replaces_it(tmp_path, monkeypatch):
    kept = Kept("wandb")
    monkeypatch.setitem(sys.modules, "wandb", kept)
    (tmp_path / "metrics.jsonl").write_text(line(0) + line(1))
    (tmp_path / "watch.wandb").write_text("")
    watch.main([str(tmp_path), "--wandb", "--once"])
    assert [step for step, _ in kept.logged] == [0, 1]
    assert (tmp_path / "watch.wandb").read_text() == "1" and not (tmp_path / "watch.wandb.new").exists()


def test_run_that_goes_back_is_said_and_what_is_added_is_read_alone(tmp_path, monkeypatch, capsys):
    metrics, read = tmp_path / "metrics.jsonl", []
    metrics.write_text(line(0) + line(1) + line(2)[:9])
    changes = [lambda: metrics.write_text(line(0) + line(1) + line(2)), lambda: None]

    def goes_back():
        fresh = tmp_path / "metrics.new"
        fresh.write_text(line(0) + line(1, reward=9.0) + line(2) + line(3))
        fresh.rename(metrics)

    changes += [goes_back, lambda: 1 / 0]
    monkeypatch.setattr(watch.time, "sleep", lambda _: changes.pop(0)())
    loads = json.loads
    monkeypatch.setattr(watch.json, "loads", lambda text: read.append(text) or loads(text))
    told = []
    with pytest.raises(ZeroDivisionError):
        for step in watch.steps(metrics, -1, 2.0):
            told.append(step["rollout_id"])
    assert told == [0, 1, 2, 3]
    assert len(read) == 3 + 4, "each line once, and those of the other file"
    assert "steps up to 2 keep the figures" in capsys.readouterr().err
