"""A checkpoint directory that a follower of this process keeps."""

import queue
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

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


def test_followers_that_are_named_hear_of_a_version(store):
    heard = queue.Queue()

    class Follower(BaseHTTPRequestHandler):
        def do_POST(self):
            heard.put((self.path, self.headers["Authorization"]))
            self.send_response(202)
            self.end_headers()

        def log_message(self, *words):
            pass

    server = HTTPServer(("127.0.0.1", 0), Follower)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # Nothing listens on the other port, which holds nothing up.
    urls = [f"http://127.0.0.1:{server.server_port}", "http://127.0.0.1:9"]
    with store.publisher(notify=urls, notify_token="secret") as publisher:
        publisher.publish({"weight": np.zeros(3, np.float32)})
        assert heard.get(timeout=60) == ("/notify", "Bearer secret")
    server.shutdown()
