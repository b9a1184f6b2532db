"""Checkpoints of torch.distributed.checkpoint as a source. Those of two ranks are in `test_fsdp.py`."""

import threading
from pathlib import Path

import driftless
import pytest
import torch
import torch.distributed.checkpoint as dcp
from driftless.dcp import dcp_tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(directory: Path, state) -> Path:
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def content(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_checkpoint_is_published_without_the_optimiser(store):
    torch.manual_seed(1)
    model = {
        "weight": torch.randn(65, 7, dtype=torch.bfloat16),
        "scale": torch.tensor(3.0),
        "none": torch.zeros(0, 4),
        "eighths": torch.randn(9).to(torch.float8_e4m3fn),
        "count": torch.tensor([3], dtype=torch.int64),
        "step": 7,
    }
    checkpoint = save(store.root / "dcp", {"model": model, "optimizer": {"state": torch.ones(3), "lr": 0.1}})
    tensors = dcp_tensors(checkpoint, store.root, prefix="model.")
    with store.publisher() as publisher:
        publisher.publish(tensors)
    found = store.follow()
    assert found.keys() == model.keys() - {"step"}
    for name in found:
        assert found[name][1:] == (list(model[name].shape), content(model[name])), name
    assert not list(store.root.glob("driftless-dcp-*")), "a file was left"


def test_floats_are_cast_and_integers_are_not(tmp_path):
    weight = torch.randn(100)
    checkpoint = save(tmp_path / "dcp", {"weight": weight, "count": torch.tensor([3])})
    tensors = dcp_tensors(checkpoint, tmp_path, dtype=torch.bfloat16)
    assert torch.equal(tensors["weight"], weight.bfloat16()) and tensors["count"].dtype is torch.int64


def test_memory_holds_one_shard_at_a_time(tmp_path):
    model = {f"{number:02}": torch.randint(1 << 14, (4 << 20,), dtype=torch.int16) for number in range(24)}
    size, checkpoint, last = sum(tensor.nbytes for tensor in model.values()), save(tmp_path / "dcp", model), model["23"]
    del model

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    before, most, over = anonymous(), 0, threading.Event()

    def watch():
        nonlocal most
        while not over.wait(0.002):
            most = max(most, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    tensors = dcp_tensors(checkpoint, tmp_path)
    over.set()
    watcher.join()
    assert torch.equal(tensors["23"], last)
    assert 0 < most and most - before < size / 2, (size, most - before)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(driftless.UsageError, match="torch.distributed.checkpoint"):
        dcp_tensors(tmp_path, tmp_path)
    checkpoint = save(tmp_path / "dcp", {"model": {"weight": torch.zeros(3)}})
    with pytest.raises(driftless.UsageError, match="model.weight"):
        dcp_tensors(checkpoint, tmp_path, prefix="policy.")
    with pytest.raises(driftless.StoreError, match="missing"):
        dcp_tensors(checkpoint, tmp_path / "missing")
    for path in checkpoint.glob("*.distcp"):
        path.unlink()
    with pytest.raises(driftless.StoreError, match="distcp"):
        dcp_tensors(checkpoint, tmp_path)
