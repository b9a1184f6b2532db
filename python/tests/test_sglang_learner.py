"""The loop as users of a mixture of experts have it: this wheel trains, a stock SGLang answers and is patched."""

import subprocess
import sys

import pytest
from families import make
from servers import MOVED, until
from sglang_engine import STAND_INS, Sglang
from tiny import digits

pytestmark = pytest.mark.skipif(not STAND_INS, reason="DRIFTLESS_SGLANG_PYTHONPATH is not set")
STEPS = 3


def test_experts_that_the_learner_trains_are_patched(forks, tmp_path):
    base, store, lines = tmp_path / "base", (tmp_path / "store").as_uri(), tmp_path / "lines"
    make(base, "Qwen3 MoE")
    digits().save_pretrained(base)
    server = Sglang(tmp_path, base, forks=forks)
    command = [sys.executable, "-m", "driftless_rl"]
    follow = [*command, "follow", "--store", store, "--run", "run", "--checkpoint-dir", tmp_path / "host"]
    follow += ["--hf-checkpoint", base, "--engine", server.url, "--plugin-dir", server.plugins, "--poll-ms", "50"]
    train = [*command, "train", "--store", store, "--run", "run", "--hf-checkpoint", base, "--save", tmp_path / "rl"]
    train += ["--rollout-external-engine-addrs", f"127.0.0.1:{server.port}", "--task", "arithmetic"]
    train += ["--learner", f"{sys.executable} -m driftless_rl.learner", "--num-rollout", str(STEPS)]
    train += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"]
    # The entropy term moves the weights also where all rewards are equal, and a delta is smaller than the weights.
    train += ["--entropy-coef", "0.01", "--lr", "1e-5", "--n-eval-prompts", "4"]
    with lines.open("w") as shown:
        follower = subprocess.Popen([*follow, "--plugin", "require", "--compare", "require"], stdout=shown)
    try:
        subprocess.run([*train, "--compare", "require"], timeout=600, check=True)
        until("line of each version", MOVED, lambda: len(lines.read_text().splitlines()) == STEPS + 1)
    finally:
        follower.terminate()
        follower.wait(MOVED)
        server.end()
    first, *others = lines.read_text().splitlines()
    assert ", loaded in " in first and all(", patched in " in line for line in others), lines.read_text()
    assert "not compared" not in lines.read_text() and server.patched() == STEPS
