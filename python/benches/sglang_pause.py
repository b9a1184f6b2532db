"""How long SGLang on the CPU is paused for a version: patched by the plugin, and loaded, in turns.

    PYTHONPATH=tests DRIFTLESS_SGLANG_PYTHONPATH=../xtask/sglang python benches/sglang_pause.py [turns]

Run it in ``python``, with the wheel and SGLang in Python's environment, on a machine that does nothing else. The
model is a random Qwen3 of 433 MB. Two followers have the engine serve one version after the other: ``driftless follow
--plugin require`` patches it, and ``driftless follow --plugin off`` has it load. Pauses are the followers' own figures,
from before the first call to after the reply to the last. Beside them:

- `no change`: a version in which nothing changes, patched: what SGLang's calls take.
- `loaded, unchecked`: the calls of a load without the comparison of checksums that the follower makes.
- `scatter`: the same changes written into memory of the same size by a loop in C, without comparing anything.
"""

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from pauses import DENSITIES, Follower, Run, ask, row, wait_prepared, writing_ms
from servers import MOVED
from test_sglang_server import Sglang

SCATTER = """
#include <stddef.h>
void scatter(short *live, const unsigned *at, const short *value, size_t n) {
    for (size_t i = 0; i < n; ++i) live[at[i]] = value[i];
}
"""


def post(port: int, path: str, **body) -> None:
    status, reply = ask(port, path, **body)
    assert status == 200, (path, status, reply)


class Scene:
    def __init__(self, root: Path, ends: ExitStack) -> None:
        self.run = Run(root, ends)
        self.server = Sglang(root, self.run.base, ranks=1)
        ends.callback(self.server.end)
        engine, plugin = self.server.url, ("--plugin", "require", "--plugin-dir", str(self.server.plugins))
        self.patches = Follower(self.run, root / "patched", engine, ends, *plugin)
        self.loads = Follower(self.run, root / "loaded", engine, ends, "--plugin", "off")
        self.prepare()
        self.patches.activate()
        (root / "scatter.c").write_text(SCATTER)
        library = root / "scatter.so"
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, root / "scatter.c"], check=True, timeout=MOVED)
        self.scatter = ctypes.CDLL(str(library)).scatter

    def prepare(self) -> None:
        self.patches.prepare()
        self.loads.prepare()

    def step(self, density: float) -> None:
        """The next version is on disk, and the plugin has prepared it."""
        label = self.run.publish(density)
        self.prepare()
        wait_prepared(self.server, label)

    def patched(self, density: float) -> tuple[float, float]:
        """Milliseconds of pause, and of writing."""
        self.step(density)
        patched = self.server.patched()
        paused = self.patches.activate()
        assert self.server.patched() == patched + 1
        sums = self.server.sums()
        self.unchecked()
        assert self.server.sums() == sums
        return paused, writing_ms(self.server)

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
        live = [torch.zeros(tensor.numel(), dtype=torch.int16) for tensor in self.run.tensors.values()]
        jobs = []
        for flat in live:
            at = torch.randint(0, len(flat), (max(1, int(len(flat) * density)),), generator=self.run.random).unique()
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


def measure(root: Path, turns: int, ends: ExitStack) -> None:
    scene = Scene(root, ends)
    print(f"{turns} turns; ms, least, median, most; load average", *(f"{load:.1f}" for load in os.getloadavg()))
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


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, ExitStack() as ends:
        measure(Path(directory), int(sys.argv[1]) if len(sys.argv) > 1 else 15, ends)
