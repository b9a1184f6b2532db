"""The package in an environment that has nothing else: run by its interpreter, without pytest."""

import importlib.util
import subprocess
import sys
import time

for other in ("torch", "numpy", "pytest"):
    assert importlib.util.find_spec(other) is None, f"{other} is installed here"

begin = time.perf_counter()
import driftless

print(f"import driftless: {(time.perf_counter() - begin) * 1e3:.0f} ms")
# `dataclasses` and `socket` took a third of the time; asynchronous calls alone need `concurrent.futures`.
assert not {"concurrent.futures", "dataclasses", "socket"} & set(sys.modules)

try:
    driftless.Publisher("memory:", "no/run")
except driftless.Error as error:
    assert isinstance(error, driftless.UsageError) and error.code == 2, repr(error)
else:
    raise AssertionError("a run of this name was begun")

shown = subprocess.run([sys.executable, "-m", "driftless", "--version"], capture_output=True, text=True, check=True)
assert shown.stdout.startswith(f"driftless {driftless.__version__} ("), shown
