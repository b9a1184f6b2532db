"""How long SGLang on the CPU is paused for a version: patched by the plugin, and loaded, in turns.

    PYTHONPATH=tests DRIFTLESS_SGLANG_PYTHONPATH=../../xtask/sglang python benches/sglang_pause.py [turns]

Run it in ``bridge/python``, with the wheel and SGLang in Python's environment, on a machine that does nothing else. The
model is a random Qwen3 of 433 MB. Two followers have the engine serve one version after the other: ``driftless follow
--plugin require`` patches it, and ``driftless follow --plugin off`` has it load. Pauses are the followers' own figures,
from before the first call to after the reply to the last. Beside them:

- `no change`: a version in which nothing changes, patched: what SGLang's calls take.
- `loaded, unchecked`: the calls of a load without the comparison of checksums that the follower makes.
- `scatter`: the same changes written into memory of the same size by a loop in C, without comparing anything.
"""

import ctypes
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import driftless
import sglang_models
import torch
from servers import MOVED, free_port, until
from test_sglang_server import Sglang

SHAPE = {"HIDDEN": 1024, "INNER": 3072, "LAYERS": 12, "HEADS": 16, "KV_HEADS": 8, "HEAD_DIM": 64, "VOCABULARY": 32003}
DENSITIES = (0.001, 0.01)
SCATTER = """
#include <stddef.h>
void scatter(short *live, const unsigned *at, const short *value, size_t n) {
    for (size_t i = 0; i < n; ++i) live[at[i]] = value[i];
}
"""


def post(port: int, path: str, **body) -> dict:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    text = reply.read()
    assert reply.status == 200, (path, reply.status, text)
    return json.loads(text) if text.startswith(b"{") else {}


class Follower:
    """``driftless follow``, which does what it is told."""

    def __init__(self, scene: "Scene", name: str, *options: str) -> None:
        self.directory, self.port = scene.root / name, free_port()
        command = [sys.executable, "-m", "driftless", "follow", "--store", scene.store, "--run", "run"]
        command += ["--checkpoint-dir", str(self.directory), "--hf-checkpoint", str(scene.base), "--coordinated"]
        command += ["--listen", f"127.0.0.1:{self.port}", "--poll-ms", "86400000", "--engine", scene.server.url, *options]
        self.process = subprocess.Popen(command, env={**os.environ, "RUST_LOG": "warn"})
        until("follower", MOVED, self._answers)

    def _answers(self) -> bool:
        try:
            post(self.port, "/notify")
        except OSError:
            return False
        except AssertionError:
            return True
        return True

    def prepare(self) -> None:
        post(self.port, "/prepare")

    def activate(self) -> float:
        """Milliseconds of pause."""
        [engine] = post(self.port, "/activate")["applied"]["engines"]
        assert engine["label"], engine
        return engine["pause_ms"]


class Scene:
    def __init__(self, root: Path) -> None:
        for name, value in SHAPE.items():
            setattr(sglang_models, name, value)
        self.root, self.base, self.store = root, root / "base", (root / "store").as_uri()
        self.tensors, self.random = sglang_models.make(self.base, "untied", 1, SHAPE["HEAD_DIM"]), torch.Generator().manual_seed(2)
        self.server = Sglang(root, self.base)
        self.publisher = driftless.Publisher(
            self.store, "run", baseline_dir=root / "baseline", hf_checkpoint=self.base
        )
        self.publisher.publish(self.tensors)
        self.patches = Follower(self, "patched", "--plugin", "require", "--plugin-dir", str(self.server.plugins))
        self.loads = Follower(self, "loaded", "--plugin", "off")
        self.prepare()
        self.patches.activate()
        (root / "scatter.c").write_text(SCATTER)
        library = root / "scatter.so"
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, root / "scatter.c"], check=True)
        self.scatter = ctypes.CDLL(str(library)).scatter

    def prepare(self) -> None:
        self.patches.prepare()
        self.loads.prepare()

    def step(self, density: float) -> None:
        """The next version is on disk, and the plugin has prepared it."""
        for tensor in self.tensors.values() if density else ():
            flat = tensor.view(-1).view(torch.int16)
            count = max(1, int(flat.numel() * density))
            flat[torch.randint(0, flat.numel(), (count,), generator=self.random)] ^= 1
        version = self.publisher.publish(self.tensors).version
        self.prepare()
        label = f"{self.publisher.run_id[:12]}:{version}"

        def is_prepared() -> bool:
            deltas = self.server.told()["deltas"].values()
            return any((told["target"], told["why_not"]) == (label, None) for told in deltas)

        until("prepared delta", MOVED, is_prepared)

    def patched(self, density: float) -> tuple[float, float]:
        """Milliseconds of pause, and of writing."""
        self.step(density)
        patched = self.server.patched()
        paused = self.patches.activate()
        assert self.server.patched() == patched + 1
        sums = self.server.sums()
        self.unchecked()
        assert self.server.sums() == sums
        [line] = [line for line in self.server.log.read_text().splitlines() if "driftless: patched to " in line][-1:]
        return paused, float(line.split(" elements in ")[1].split(" ms")[0])

    def loaded(self, density: float) -> float:
        self.step(density)
        return self.loads.activate()

    def unchecked(self) -> float:
        """Milliseconds that the calls of a load take for the version that is live."""
        label, port = self.server.label(), self.server.port
        update = {"model_path": str(self.loads.directory), "flush_cache": False}
        begin = time.perf_counter()
        post(port, "/pause_generation", mode="retract")
        post(port, "/flush_cache", timeout=0)
        post(port, "/update_weight_version", new_version=f"{label}?partial", abort_all_requests=False)
        self.server.label()
        post(port, "/update_weights_from_disk", weight_version=f"{label}?partial", **update)
        post(port, "/update_weight_version", new_version=label, abort_all_requests=False)
        self.server.label()
        post(port, "/continue_generation", torch_empty_cache=False)
        return 1e3 * (time.perf_counter() - begin)

    def scattered(self, density: float, turns: int) -> list[float]:
        """Milliseconds of a bare loop."""
        live = [torch.zeros(tensor.numel(), dtype=torch.int16) for tensor in self.tensors.values()]
        jobs = []
        for flat in live:
            at = torch.randint(0, len(flat), (max(1, int(len(flat) * density)),), generator=self.random).unique()
            values = torch.ones(len(at), dtype=torch.int16)
            jobs.append((flat, at.int(), values))
        times = []
        for _ in range(turns):
            # Nothing of it is in a cache, as in an engine that has generated meanwhile.
            torch.zeros(16 << 20).add_(1)
            begin = time.perf_counter()
            for flat, at, values in jobs:
                pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (flat, at, values))
                self.scatter(*pointers, ctypes.c_size_t(len(at)))
            times.append(1e3 * (time.perf_counter() - begin))
        return times

    def end(self) -> None:
        for follower in (self.patches, self.loads):
            follower.process.terminate()
            follower.process.wait(60)
        self.server.end()
        self.publisher.close()


def row(name: str, times: list[float]) -> None:
    low, middle, high = min(times), statistics.median(times), max(times)
    print(f"  {name:<18} {low:8.1f} {middle:8.1f} {high:8.1f}", flush=True)


def measure(root: Path, turns: int) -> None:
    scene = Scene(root)
    try:
        loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
        print(f"{turns} turns; ms, least, median, most; load average {loads}")
        row("no change", [scene.patched(0.0)[0] for _ in range(turns)])
        for density in DENSITIES:
            patched, wrote, loaded, unchecked = [], [], [], []
            for _ in range(turns):
                paused, written = scene.patched(density)
                patched.append(paused)
                wrote.append(written)
                loaded.append(scene.loaded(density))
                unchecked.append(scene.unchecked())
            scattered = scene.scattered(density, turns)
            middle = statistics.median
            print(
                f"density {density}: a load's pause / a patch's {middle(loaded) / middle(patched):.1f}, without checksums"
                f" {middle(unchecked) / middle(patched):.1f}; writing / scatter {middle(wrote) / middle(scattered):.2f}"
            )
            rows = (("patched", patched), ("loaded", loaded), ("loaded, unchecked", unchecked))
            for name, times in (*rows, ("writing", wrote), ("scatter", scattered)):
                row(name, times)
    finally:
        scene.end()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        measure(Path(directory), int(sys.argv[1]) if len(sys.argv) > 1 else 15)
