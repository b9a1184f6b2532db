"""What the tests share: a store, publishers to it, and a follower's view of it."""

import gc
import json
import runpy
import struct
import subprocess
import sys
from pathlib import Path

import driftless_rl
import pytest
from servers import Forks
from sglang_engine import ON_CPU

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIG = b'{"architectures": ["Qwen3ForCausalLM"]}'


def pytest_configure() -> None:
    """Imports make some hundred thousand objects, which stay: nothing looks for garbage among them."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


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


# What the plugins of the older wheel do, as far as engines and this package see it.
PLUGIN = """
def register():
    from . import {hooks}
    {hooks}.register()
"""
HOOKS = "def register():\n    print('hooked by the older wheel')\n"


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# Loads the plugins of this environment as an engine does. Of those that are called, each says whose it is.
LOAD_PLUGINS = """
import {plugins} as plugins

found = plugins.load_plugins_by_group

def load(*args, **kwargs):
    loaded = found(*args, **kwargs)
    import {ours} as ours
    ours.register = lambda: print("hooked by this wheel")
    return loaded

plugins.load_plugins_by_group = load
plugins.{call}()
"""


def assert_this_wheel_hooks(folder: Path, where: str, first: str = "", **names: str) -> None:
    """Loads an engine's plugins behind ``first``, beside an older wheel: one is called, and the log names the other."""
    done = run_beside(folder, first + LOAD_PLUGINS.format(**names), where)
    assert done.stdout.count("hooked by") == 1 and "hooked by this wheel" in done.stdout, done.stdout
    assert "the plugin of the older wheel `driftless`" in done.stderr and "is refused" in done.stderr


def run_beside(folder: Path, script: str, where: str) -> subprocess.CompletedProcess[str]:
    """Runs a script that finds the folder's packages, `first` or `last` of all."""
    place = f"import sys; sys.path.insert({0 if where == 'first' else 'len(sys.path)'}, {str(folder)!r})\n"
    command = [sys.executable, "-P", "-c", place + script]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="session")
def forks():
    """Servers of SGLang are forked from one process that has imported it."""
    forks = Forks({**ON_CPU, "HF_HUB_OFFLINE": "1"})
    yield forks
    forks.end()


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


@pytest.fixture
def older_wheel(tmp_path: Path) -> Path:
    """A folder with an older wheel."""
    package = tmp_path / "driftless"
    for name in ("__init__.py", "_driftless.abi3.so", "sglang/_hooks.py", "vllm/_backend.py"):
        write(package / name, HOOKS if "/" in name else "")
    for plugin, hooks in (("sglang", "_hooks"), ("vllm", "_backend")):
        write(package / plugin / "__init__.py", PLUGIN.format(hooks=hooks))
    entries = (
        "[sglang.srt.plugins]\ndriftless = driftless.sglang:register\n"
        "[vllm.general_plugins]\ndriftless = driftless.vllm:register\n"
    )
    write(tmp_path / "driftless-0.1.0.dist-info/METADATA", "Metadata-Version: 2.4\nName: driftless\nVersion: 0.1.0\n")
    write(tmp_path / "driftless-0.1.0.dist-info/entry_points.txt", entries)
    return tmp_path
