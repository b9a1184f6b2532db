"""Engines as processes: how they are started, asked and ended."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

# A server compiles its bytecode at its first start; on two busy cores that takes minutes.
STARTED, MOVED = 600, 120


def until(what: str, seconds: float, look):
    """The first true answer of ``look``."""
    end = time.monotonic() + seconds
    while not (answer := look()):
        assert time.monotonic() < end, f"no {what} within {seconds} s"
        time.sleep(0.02)
    return answer


def free_port(asked=itertools.count(os.getpid() * 131)) -> int:
    """A port that was free a moment ago. It is none of those that the system gives to whatever asks for any: a server may
    take half a minute until it listens."""
    while True:
        port = 10_000 + next(asked) % 20_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """A server of this environment's Python, on a port of its own, which answers once this is made."""

    def __init__(self, root: Path, arguments: list[str], environment: dict[str, str]) -> None:
        self.plugins, self.port, self.log = root / "plugins", free_port(), root / "server.log"
        self._arguments = [*arguments, "--port", str(self.port)]
        # Its bytecode is kept: without it each process takes a minute more to start.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._environment = {**kept, **environment, "HF_HUB_OFFLINE": "1", "DRIFTLESS_PLUGIN_DIR": str(self.plugins)}
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self._arguments],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            until("answer of the server", STARTED, self._answers)
        except AssertionError:
            self.end()
            raise

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            self.call("/health")
            return True
        except (OSError, AssertionError):
            return False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            raise AssertionError((path, error.code, error.read())) from error
        return json.loads(text) if text.startswith((b"{", b"[")) else {}

    def told(self, rank: int = 0) -> dict:
        """What a rank says of itself, and of the deltas that it was offered."""
        return json.loads((self.plugins / f"rank-{self.port}-{rank}.json").read_text())

    def end(self) -> None:
        # Its workers outlive a server that is merely terminated.
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
