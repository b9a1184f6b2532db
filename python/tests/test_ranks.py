"""Trainers whose ranks hold parts of the model."""

from concurrent.futures import ThreadPoolExecutor

import driftless_rl
import numpy as np
import pytest


def publish_as(store, rank, versions):
    """Publishes a rank's parts of some versions: half of `w`, and on rank 0 all of `b`."""
    settings = {"rank": rank, "ranks": 2, "baseline_dir": store.root / f"rank-{rank}", "join_deadline": 60.0}
    with store.publisher(**settings) as publisher:
        for step, weight in enumerate(versions):
            half = weight.reshape(-1)[rank * 500 : (rank + 1) * 500]
            tensors = {"w": driftless_rl.Slice(half, shape=weight.shape, start=rank * 500)}
            if rank == 0:
                tensors["b"] = np.full(3, step, np.float32)
            published = publisher.publish(tensors, step=step, attempt=f"job-{step}")
            assert publisher.version == step and (published is None) == (rank > 0)


def test_slices_of_two_ranks_are_joined(store):
    rng = np.random.default_rng(3)
    versions = [rng.normal(size=(10, 100)).astype(np.float32) for _ in range(3)]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(publish_as, store, rank, versions) for rank in (0, 1)]:
            done.result(timeout=120)
    assert store.follow() == {
        "w": ("F32", [10, 100], versions[-1].tobytes()),
        "b": ("F32", [3], np.full(3, 2, np.float32).tobytes()),
    }


def test_slice_that_is_all_of_its_tensor_keeps_the_shape_of_the_whole(store):
    with store.publisher() as publisher:
        publisher.publish({"w": driftless_rl.Slice(np.arange(6, dtype=np.int8), shape=[2, 3], start=0)})
    assert store.follow() == {"w": ("I8", [2, 3], bytes(range(6)))}


def test_rank_that_does_not_come_is_named_within_the_deadline(store):
    with store.publisher(rank=0, ranks=2, join_deadline=0.2) as publisher:
        with pytest.raises(driftless_rl.DeadlineError) as raised:
            publisher.publish({"w": np.zeros(3)}, attempt="job-0")
        assert raised.value.code == 4 and isinstance(raised.value, TimeoutError)
        assert raised.value.kind == "PartsMissing" and "[1]" in str(raised.value)
        with pytest.raises(driftless_rl.UsageError, match="attempt"):
            publisher.publish({"w": np.zeros(3)})
    assert store.manifests() == []
