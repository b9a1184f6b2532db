"""What benches of engines' pauses share: a run of a random model, followers that do what they are told, a table."""

import http.client
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import driftless_rl
import sglang_models
import torch
from servers import MOVED, STARTED, Server, free_port, until

SHAPE = {"HIDDEN": 1024, "INNER": 3072, "LAYERS": 12, "HEADS": 16, "KV_HEADS": 8, "HEAD_DIM": 64, "VOCABULARY": 32003}
DENSITIES = (0.001, 0.01)


def ask(port: int, path: str, **body) -> tuple[int, bytes]:
    """Status and body of the reply to a POST."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=STARTED)
    connection.request("POST", path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    try:
        reply = connection.getresponse()
        return reply.status, reply.read()
    except TimeoutError as error:
        raise AssertionError(f"no answer to {path} within {STARTED} s") from error


class Run:
    """A run of a random Qwen3 of 433 MB, which is closed with ``ends``."""

    def __init__(self, root: Path, ends: ExitStack) -> None:
        for name, value in SHAPE.items():
            setattr(sglang_models, name, value)
        self.base, self.store = root / "base", (root / "store").as_uri()
        self.tensors = sglang_models.make(self.base, "untied", 1, SHAPE["HEAD_DIM"])
        self.random = torch.Generator().manual_seed(2)
        baseline = root / "baseline"
        self._publisher = driftless_rl.Publisher(self.store, "run", baseline_dir=baseline, hf_checkpoint=self.base)
        ends.callback(self._publisher.close)
        self._publisher.publish(self.tensors)

    def publish(self, density: float) -> str:
        """Publishes a version in which about so much of each tensor changed, nothing for 0; its label."""
        for tensor in self.tensors.values() if density else ():
            flat = tensor.view(-1).view(torch.int16)
            count = max(1, int(flat.numel() * density))
            flat[torch.randint(0, flat.numel(), (count,), generator=self.random)] ^= 1
        return f"{self._publisher.run_id[:12]}:{self._publisher.publish(self.tensors).version}"


class Follower:
    """``driftless follow`` for one engine, which does what it is told, and ends with ``ends``."""

    def __init__(self, run: Run, directory: Path, engine: str, ends: ExitStack, *options: str) -> None:
        self.directory, self._port = directory, free_port()
        command = [sys.executable, "-m", "driftless_rl", "follow", "--store", run.store, "--run", "run", "--coordinated"]
        command += ["--checkpoint-dir", str(directory), "--hf-checkpoint", str(run.base), "--poll-ms", "86400000"]
        command += ["--listen", f"127.0.0.1:{self._port}", "--engine", engine, *options]
        environment = {**os.environ, "RUST_LOG": "warn"}
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        ends.callback(self._end)

    def prepare(self) -> None:
        self._ask("/prepare")

    def activate(self) -> float:
        """Milliseconds of pause."""
        [engine] = self._ask("/activate")["applied"]["engines"]
        assert engine["label"], engine
        return engine["pause_ms"]

    def _ask(self, path: str) -> dict:
        """The reply, once the follower listens and is not busy: it looks at its engine first, and scrubs later."""
        return until(f"answer of a follower to {path}", MOVED, lambda: self._try(path))

    def _try(self, path: str) -> dict | None:
        assert self._process.poll() is None, "the follower has ended"
        try:
            status, reply = ask(self._port, path)
        except ConnectionRefusedError:
            return None
        if status == 409 and json.loads(reply)["error"]["kind"] == "busy":
            return None
        assert status == 200, (path, status, reply)
        return json.loads(reply)

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def wait_prepared(server: Server, label: str) -> None:
    """Until the server's plugin has prepared the version."""

    def is_prepared() -> bool:
        return any((told["target"], told["why_not"]) == (label, None) for told in server.told()["deltas"].values())

    until(f"prepared delta to {label}", MOVED, is_prepared)


def writing_ms(server: Server) -> float:
    """Milliseconds for which the server's last patch wrote, by its log."""
    line = [line for line in server.log.read_text().splitlines() if 'driftless: {"patched":' in line][-1]
    return json.loads(line.partition("driftless: ")[2])["wrote_us"] / 1e3


def row(name: str, times: list[float]) -> None:
    low, middle, high = min(times), statistics.median(times), max(times)
    print(f"  {name:<18} {low:8.1f} {middle:8.1f} {high:8.1f}", flush=True)
