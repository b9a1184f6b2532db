"""Engines as processes: how they are started, asked and ended."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE
from typing import IO

# A server compiles its bytecode at its first start; on two busy cores that takes minutes.
STARTED, MOVED = 600, 120
# What engines log when a process of theirs has died. Their HTTP server may stay, and then answers nothing.
DEATHS = (
    "died unexpectedly (exit code",
    "EngineDeadError",
    "Scheduler hit an exception",
    "Child process unexpectedly",
    # What answers at its port is another server.
    "error while attempting to bind on address",
)
# Below what systems give away by default.
PORTS = range(10_000, 30_000)


def until(what: str, seconds: float, look, logs: Sequence[Path] = ()):
    """The first true answer of ``look``. Without one, what is awaited is named with the ends of ``logs``."""
    end = time.monotonic() + seconds
    while not (answer := look()):
        assert time.monotonic() < end, "\n".join([f"no {what} within {seconds} s", *map(_end, logs)])
        # What is asked is often an engine, which answers by the processor that it shares with all others.
        time.sleep(0.05)
    return answer


def _end(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"{log.name}:", *lines[-8:]])


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


def free_port(ports=iter(turn(os.getpid() * 131, given_away())), one=threading.Lock()) -> int:
    """A port that was free a moment ago, and that is given once: a server may take half a minute until it listens, and until
    then another one would find it free. It is none of those that the system gives to whatever asks for any, unless the system
    gives away all."""
    with one:
        for port in ports:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise OSError(f"none of the ports {PORTS} is free")


class Server:
    """A server of this environment's Python, on a port of its own, which answers once this is made."""

    def __init__(self, root: Path, arguments: list[str], environment: dict[str, str]) -> None:
        root.mkdir(exist_ok=True)
        self.plugins, self.port, self.log = root / "plugins", free_port(), root / "server.log"
        self._arguments = [*arguments, "--port", str(self.port)]
        # Its bytecode is kept: without it each process takes a minute more to start.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._own = {"HF_HUB_OFFLINE": "1", "DRIFTLESS_PLUGIN_DIR": str(self.plugins)}
        self._environment = {**kept, **environment, **self._own}
        self.start()

    def start(self) -> None:
        self.death = None
        begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as log:
            self.process = self._begin(log)
        threading.Thread(target=self._watch, args=(self.process, begin), daemon=True).start()
        try:
            until("answer of the server", STARTED, self._answers)
        except AssertionError:
            self.end()
            raise

    def _begin(self, log: IO[str]) -> "subprocess.Popen | Forked":
        return subprocess.Popen(
            [sys.executable, *self._arguments],
            env=self._environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _watch(self, process: "subprocess.Popen | Forked", begin: int) -> None:
        """Ends an engine that says that it is dead, so that all that waits for it learns why at once."""
        while process.poll() is None:
            with self.log.open(errors="replace") as log:
                log.seek(begin)
                death = next((line for line in log if any(mark in line for mark in DEATHS)), None)
            if death is not None:
                self.death = f"the engine died by itself, and not by what is tested: {death.strip()}"
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                return
            time.sleep(0.5)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.death or self.log.read_text()[-4000:]
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
        except OSError as error:
            if self.death is None:
                raise
            raise AssertionError(self.death) from error
        return json.loads(text) if text.startswith((b"{", b"[")) else {}

    def told(self, rank: int = 0) -> dict:
        """What a rank says of itself, and of the deltas that it was offered."""
        return json.loads((self.plugins / f"rank-{self.port}-{rank}.json").read_text())

    def end(self) -> None:
        # Its workers outlive a server that is merely terminated.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Forked:
    """A process that another one has forked, and reaps."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """None while it lives."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return -signal.SIGKILL
        return None

    def wait(self) -> None:
        until(f"end of process {self.pid}", MOVED, lambda: self.poll() is not None)


class Forks:
    """A process that has imported SGLang, and forks servers. One of them is there within seconds; a server that is
    started imports SGLang in each of its processes."""

    def __init__(self, environment: dict[str, str]) -> None:
        script = [sys.executable, str(Path(__file__).with_name("fork_sglang.py"))]
        environment = {**os.environ, **environment}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process = subprocess.Popen(script, env=environment, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)
        # It has said all that it says once it is ready: models that it cannot import.
        threading.Thread(target=self._process.stderr.read, daemon=True).start()
        assert self._process.stdout.readline() == "ready\n", "SGLang does not import"
        self._one = threading.Lock()

    def fork(self, arguments: list[str], environment: dict[str, str], log: Path) -> Forked:
        """A server with these arguments and further environment, in a session of its own."""
        order = {"arguments": arguments, "environment": environment, "log": str(log)}
        with self._one:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return Forked(int(self._process.stdout.readline()))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
