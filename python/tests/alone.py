"""The package in an environment that has nothing else: run by its interpreter, without pytest."""

import importlib.util
import subprocess
import sys
import time

for other in ("torch", "numpy", "pytest"):
    assert importlib.util.find_spec(other) is None, f"{other} is installed here"

begin = time.perf_counter()
import driftless_rl

print(f"import driftless_rl: {(time.perf_counter() - begin) * 1e3:.0f} ms")
# `dataclasses` and `socket` took a third of the time; asynchronous calls alone need `concurrent.futures`.
assert not {"concurrent.futures", "dataclasses", "socket"} & set(sys.modules)

try:
    driftless_rl.Publisher("memory:", "no/run")
except driftless_rl.Error as error:
    assert isinstance(error, driftless_rl.UsageError) and error.code == 2, repr(error)
else:
    raise AssertionError("a run of this name was begun")

shown = subprocess.run([sys.executable, "-m", "driftless_rl", "--version"], capture_output=True, text=True, check=True)
assert shown.stdout.startswith(f"driftless {driftless_rl.__version__} ("), shown
