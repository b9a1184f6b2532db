"""The sidecar for W&B and trackio, against a module that keeps what it is told."""

import json
import sys
import types

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


def test_run_without_metrics_yet_is_told_of_nothing(tmp_path, monkeypatch):
    kept = Kept("wandb")
    monkeypatch.setitem(sys.modules, "wandb", kept)
    watch.main([str(tmp_path), "--wandb", "--once"])
    assert kept.logged == [] and kept.ended == 1
