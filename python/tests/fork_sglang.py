"""Imports SGLang once and forks a server for each order, a line of JSON: its arguments, environment and log. With
arguments of its own, it is the one server of these.

A fork is a stock server but for its start: SGLang starts its processes anew, and each imports everything again.
"""

import gc
import json
import multiprocessing
import os
import signal
import sys

# A million objects are made, and none of them is freed: a fifth of the imports' time would be spent on looking.
gc.disable()

from sglang.srt.plugins import load_plugins  # noqa: E402

load_plugins()

import sglang.launch_server as launch  # noqa: E402: plugins hook what is imported after them
import sglang.srt.entrypoints.http_server  # noqa: E402
import sglang.srt.managers.detokenizer_manager  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402


def serve(arguments: list[str]) -> None:
    """What ``python -m sglang.launch_server`` does, in a process that has all of it."""
    # Its processes are forked as well.
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    launch.run_server(launch.prepare_server_args(arguments))


def fill(order: dict) -> None:
    """Serves as the order says."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, place in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(place, stream)
    os.environ |= order["environment"]
    serve(order["arguments"])


def main() -> None:
    if not sys.argv[1:]:
        ModelRegistry.get_supported_archs()
    # Else each collection of each server looks through all of them, and has copied the memory that it shares here.
    gc.freeze()
    gc.enable()
    if sys.argv[1:]:
        return serve(sys.argv[1:])
    # Nothing here waits for a server.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            try:
                fill(json.loads(line))
            finally:
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
