"""Checkpoints of torch.distributed.checkpoint as a source. Those of two ranks are in `test_fsdp.py`."""

import ctypes
import threading
from pathlib import Path

import driftless_rl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from driftless_rl.dcp import dcp_tensors

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
    tensors = dcp_tensors(checkpoint, prefix="model.")
    with store.publisher() as publisher:
        publisher.publish(tensors)
    found = store.follow()
    assert found.keys() == model.keys() - {"step"}
    for name in found:
        assert found[name][1:] == (list(model[name].shape), content(model[name])), name


def test_floats_are_cast_and_integers_are_not(tmp_path):
    weight = torch.randn(100)
    checkpoint = save(tmp_path / "dcp", {"weight": weight, "count": torch.tensor([3])})
    tensors = dcp_tensors(checkpoint, dtype=torch.bfloat16)
    assert tensors["weight"].dtype is torch.bfloat16 and torch.equal(tensors["weight"].read(), weight.bfloat16())
    assert tensors["count"].read().dtype is torch.int64


def test_memory_holds_a_few_tensors_at_a_time(store):
    # Bits that do not compress: also a copy of what is stored would be as large as the model, and they are stored fast.
    model = {f"{number:03}": torch.randint(-1 << 15, 1 << 15, (1 << 18,), dtype=torch.int16) for number in range(192)}
    size, checkpoint, last = sum(tensor.nbytes for tensor in model.values()), save(store.root / "dcp", model), model["191"]
    del model
    # Memory that the allocator keeps would take in what is held, unseen.
    ctypes.CDLL(None).malloc_trim(0)

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    before, most, over = anonymous(), 0, threading.Event()

    def watch():
        nonlocal most
        while not over.wait(0.01):
            most = max(most, anonymous())

    watcher = threading.Thread(target=watch)
    with store.publisher(threads=2, buffer_bytes=4 << 20) as publisher:
        watcher.start()
        publisher.publish(dcp_tensors(checkpoint))
        over.set()
        watcher.join()
    assert store.follow()["191"][2] == content(last)
    assert 0 < most and most - before < size / 2, (size, most - before)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(driftless_rl.UsageError, match="torch.distributed.checkpoint"):
        dcp_tensors(tmp_path)
    checkpoint = save(tmp_path / "dcp", {"model": {"weight": torch.zeros(3)}})
    with pytest.raises(driftless_rl.UsageError, match="model.weight"):
        dcp_tensors(checkpoint, prefix="policy.")
    for path in checkpoint.glob("*.distcp"):
        path.unlink()
    with pytest.raises(driftless_rl.StoreError, match="distcp"):
        dcp_tensors(checkpoint)["model.weight"].read()


def test_shards_that_are_gone_end_the_publication(store):
    checkpoint = save(store.root / "dcp", {"a": torch.zeros(3), "b": torch.zeros(3)})
    for path in checkpoint.glob("*.distcp"):
        path.unlink()
    with store.publisher() as publisher, pytest.raises(driftless_rl.TensorError, match="distcp") as raised:
        publisher.publish(dcp_tensors(checkpoint))
    assert raised.value.tensor == "a" and store.manifests() == []


def test_lazy_tensor_that_is_another_one_when_it_is_read_is_refused(store):
    lazy = driftless_rl.LazyTensor((4,), torch.float32, lambda: torch.zeros(5))
    with store.publisher() as publisher, pytest.raises(driftless_rl.TensorError, match=r"F32 \[5\]"):
        publisher.publish({"weight": lazy})
    assert store.manifests() == []
