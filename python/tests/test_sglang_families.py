"""Families of models in a stock SGLang on the CPU that a real follower keeps up to date: what becomes of each version."""

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import driftless_rl
import pytest
from conftest import Store
from families import FAMILIES, PATCHED, make, page
from servers import MOVED, Forks, until
from sglang_engine import STAND_INS, Sglang
from sglang_models import step

on_sglang = pytest.mark.skipif(not STAND_INS, reason="DRIFTLESS_SGLANG_PYTHONPATH is not set")
PAGE = Path(__file__).parents[2] / "docs/engines.md"
VERSIONS = 4
# Each of these is laid out or read in a way of its own; the others are like one of them, and wait for `DRIFTLESS_LONG`.
IN_SHORT = {
    "Apertus",
    "Cohere",
    "ERNIE 4.5 MoE",
    "GLM-4.5 MoE",
    "GPT-2",
    "Gemma 3",
    "Granite MoE",
    "Llama, tied",
    "OLMoE",
    "Persimmon",
    "Phi-3",
    "Qwen3",
}
PLAYED = [name for name in FAMILIES if name in IN_SHORT or "DRIFTLESS_LONG" in os.environ]
# Servers and followers wait for most of the time that a family takes.
AT_ONCE = 3


@dataclass(frozen=True)
class Outcome:
    """What became of a family: a line of each version, how many were patched, and what both servers say at the end."""

    lines: list[str]
    patched: int
    followed: tuple
    fresh: tuple


def run(root: Path, tensors: dict, forks: Forks) -> Outcome:
    """Takes a server through the versions of a run, and starts a fresh one on what the follower has written."""
    store, base, host, lines = Store(root), root / "base", root / "host", root / "lines"
    with contextlib.ExitStack() as ended:
        server = Sglang(root, base, forks=forks)
        ended.callback(server.end)
        logs = [server.log, root / "follower.log"]
        command = [sys.executable, "-m", "driftless_rl", "follow", "--store", store.url, "--run", "run"]
        command += ["--poll-ms", "20", "--checkpoint-dir", str(host), "--hf-checkpoint", str(base)]
        command += ["--engine", server.url, "--plugin-dir", str(server.plugins)]
        with driftless_rl.Publisher(store.url, "run", baseline_dir=store.baseline, hf_checkpoint=base) as publisher:
            publisher.publish(tensors)
            with lines.open("w") as shown, logs[1].open("w") as said:
                follower = subprocess.Popen(command, stdout=shown, stderr=said)
            ended.callback(follower.wait, MOVED)
            ended.callback(follower.terminate)
            for version in range(VERSIONS):
                if version > 0:
                    tensors = step(tensors, version, 0.02)
                    publisher.publish(tensors)
                label = f"{publisher.run_id[:12]}:{version}"
                until(f"server with {label}", MOVED, lambda: server.label() == label, logs)
        until("line of each version", MOVED, lambda: len(lines.read_text().splitlines()) == VERSIONS, logs)
        state = host / ".driftless/state.json"
        until("written directory", MOVED, lambda: json.loads(state.read_text())["applied"]["version"] == VERSIONS - 1)
        fresh = Sglang(root / "fresh", host, forks=forks)
        ended.callback(fresh.end)
        said = [(each.sums(), each.log_probs()) for each in (server, fresh)]
        return Outcome(lines.read_text().splitlines(), server.patched(), *said)


@pytest.fixture(scope="module")
def outcomes(request, forks, tmp_path_factory):
    """Of each family that is tested, what will have become of it."""
    items = [item for item in request.session.items if "outcomes" in getattr(item, "fixturenames", ())]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        made = {}
        for name in (item.callspec.params["name"] for item in items):
            root = tmp_path_factory.mktemp("family")
            # Made here: its seed is all of this process's.
            made[name] = threads.submit(run, root, make(root / "base", name), forks)
        yield made


@on_sglang
@pytest.mark.parametrize("name", PLAYED)
def test_family_ends_with_what_a_fresh_server_loads(name, outcomes):
    family, outcome = FAMILIES[name], outcomes[name].result()
    _, *told = outcome.lines
    if family.outcome == PATCHED:
        assert all(", patched in " in line and "not compared" not in line for line in told), told
        assert outcome.patched == VERSIONS - 1
    else:
        assert all(", loaded in " in line and family.says in line for line in told), told
    assert outcome.followed == outcome.fresh


def test_page_of_engines_has_what_was_found():
    assert page() in PAGE.read_text(), f"{PAGE} should have\n{page()}"
