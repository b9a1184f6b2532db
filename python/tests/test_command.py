"""The command, and the stubs."""

import ast
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import driftless_rl
import numpy as np
from conftest import run_command
from driftless_rl import _native


def test_command_shows_what_was_published(store):
    with store.publisher() as publisher:
        publisher.publish({"a": np.zeros(3)})
    shown = json.loads(run_command("inspect", "--json", f"{store.url}/run"))
    assert "policy" in json.dumps(shown)


def test_script_is_the_command_and_keeps_its_exit_codes(store):
    script = Path(sys.executable).with_name("driftless")
    assert subprocess.run([script, "--version"], capture_output=True, text=True).stdout.startswith("driftless ")
    assert "Usage: driftless" in run_command("follow", code=2)
    text = run_command("publish", "--store", store.url, "--run", "none", "--resume", "--checkpoint", str(store.root), code=2)
    assert "--checkpoint" in text
    assert "no run named" in run_command("gc", "--store", store.url, "--run", "none", code=1)


def test_train_has_the_learner_of_the_package_as_the_default(tmp_path):
    # The next thing that is missing.
    text = run_command("train", "--hf-checkpoint", str(tmp_path / "none"), "--save", str(tmp_path / "rl"), code=2)
    assert "--hf-checkpoint" in text and "libtorch" not in text
    # The help is wrapped where the interpreter's path has it so.
    assert "-m driftless_rl.learner" in " ".join(run_command("train", "--help").split())


def test_learner_says_what_it_needs():
    script = (
        "import os, sys; sys.modules['torch'] = None; os.environ['DRIFTLESS_LEARNER_SOCKET'] = 'none';"
        "from driftless_rl.learner.__main__ import main; sys.argv = ['learner']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "torch is not installed here" in done.stderr
    assert "pip install torch transformers" in done.stderr


def test_follow_ends_with_a_signal(store):
    with store.publisher() as publisher:
        publisher.publish({"a": np.zeros(3)})
    host = store.root / "host"
    follow = ["follow", "--store", store.url, "--run", "run", "--checkpoint-dir", str(host)]
    command = subprocess.Popen([sys.executable, "-m", "driftless_rl", *follow], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    # It minds signals before it follows.
    while not (host / "config.json").exists():
        assert command.poll() is None and time.monotonic() < until, "the follower has not begun"
        time.sleep(0.01)
    command.send_signal(signal.SIGINT)
    _, rest = command.communicate(timeout=60)
    assert command.returncode == 0, rest


def test_stubs_name_what_the_extension_has():
    stub = ast.parse(Path(driftless_rl.__file__).with_name("_native.pyi").read_text())
    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            assert callable(getattr(_native, node.name))
        elif isinstance(node, ast.ClassDef):
            native = getattr(_native, node.name)
            for item in node.body:
                name = getattr(item, "name", None) or getattr(getattr(item, "target", None), "id", None)
                # `__buffer__` has a name since Python 3.12 only.
                assert name in (None, "__buffer__") or hasattr(native, name), (node.name, name)
    assert Path(driftless_rl.__file__).with_name("py.typed").exists()
