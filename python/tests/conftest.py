"""What the tests share: a store, publishers to it, and a follower's view of it."""

import json
import runpy
import struct
import subprocess
import sys
from pathlib import Path

import driftless_rl
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIG = b'{"architectures": ["Qwen3ForCausalLM"]}'


class Store:
    """A directory that versions are published to, and what a host gets of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = (root / "store").as_uri()
        self.baseline = root / "baseline"

    def publisher(self, **settings) -> driftless_rl.Publisher:
        defaults = {"baseline_dir": self.baseline, "files": {"config.json": CONFIG}}
        return driftless_rl.Publisher(self.url, "run", **{**defaults, **settings})

    def follow(self) -> dict[str, tuple[str, list[int], bytes]]:
        """Has the command bring a host to the newest version, and reads every tensor of it: dtype, shape, bytes."""
        host = self.root / "host"
        run_command("follow", "--store", self.url, "--run", "run", "--checkpoint-dir", str(host), "--once")
        assert (host / "config.json").read_bytes() == CONFIG
        return read_checkpoint(host)

    def newest(self) -> int:
        """The newest version, which a host has afterwards."""
        with driftless_rl.Follower(self.url, "run", self.root / "host") as follower:
            return follower.advance()

    def manifests(self) -> list[Path]:
        """The committed versions."""
        return sorted((self.root / "store").glob("**/manifest"))


def read_checkpoint(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    tensors = {}
    for path in directory.glob("*.safetensors"):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        for name, entry in json.loads(content[8 : 8 + length]).items():
            if name != "__metadata__":
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                tensors[name] = (entry["dtype"], entry["shape"], content[start:end])
    return tensors


def run_command(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "driftless_rl", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def run_here(monkeypatch, capsys, tmp_path):
    """Runs an example in this process, which has imported its libraries already, and gives its lines."""

    def run(name: str, *arguments: str) -> list[str]:
        monkeypatch.chdir(tmp_path)
        # The baseline is where users have it by default.
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run
