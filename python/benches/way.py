"""A version's way: from the end of an optimiser step to the first tokens that it drew.

    PYTHONPATH=tests python benches/way.py make DIR [--shape tiny|433m|8b] [--device cuda:0]
    PYTHONPATH=tests python benches/way.py run ENGINE DIR [--work WORK] [--device cuda:0] [--requests 48] ...

``make`` writes a random Qwen3. An SGLang with the plugin has loaded DIR and listens at the URL ENGINE, or will within
minutes. Each turn moves some elements by one bit, as an optimiser does, publishes them with the wheel's ``Publisher``, and
waits for ``driftless follow`` to have the engine serve them. Requests decode meanwhile, and one is streamed.

Times are milliseconds from the call of ``publish``, by one clock: until the manifest was there, until the follower offered
the version, until the engine said that it serves it, until a token of the running stream carried its label, and until a
request that was made then had its first token. Beside them stand the phases that the follower told. Then a second
follower has the engine load versions instead, and the last line is the ratio of both ways.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path

import driftless_rl
import sglang_models
import torch
from safetensors.torch import load_file
from servers import MOVED, STARTED, free_port, until

SHAPES = {
    "tiny": {},
    "433m": {"HIDDEN": 1024, "INNER": 3072, "LAYERS": 12, "HEADS": 16, "KV_HEADS": 8, "HEAD_DIM": 64, "VOCABULARY": 32003},
    "8b": {"HIDDEN": 4096, "INNER": 12288, "LAYERS": 36, "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "VOCABULARY": 151936},
}
# Tokens of a prompt, and those that are drawn behind it.
PROMPT, ANSWER, STREAMED = 64, 512, 4096


def make(directory: Path, shape: str, device: str) -> None:
    for name, value in SHAPES[shape].items():
        setattr(sglang_models, name, value)
    sglang_models.make(directory, "untied", 1, sglang_models.HEAD_DIM, device)


class Engine:
    """An SGLang, and the requests that it decodes."""

    def __init__(self, url: str, vocabulary: int, requests: int) -> None:
        parts = urllib.parse.urlsplit(url)
        self.url, self._host, self._port = url, parts.hostname, parts.port
        self._vocabulary, self._stop = vocabulary, threading.Event()
        self.failed: str | None = None
        # When the stream's tokens came, and the labels that they carried.
        self.labels: list[tuple[float, str]] = []
        until("answer of the engine", STARTED, self._answers)
        self._check_room()
        workers = [threading.Thread(target=self._keep, args=(self._decode, n), daemon=True) for n in range(requests)]
        self._threads = [*workers, threading.Thread(target=self._keep, args=(self._stream, -1), daemon=True)]

    def __enter__(self) -> "Engine":
        for thread in self._threads:
            thread.start()
        self.until("token of the stream", lambda: len(self.labels) > 5)
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        with contextlib.suppress(OSError, AssertionError):
            self.call("/abort_request", {"rid": "", "abort_all": True})
        for thread in self._threads:
            thread.join(30)

    def until(self, what: str, look):
        """As ``until``, but a request that failed ends it at once."""

        def answer():
            assert self.failed is None, f"a request failed: {self.failed}"
            return look()

        return until(what, MOVED, answer)

    def call(self, path: str, body: dict | None = None) -> dict:
        with self._ask(path, body) as reply:
            text = reply.read()
        return json.loads(text) if text.startswith((b"{", b"[")) else {}

    def label(self) -> str:
        return self.call("/model_info")["weight_version"]

    def first_token(self) -> tuple[float, str]:
        """When a new request has its first token, and the label that it carries."""
        said = self.call("/generate", self._request(random.Random(), 1))
        return time.time(), said["meta_info"]["weight_version"]

    @contextlib.contextmanager
    def _ask(self, path: str, body: dict | None):
        connection = http.client.HTTPConnection(self._host, self._port, timeout=STARTED)
        try:
            text = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, text, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            assert reply.status == 200, (path, reply.status, reply.read()[:500])
            yield reply
        finally:
            connection.close()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException, AssertionError):
            self.call("/health")
            return True
        return False

    def _check_room(self) -> None:
        """A stream that is longer than the context hangs nothing: it is refused before anything is measured."""
        info = self.call("/server_info")
        room = info.get("max_req_input_len") or info.get("context_length") or 0
        assert not room or room >= PROMPT, f"{self.url} takes {room} tokens, and a prompt has {PROMPT}"
        self._longest = min(STREAMED, int(room * 0.9) - PROMPT) if room else ANSWER

    def _request(self, numbers: random.Random, tokens: int, **more) -> dict:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        prompt = [numbers.randrange(self._vocabulary) for _ in range(PROMPT)]
        return {"input_ids": prompt, "sampling_params": sampling, **more}

    def _keep(self, work, seed: int) -> None:
        numbers = random.Random(seed)
        while not self._stop.is_set() and self.failed is None:
            try:
                work(numbers)
            except Exception as error:
                if not self._stop.is_set():
                    self.failed = repr(error)

    def _decode(self, numbers: random.Random) -> None:
        self.call("/generate", self._request(numbers, min(ANSWER, self._longest)))

    def _stream(self, numbers: random.Random) -> None:
        with self._ask("/generate", self._request(numbers, self._longest, stream=True)) as reply:
            for line in reply:
                if self._stop.is_set():
                    return
                if line.startswith(b"data: {"):
                    said = json.loads(line.removeprefix(b"data: "))
                    self.labels.append((time.time(), said["meta_info"]["weight_version"]))


class Follower:
    """``driftless follow`` that acts alone, by patches or by loads."""

    def __init__(self, name: str, options: argparse.Namespace, work: Path, engine: str, *more: str) -> None:
        self.url, self.log = f"http://127.0.0.1:{free_port()}", work / f"{name}.log"
        command = [sys.executable, "-m", "driftless_rl", "follow", "--store", (work / "store").as_uri(), "--run", "run"]
        command += ["--id", name, "--checkpoint-dir", str(work / name), "--hf-checkpoint", str(options.checkpoint)]
        command += ["--listen", self.url.removeprefix("http://"), "--poll-ms", str(options.poll_ms), "--engine", engine]
        command += ["--pause-generation-mode", "in_place", *more]
        if options.plugin_dir:
            command += ["--plugin-dir", str(options.plugin_dir)]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def phases(self, version: int) -> dict | None:
        """What it tells of a version's way once an engine serves it; nothing, where it is of a release that does not."""
        parts = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=MOVED)
        connection.request("GET", "/status")
        told = json.loads(connection.getresponse().read())["applied"].get("phases")
        connection.close()
        if told is None:
            return {}
        return next((phases for phases in told if phases["version"] == version and "patch_ms" in phases), None)

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def moved(tensors: dict[str, torch.Tensor], density: float, seed: int) -> None:
    """Flips the last bit of about so many elements of each tensor."""
    for name, tensor in tensors.items():
        flat = tensor.view(-1).view(torch.int16)
        numbers = torch.Generator(device=tensor.device).manual_seed(hash((name, seed)) % 2**31)
        count = max(1, int(flat.numel() * density))
        at = torch.randint(0, flat.numel(), (count,), device=tensor.device, generator=numbers)
        flat[at] ^= 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Way:
    """A run whose newest version an engine serves, by one follower at a time."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self._options, self._work = options, work
        paths = sorted(options.checkpoint.glob("*.safetensors"))
        loaded = [pair for path in paths for pair in load_file(path).items()]
        self.tensors = {name: tensor.to(options.device) for name, tensor in loaded}
        settings = {"baseline_dir": work / "baseline", "hf_checkpoint": options.checkpoint, "profile": options.profile}
        self._publisher = driftless_rl.Publisher((work / "store").as_uri(), "run", **settings)
        self.version = self._publisher.publish(self.tensors).version

    def label(self) -> str:
        return f"{self._publisher.run_id[:12]}:{self.version}"

    def turn(self, engine: Engine, follower: Follower, density: float) -> dict[str, float]:
        """One version's way, in milliseconds from the call of ``publish``, a while after the one before."""
        time.sleep(self._options.apart)
        moved(self.tensors, density, self.version)
        began = time.time()
        self.version = self._publisher.publish(self.tensors).version
        times = {"manifest": time.time() - began}
        label = self.label()
        engine.until(f"engine with {label}, see {follower.log}", lambda: engine.label() == label)
        times["live"] = time.time() - began
        at, drawn_by = engine.first_token()
        assert drawn_by == label, (drawn_by, label)
        times["request"] = at - began
        stream = engine.until(f"streamed token of {label}", lambda: [at for at, by in engine.labels if by == label])
        times["stream"] = stream[0] - began
        times = {name: 1e3 * value for name, value in times.items()}
        answer = engine.until("phases", lambda: [told] if (told := follower.phases(self.version)) is not None else [])
        if phases := answer[0]:
            told = {name.removesuffix("_ms"): ms for name, ms in phases.items() if name.endswith("_ms")}
            noticed = told.pop("began_at") - 1e3 * began
            host = sum(ms for name, ms in told.items() if name not in ("copy", "patch"))
            times |= {"notice": noticed - times["manifest"], **told, "offered": noticed + host}
        return times

    def close(self) -> None:
        self._publisher.close()


def row(name: str, times: list[float]) -> None:
    print(f"  {name:<10} {min(times):9.1f} {statistics.median(times):9.1f} {max(times):9.1f}", flush=True)


def measure(options: argparse.Namespace, work: Path) -> dict[str, list[dict[str, float]]]:
    """The turns of each way, patched and loaded, which are printed as they come."""
    vocabulary = json.loads((options.checkpoint / "config.json").read_text())["vocab_size"]
    way, turns = Way(options, work), {}
    try:
        with Engine(options.engine, vocabulary, options.requests) as engine:
            for name, count, plugin in (("patched", options.turns, "require"), ("loaded", options.loads, "off")):
                if not count:
                    continue
                follower = Follower(name, options, work, engine.url, "--plugin", plugin)
                try:
                    engine.until(f"engine with {way.label()}, see {follower.log}", lambda: engine.label() == way.label())
                    # The first is no version like others: the codec, maps and the plugin's map are made for it.
                    turns[name] = [way.turn(engine, follower, options.density) for _ in range(count + 1)][1:]
                finally:
                    follower.end()
                print(f"{name}, {count} versions of density {options.density}; ms, least, median, most")
                for phase in turns[name][0]:
                    row(phase, [times[phase] for times in turns[name]])
    finally:
        way.close()
    live = {name: statistics.median(times["live"] for times in told) for name, told in turns.items()}
    if len(live) == 2:
        print(f"live, loaded / patched {live['loaded'] / live['patched']:.1f}", flush=True)
    return turns


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make")
    maker.add_argument("checkpoint", type=Path)
    maker.add_argument("--shape", choices=SHAPES, default="433m")
    maker.add_argument("--device", default="cpu", help="where it is drawn")
    runner = commands.add_parser("run")
    runner.add_argument("engine")
    runner.add_argument("checkpoint", type=Path)
    runner.add_argument("--work", type=Path, help="store, baseline and checkpoints; a new directory in /dev/shm")
    runner.add_argument("--plugin-dir", type=Path, help="the engine's, where it is not the default")
    runner.add_argument("--device", default="cpu", help="where the trainer's tensors lie")
    runner.add_argument("--density", type=float, default=0.01)
    runner.add_argument("--profile", default="fast")
    runner.add_argument("--turns", type=int, default=9)
    runner.add_argument("--loads", type=int, default=3)
    runner.add_argument("--requests", type=int, default=48)
    runner.add_argument("--poll-ms", type=int, default=5)
    runner.add_argument("--apart", type=float, default=2.0, help="seconds of learning between two versions")
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    if options.command == "make":
        return make(options.checkpoint, options.shape, options.device)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        measure(options, work)


if __name__ == "__main__":
    main()
