"""How long SGLang on the CPU is paused for a version: patched by the plugin, and loaded, in turns.

    PYTHONPATH=tests DRIFTLESS_SGLANG_PYTHONPATH=../../xtask/sglang python benches/sglang_pause.py [turns]

Run it in ``bridge/python``, with the wheel and SGLang in Python's environment. The model is a random Qwen3 of 433 MB.
A turn publishes a version, has a follower prepare it, and then activates it twice: by the calls that ``driftless
follow`` makes for a prepared version (pause, update, look, continue), and by those for a load, without its checksums
(pause, flush, fence, update, label, look, continue). Nothing else is under way at the server. Times are from before the
first call to after the reply to the last.
"""

import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import driftless
import sglang_models
import torch
from test_sglang_server import MOVED, Server, until

SHAPE = {"HIDDEN": 1024, "INNER": 3072, "LAYERS": 12, "HEADS": 16, "KV_HEADS": 8, "HEAD_DIM": 64, "VOCABULARY": 32003}
DENSITIES = (0.001, 0.01)


class Calls:
    """Calls on one connection, as a follower makes them."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)

    def post(self, path: str, **body) -> dict:
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return self._reply(path)

    def label(self) -> str:
        self._connection.request("GET", "/model_info")
        return self._reply("/model_info")["weight_version"]

    def _reply(self, path: str) -> dict:
        reply = self._connection.getresponse()
        text = reply.read()
        assert reply.status == 200, (path, reply.status, text)
        return json.loads(text) if text.startswith(b"{") else {}

    def patched(self, checkpoint: Path, label: str) -> float:
        begin = time.perf_counter()
        self.post("/pause_generation", mode="retract")
        told = self.post(
            "/update_weights_from_disk", model_path=str(checkpoint), weight_version=label, flush_cache=True
        )
        assert self.label() == label
        self.post("/continue_generation", torch_empty_cache=False)
        took = time.perf_counter() - begin
        assert told["message"].startswith("driftless: patched to "), told
        return took

    def loaded(self, checkpoint: Path, label: str) -> float:
        begin = time.perf_counter()
        self.post("/pause_generation", mode="retract")
        self.post("/flush_cache")
        fence = f"{label}?partial"
        self.post("/update_weight_version", new_version=fence, abort_all_requests=False)
        self.post("/update_weights_from_disk", model_path=str(checkpoint), weight_version=fence, flush_cache=False)
        self.post("/update_weight_version", new_version=label, abort_all_requests=False)
        assert self.label() == label
        self.post("/continue_generation", torch_empty_cache=False)
        return time.perf_counter() - begin


def step(tensors: dict[str, torch.Tensor], random: torch.Generator, density: float) -> None:
    """Changes about so many of the elements of each tensor."""
    for tensor in tensors.values():
        flat = tensor.view(-1).view(torch.int16)
        chosen = torch.randint(0, flat.numel(), (max(1, int(flat.numel() * density)),), generator=random)
        flat[chosen] ^= 1


def measure(root: Path, turns: int) -> None:
    for name, value in SHAPE.items():
        setattr(sglang_models, name, value)
    tensors, random = sglang_models.make(root / "base", "untied", 1), torch.Generator().manual_seed(2)
    server, store = Server(root, root / "base"), (root / "store").as_uri()
    try:
        with (
            driftless.Publisher(store, "run", baseline_dir=root / "baseline", hf_checkpoint=root / "base") as publisher,
            driftless.Follower(store, "run", root / "host", plugin_dir=server.plugins) as follower,
        ):
            publisher.publish(tensors)
            follower.advance()
            label = follower.status()["applied"]["label"]
            Calls(server.port).loaded(root / "host", label)
            for density in DENSITIES:
                patched, loaded = [], []
                for _ in range(turns):
                    step(tensors, random, density)
                    publisher.publish(tensors)
                    follower.advance()
                    label = follower.status()["applied"]["label"]

                    def is_prepared() -> bool:
                        deltas = server.told()["deltas"].values()
                        return any((told["target"], told["why_not"]) == (label, None) for told in deltas)

                    until("prepared delta", MOVED, is_prepared)
                    patched.append(Calls(server.port).patched(root / "host", label))
                    before = server.call("/weights_checker", {"action": "checksum"})["ranks"]
                    loaded.append(Calls(server.port).loaded(root / "host", label))
                    assert server.call("/weights_checker", {"action": "checksum"})["ranks"] == before
                report(density, patched, loaded)
    finally:
        server.end()


def report(density: float, patched: list[float], loaded: list[float]) -> None:
    def row(name: str, times: list[float]) -> str:
        low, middle, high = min(times), statistics.median(times), max(times)
        return f"{name} {1e3 * low:.1f} / {1e3 * middle:.1f} / {1e3 * high:.1f} ms"

    ratio = statistics.median(loaded) / statistics.median(patched)
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"density {density}, {len(patched)} turns, least / median / most; load average {loads}")
    print(f"  {row('patched', patched)}; {row('loaded', loaded)}; ratio of medians {ratio:.1f}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        measure(Path(directory), int(sys.argv[1]) if len(sys.argv) > 1 else 15)
