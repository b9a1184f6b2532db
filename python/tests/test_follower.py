"""A checkpoint directory that a follower of this process keeps."""

import driftless_rl
import numpy as np
import pytest
from conftest import CONFIG, read_checkpoint


def test_follower_brings_the_directory_to_each_version(store, tmp_path):
    weight = np.arange(1000, dtype=np.float32)
    host = tmp_path / "host"
    with driftless_rl.Follower(store.url, "run", host) as follower:
        with pytest.raises(driftless_rl.RunError):
            follower.advance()
        assert follower.status()["applied"] is None
        with store.publisher() as publisher:
            for version in range(3):
                weight[version] += 1
                publisher.publish({"weight": weight})
            assert follower.advance(1) == 1
            assert follower.advance() == 2 == follower.advance()
            assert follower.status()["applied"]["version"] == 2
            with pytest.raises(driftless_rl.BusyError):
                driftless_rl.Follower(store.url, "run", host)
            with pytest.raises(driftless_rl.Error):
                follower.advance(0)
    assert read_checkpoint(host) == {"weight": ("F32", [1000], weight.tobytes())}
    assert (host / "config.json").read_bytes() == CONFIG
    with pytest.raises(driftless_rl.ClosedError):
        follower.advance()
