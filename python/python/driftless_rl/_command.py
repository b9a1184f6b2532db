"""The command ``driftless``."""

import os
import shlex
import signal
import sys

from . import _native


def main() -> int:
    """Runs the command with the arguments of this process, and returns its exit code."""
    # It has handlers of its own, and Python's runs only between two lines of Python.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A wheel has no libtorch, and a learner of its own.
    os.environ.setdefault("DRIFTLESS_LEARNER", f"{shlex.quote(sys.executable)} -m driftless_rl.learner")
    return _native.main(["driftless", *sys.argv[1:]])
