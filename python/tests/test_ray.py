"""Actors of a local Ray."""

import driftless_rl
import numpy as np
import pytest
import ray
from conftest import CONFIG, read_checkpoint
from driftless_rl.ray import followers


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, logging_level="ERROR")
    yield
    ray.shutdown()


def test_follower_of_a_node_is_started_again_and_goes_on(store):
    directory = store.root / "policy"
    (host,) = followers(store.url, "run", directory)
    with pytest.raises(driftless_rl.RunError) as raised:
        ray.get(host.advance.remote(), timeout=120)
    assert raised.value.kind == "NoSuchRun"
    with store.publisher() as publisher:
        for step in range(2):
            publisher.publish({"a": np.full(3, step, np.float32)}, step=step)
            assert ray.get(host.advance.remote(), timeout=120) == step
            assert ray.get(host.status.remote(), timeout=120)["applied"]["version"] == step
            ray.kill(host, no_restart=False)
    assert ray.get(host.advance.remote(), timeout=120) == 1
    assert (directory / "config.json").read_bytes() == CONFIG
    assert read_checkpoint(directory)["a"][2] == np.ones(3, np.float32).tobytes()
    assert followers(store.url, "run", directory, resource="a resource that no node has") == []


def test_follower_whose_directory_is_held_waits_until_it_is_free(store):
    directory = store.root / "policy"
    with driftless_rl.Follower(store.url, "run", directory, id="before"):
        (host,) = followers(store.url, "run", directory)
        asked = host.status.remote()
        # The process of the actor, which is busy in its creation.
        assert ray.wait([asked], timeout=3)[0] == []
    assert ray.get(asked, timeout=120)["applied"] is None


def test_example_publishes_from_ray(store, run_here):
    lines = run_here("publish_from_ray.py", store.url, "run", str(store.root))
    assert lines[-3:] == [f"version {version}: on nodes [{version}]" for version in range(3)]
    assert store.newest() == 2
