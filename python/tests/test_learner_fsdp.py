"""The learner on two ranks of torchrun, beside one that is alone."""

import base64
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import read_checkpoint
from driftless_rl.learner import _checkpoint
from driftless_rl.learner._ranks import Ranks
from learner_loop import DEADLINE, Asked, Loop
from safetensors import safe_open
from safetensors.torch import save_file
from test_learner import follow, values

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "driftless_rl.learner", "--fsdp", "--device"]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
STEPS = 2


def learn(loop, asked):
    """Some steps, each of several micro-batches: what they were like, and the log-probs before them."""
    for step in range(STEPS):
        reply = asked.ask("step", rollout_id=step, samples=loop.samples, trained_log_probs=True)
        yield reply["stats"], np.frombuffer(base64.b64decode(reply["trained_log_probs"]), "<f4")


def holders(path: Path) -> int:
    """How many processes have a file as their standard input."""
    found = 0
    for link in Path("/proc").glob("[0-9]*/fd/0"):
        try:
            found += link.resolve() == path.resolve()
        except OSError:
            # It ended.
            pass
    return found


# The order in which a GPU adds up gradients is not the same twice.
@pytest.mark.parametrize("device, close", [("cpu", 1e-6), pytest.param("cuda", 1e-5, marks=TWO_GPUS)])
def test_two_ranks_learn_what_one_process_does(tmp_path, device, close):
    roots = [tmp_path / "one", tmp_path / "two"]
    for root in roots:
        root.mkdir()
    # Three experts do not divide by two; neither do 5 samples.
    one, two = (Loop(root, "moe") for root in roots)
    options = {"lr": 1e-3, "use_kl_loss": True, "kl_loss_type": "k2", "kl_loss_coef": 0.1, "recompute_granularity": "full"}
    one_rank = Ranks(0, 1, torch.device(device), DEADLINE)
    alone, ranks = Asked(roots[0], ranks=one_rank), Asked(roots[1], [*TORCHRUN, device])
    assert alone.ask("hello", **one.hello(options=options))["progress"] is None
    assert "stats" in alone.ask("step", rollout_id=0, samples=one.samples)
    assert alone.ask("save", progress={"step": 1}) == {}
    # What one process has saved, two ranks go on with.
    shutil.copytree(roots[0] / "save", roots[1] / "save")
    hello = ranks.ask("hello", **two.hello(options=options))
    assert hello["progress"] == {"step": 1} and "FSDP2 on 2 ranks" in hello["name"], hello
    # torchrun and its ranks hold the loop's lock.
    assert holders(roots[1] / "lock") == 3
    for (expected, before), (found, told) in zip(learn(one, alone), learn(two, ranks), strict=True):
        assert found == pytest.approx(expected, abs=close)
        np.testing.assert_allclose(told, before, rtol=0, atol=10 * close)
    assert "expected a record" in ranks.ask("step", rollout_id=2, samples=[{**two.samples[0], "position": 99}])["error"]
    # One sample leaves one rank nothing to do.
    for loop, asked in ((one, alone), (two, ranks)):
        assert "stats" in asked.ask("step", rollout_id=2, samples=loop.samples[:1])
        assert asked.ask("publish", step=3) == {"version": 1}
        assert asked.ask("save", progress={"step": 3}) == {}
        assert asked.ask("save_hf", dir=str(loop.root / "out")) == {}
    log_probs = [asked.ask("log_probs", rollout_id=3, samples=loop.samples) for loop, asked in ((one, alone), (two, ranks))]
    expected, found = (np.concatenate(reply["log_probs"]) for reply in log_probs)
    assert np.abs(expected - found).max() < close
    published = [follow(loop) for loop in (one, two)]
    assert published[1] == read_checkpoint(roots[1] / "out")
    expected, found = map(values, published)
    assert expected.keys() == found.keys()
    assert max((expected[name] - found[name]).abs().max() for name in expected) < close
    ranks.close()
    # What two ranks have saved, one goes on with.
    again = Asked(roots[1], ranks=one_rank)
    assert again.ask("hello", **two.hello(options=options))["progress"] == {"step": 3}
    assert again.ask("save_hf", dir=str(roots[1] / "again")) == {}
    assert read_checkpoint(roots[1] / "again") == published[1]
    replies = [asked.ask("step", rollout_id=3, samples=one.samples)["stats"] for asked in (alone, again)]
    assert replies[1] == pytest.approx(replies[0], abs=close)
    again.close()
    alone.close()


def test_rows_are_read_from_whatever_ranks_have_saved_them(tmp_path, monkeypatch):
    whole = torch.arange(10.0).reshape(5, 2)
    for rank, rows in enumerate(whole.split([2, 2, 0, 1])):
        save_file({"w": rows.contiguous()}, tmp_path / f"{rank}.safetensors")
    files = [safe_open(tmp_path / f"{rank}.safetensors", "pt") for rank in range(4)]
    for first, rows in ((0, 5), (0, 3), (3, 2), (4, 1), (5, 0)):
        monkeypatch.setattr(_checkpoint, "_first_row", lambda state: first)
        state = SimpleNamespace(master=torch.empty(rows, 2))
        found = _checkpoint._read(files, "w", state).reshape(rows, 2)
        assert torch.equal(found, whole[first : first + rows])
