"""Families of models in a stock SGLang on the CPU that a real follower keeps up to date: what becomes of each version."""

import json
import subprocess
import sys
from pathlib import Path

import driftless_rl
import pytest
from conftest import Store
from families import FAMILIES, PATCHED, make, page
from servers import MOVED, until
from sglang_engine import STAND_INS, Sglang
from sglang_models import step

on_sglang = pytest.mark.skipif(not STAND_INS, reason="DRIFTLESS_SGLANG_PYTHONPATH is not set")
PAGE = Path(__file__).parents[2] / "docs/engines.md"


@on_sglang
@pytest.mark.parametrize("name", FAMILIES)
def test_family_ends_with_what_a_fresh_server_loads(name, forks, tmp_path):
    family, store, base, host = FAMILIES[name], Store(tmp_path), tmp_path / "base", tmp_path / "host"
    tensors = make(base, name)
    server = Sglang(tmp_path, base, forks=forks)
    lines, log = tmp_path / "lines", tmp_path / "follower.log"
    follow = [sys.executable, "-m", "driftless_rl", "follow", "--store", store.url, "--run", "run", "--poll-ms", "20"]
    follow += ["--checkpoint-dir", str(host), "--hf-checkpoint", str(base), "--engine", server.url]
    follow += ["--plugin-dir", str(server.plugins)]
    with driftless_rl.Publisher(store.url, "run", baseline_dir=store.baseline, hf_checkpoint=base) as publisher:
        publisher.publish(tensors)
        with lines.open("w") as shown, log.open("w") as said:
            follower = subprocess.Popen(follow, stdout=shown, stderr=said)
        try:
            for version in range(4):
                if version > 0:
                    tensors = step(tensors, version, 0.02)
                    publisher.publish(tensors)
                label = f"{publisher.run_id[:12]}:{version}"
                until(f"server with {label}", MOVED, lambda: server.label() == label, [server.log, log])
            until("line of each version", MOVED, lambda: len(lines.read_text().splitlines()) == 4, [log])
            state = host / ".driftless/state.json"
            until("written directory", MOVED, lambda: json.loads(state.read_text())["applied"]["version"] == 3)
        finally:
            follower.terminate()
            follower.wait(60)
    told = lines.read_text().splitlines()[1:]
    if family.outcome == PATCHED:
        assert all(", patched in " in line and "not compared" not in line for line in told), told
        assert server.patched() == 3
    else:
        assert all(", loaded in " in line and family.says in line for line in told), told
    fresh = Sglang(tmp_path / "fresh", host, forks=forks)
    try:
        assert fresh.sums() == server.sums()
        assert fresh.log_probs() == server.log_probs()
    finally:
        server.end()
        fresh.end()


def test_page_of_engines_has_what_was_found():
    assert page() in PAGE.read_text(), f"{PAGE} should have\n{page()}"
