"""Environments with an older wheel of this package, or with the package `driftless` of another project."""

import subprocess
import sys

import pytest
from conftest import assert_this_wheel_hooks, run_beside, write

# SGLang's loader of plugins comes without what the package imports by itself, which takes some ten seconds.
BARE = """
import importlib.util, sys
sys.modules["sglang"] = importlib.util.module_from_spec(importlib.util.find_spec("sglang"))
"""


def test_older_wheel_is_named_at_start_with_what_to_do(older_wheel):
    done = run_beside(older_wheel, "import driftless_rl", "last")
    assert done.stderr.count("is an older wheel of this package") == 1
    assert "`pip uninstall driftless`" in done.stderr and str(older_wheel) in done.stderr


def test_package_of_another_project_is_named_and_ours_goes_on(tmp_path):
    write(tmp_path / "driftless/__init__.py", "raise RuntimeError('imported')")
    done = run_beside(tmp_path, "import driftless_rl; driftless_rl.Codec()", "first")
    assert done.stderr.count("of another project") == 1 and "`python -m driftless_rl` is ours" in done.stderr
    command = [sys.executable, "-m", "driftless_rl", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert shown.stdout.startswith("driftless ") and "of another project" in shown.stderr


def test_folder_of_the_name_is_no_package(tmp_path):
    write(tmp_path / "driftless/Cargo.toml")
    assert run_beside(tmp_path, "import driftless_rl", "first").stderr == ""


@pytest.mark.parametrize("where", ["first", "last"])
def test_sglang_is_hooked_once_and_by_this_wheel(older_wheel, where):
    names = {"plugins": "sglang.srt.plugins", "ours": "driftless_rl.sglang._hooks", "call": "load_plugins"}
    assert_this_wheel_hooks(older_wheel, where, BARE, **names)
