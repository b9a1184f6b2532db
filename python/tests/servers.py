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
# Below what systems give away by default.
PORTS = range(10_000, 30_000)


def until(what: str, seconds: float, look):
    """The first true answer of ``look``."""
    end = time.monotonic() + seconds
    while not (answer := look()):
        assert time.monotonic() < end, f"no {what} within {seconds} s"
        time.sleep(0.02)
    return answer


def given_away() -> range:
    """The ports that the system gives to whatever asks for any; none, where it does not say."""
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:
        return range(0)
    return range(first, last + 1)


def turn(start: int, avoided: range) -> list[int]:
    """The ports in turn, from one that follows from ``start``: those outside of ``avoided`` first."""
    ports = [PORTS[(start + nth) % len(PORTS)] for nth in range(len(PORTS))]
    return sorted(ports, key=lambda port: port in avoided)


def free_port(asked=itertools.count(os.getpid() * 131)) -> int:
    """A port that was free a moment ago. It is none of those that the system gives to whatever asks for any, unless the
    system gives away all: a server may take half a minute until it listens."""
    for port in turn(next(asked), given_away()):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of the ports {PORTS} is free")


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
