"""How long SGLang on a GPU is paused for a version while it decodes: patched by the plugin, and loaded.

    python benches/sglang_pause_gpu.py PORT WORK LOG OUT.json A B C [in_place:B:9 idle:B:7 in_place:C:9 preparing:B busy:B:5]

A server with the plugin listens on PORT, or will within minutes, has loaded the checkpoint A, and writes LOG. B and C
are checkpoints of the same shape with a few other elements, and a context of 8,192 tokens. A run in WORK goes from A to
B, or to C, and back, once for each turn. ``driftless follow`` brings a directory in WORK there and has the server
patched; its own figures are the pauses: of an engine that generates meanwhile, the time for which its scheduler stood
still. ``update_weights_from_disk`` is then all of its call. With MODE=retract in the environment the engine is paused. Three
turns also load what the server has just been patched to, by three calls.
Checksums of the weights of each rank are compared with those of a load after each patch.

Where the engine has several ranks, it replies when its first is done. What the plugin says of a patch is therefore read
of all ranks, and figures of it are those of the slowest; they are also in OUT by rank. A streamed token needs all.

48 requests decode meanwhile, and are renewed, and one is streamed: a gap is the time between two of its tokens. Beside
the gap of a patch stand those of a quiet second, of the time in which a version is published and fetched, and of a
request of one token, which takes a prefill. ``busy`` is ``in_place`` while every processor spins.
"""

import contextlib
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import driftless_rl
from driftless_rl._native import plugin_dir
from safetensors.torch import load_file

BATCH, PROMPT, VOCABULARY = int(os.environ.get("BATCH", 48)), 64, int(os.environ.get("VOCABULARY", 151936))
MODE = os.environ.get("MODE", "in_place")
# Loads in all: each takes seconds.
LOADS = 3
# Seconds of decoding that are compared, with and without a delta that is prepared, and how often.
WINDOW, WINDOWS = 8, 4
PLUGINS = plugin_dir()
# What the plugin of a rank says of a patch, in milliseconds.
TIMES = ("wrote_ms", "prepared_ms", "hook_ms")
# Seconds from the start of this until the server answers.
STARTED = 300


def until(what: str, seconds: float, look):
    end = time.monotonic() + seconds
    while not (answer := look()):
        assert time.monotonic() < end, f"no {what} within {seconds} s"
        time.sleep(0.002)
    return answer


class Http:
    """Calls on one connection, renewed before the server closes it."""

    def __init__(self, port: int) -> None:
        self.port, self.connection, self.used = port, None, 0.0

    def call(self, path: str, body: dict | None = None, method: str = "POST") -> dict:
        if self.connection is None or time.monotonic() - self.used > 3:
            self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        text = None if body is None else json.dumps(body)
        self.connection.request(method, path, text, {"Content-Type": "application/json"})
        reply = self.connection.getresponse()
        text, self.used = reply.read(), time.monotonic()
        assert reply.status == 200, (path, reply.status, text[:500])
        return json.loads(text) if text.startswith((b"{", b"[")) else {}


def request(tokens: int, prompt: list[int], **more) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, **more}


class Load:
    """Requests that decode, one of them streamed."""

    def __init__(self, port: int) -> None:
        self.port, self.stop = port, threading.Event()
        # When the streamed request had how many tokens; when other requests began.
        self.tokens: list[tuple[float, int]] = []
        self.began: list[float] = []
        self.failed: list[str] = []
        workers = [threading.Thread(target=self._generate, args=(n,), daemon=True) for n in range(BATCH)]
        self.threads = [*workers, threading.Thread(target=self._stream, daemon=True)]
        for thread in self.threads:
            thread.start()
        until("decoding", 180, lambda: len(self.tokens) > 50)
        time.sleep(2)

    def _generate(self, seed: int) -> None:
        client, numbers, length = Http(self.port), random.Random(seed), None
        while not self.stop.is_set():
            length = numbers.randint(64, 768) if length is None else 768
            prompt = [numbers.randrange(VOCABULARY) for _ in range(PROMPT)]
            self.began.append(time.perf_counter())
            try:
                client.call("/generate", request(length, prompt))
            except Exception as error:
                self._fail(error)

    def _stream(self) -> None:
        numbers, before = random.Random(99), 0
        while not self.stop.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
            prompt = [numbers.randrange(VOCABULARY) for _ in range(PROMPT)]
            try:
                body = json.dumps(request(4096 if VOCABULARY > 10000 else 256, prompt, stream=True))
                connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
                seen = 0
                for line in connection.getresponse():
                    if found := re.search(rb'"completion_tokens": ?(\d+)', line):
                        seen = int(found[1])
                        self.tokens.append((time.perf_counter(), before + seen))
                    if self.stop.is_set():
                        break
                before += seen
            except Exception as error:
                self._fail(error)
            connection.close()

    def _fail(self, error: Exception) -> None:
        if not self.stop.is_set():
            self.failed.append(repr(error))
            time.sleep(0.2)

    def steps(self, since: float, until: float) -> dict | None:
        """Decode steps a second, and how long one takes, in a window of time."""
        seen = [token for token in self.tokens if since <= token[0] <= until]
        if len(seen) < 5:
            return None
        gaps = sorted(1e3 * (b[0] - a[0]) for a, b in zip(seen, seen[1:]))
        rate = (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])
        return {"steps_per_s": rate, "median_ms": statistics.median(gaps), "p99_ms": gaps[int(len(gaps) * 0.99)]}

    def gap(self, began: float, ended: float) -> dict:
        """The longest gap that lies between two times in part, and how many requests began in it."""
        until("token after a pause", 60, lambda: self.tokens and self.tokens[-1][0] > ended + 0.1)
        near = [at for at, _ in self.tokens if began - 1 < at < ended + 1]
        gaps = [(b - a, a, b) for a, b in zip(near, near[1:]) if b > began and a < ended + 0.02]
        longest, a, b = max(gaps)
        return {"gap_ms": 1e3 * longest, "renewed": sum(a - 0.02 < at < b for at in self.began)}

    def gaps(self, since: float, until: float) -> list[tuple[float, bool]]:
        """Each gap of a window of time, in milliseconds, and whether a request began in it."""
        near = [at for at, _ in self.tokens if since <= at <= until]
        began = [at for at in self.began if since - 0.1 <= at <= until]
        return [(1e3 * (b - a), any(a - 0.02 < at < b for at in began)) for a, b in zip(near, near[1:])]

    def end(self) -> None:
        self.stop.set()
        Http(self.port).call("/abort_request", {"rid": "", "abort_all": True})
        for thread in self.threads:
            thread.join(30)
        assert not self.failed, self.failed[:3]


def percentiles(values: list[float]) -> str:
    """Median, 99th percentile and most of milliseconds."""
    if not values:
        return "none"
    values = sorted(values)
    picked = statistics.median(values), values[int(len(values) * 0.99)], values[-1]
    return "p50 {:.1f} p99 {:.1f} most {:.1f} of {}".format(*picked, len(values))


@contextlib.contextmanager
def spinning():
    """Every processor is wanted by a process that does nothing."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Bench:
    def __init__(self, port: int, work: Path, log: Path, out: Path, checkpoints: list[Path]) -> None:
        self.follow_log, self.loads = work / "follow.log", 0
        self.server, self.log, self.out = Http(port), log, out
        self.base, self.others = checkpoints[0], dict(zip("BC", checkpoints[1:]))
        self.results: dict = {"turns": [], "notes": []}
        self.store, self.work, self.version, self.at = (work / "store").as_uri(), work, 0, "A"
        command = [sys.executable, "-m", "driftless_rl"]
        store = ["--store", self.store, "--run", "run"]
        baseline = ["--baseline-dir", str(work / "baseline")]
        publish = [*command, "publish", *store, *baseline, "--new-run", "--by-reference", "--checkpoint", str(self.base)]
        subprocess.run(publish, check=True)
        self.publisher = driftless_rl.Publisher(
            self.store, "run", resume=True, baseline_dir=work / "baseline", hf_checkpoint=self.base, profile="fast"
        )
        self.tensors: dict[str, dict] = {}
        until("answer of the server", STARTED, self._serves)
        self.follow = 20000 + os.getpid() % 10000
        follow = [*command, "follow", *store, "--checkpoint-dir", str(work / "host"), "--hf-checkpoint", str(self.base)]
        follow += ["--engine", f"http://127.0.0.1:{port}", "--plugin", "require", "--pause-generation-mode", MODE]
        follow += ["--coordinated", "--listen", f"127.0.0.1:{self.follow}", "--poll-ms", "86400000"]
        self.command, self.environment = follow, {**os.environ, "RUST_LOG": "info,driftless_bridge=debug", "NO_COLOR": "1"}
        self.start_follower()

    def start_follower(self) -> None:
        with self.follow_log.open("w") as said:
            self.follower = subprocess.Popen(self.command, env=self.environment, stderr=said)
        until("follower", 120, self._follows)

    def _serves(self) -> bool:
        try:
            self.server.call("/health", method="GET")
            return True
        except (OSError, http.client.HTTPException, AssertionError):
            # A connection that was refused is not used again.
            self.server.connection = None
            time.sleep(0.2)
            return False

    def _follows(self) -> bool:
        assert self.follower.poll() is None
        try:
            return bool(Http(self.follow).call("/status", method="GET"))
        except OSError:
            return False

    def follows(self, path: str) -> dict:
        def answer() -> dict | None:
            try:
                return Http(self.follow).call(path, method="POST" if path != "/status" else "GET")
            except AssertionError as error:
                # It is busy with a round of its own.
                if error.args[0][1] != 409:
                    raise
                return None

        return until(f"answer of {path}", 120, answer)

    def label(self) -> str:
        return f"{self.publisher.run_id[:12]}:{self.version}"

    def step(self, to: str) -> dict:
        """The next version is published, on disk, and prepared by the plugin."""
        if to not in self.tensors:
            paths = sorted((self.base if to == "A" else self.others[to]).glob("*.safetensors"))
            self.tensors[to] = {name: tensor for path in paths for name, tensor in load_file(path).items()}
        times = [time.perf_counter()]
        self.version = self.publisher.publish(self.tensors[to]).version
        times.append(time.perf_counter())
        self.follows("/prepare")
        times.append(time.perf_counter())
        self.at = to
        self.prepared()
        times.append(time.perf_counter())
        return dict(zip(("publish_s", "follow_s", "wait_s"), (b - a for a, b in zip(times, times[1:]))))

    def prepared(self) -> None:
        def look() -> bool:
            files = [json.loads(path.read_text()) for path in PLUGINS.glob("rank-*.json")]
            told = [told for file in files for told in file["deltas"].values() if told["target"] == self.label()]
            assert not any(entry["why_not"] for entry in told), told
            return len(told) == len(files) == self.ranks

        until("prepared delta", 60, look)

    def sums(self) -> list:
        """A checksum of all weights of each rank."""
        return [rank["per_gpu_checksum"] for rank in self.server.call("/weights_checker", {"action": "checksum"})["ranks"]]

    def said(self) -> list[dict]:
        """What the plugin of each rank said of the live patch."""
        line = re.compile(rf'(?:TP(\d+)\] )?driftless: (\{{"patched":"{re.escape(self.label())}".*\}})')

        def all_ranks() -> list[tuple] | None:
            found = line.findall(self.log.read_text(errors="replace"))
            assert len(found) <= self.ranks, found
            return found if len(found) == self.ranks else None

        return [
            {
                **{"rank": int(rank or 0), "elements": said["elements"], "cache": said["cache"]},
                **{name: said[key] / 1e3 for name, key in zip(TIMES, ("wrote_us", "prepared_us", "stood_still_us"))},
            }
            for rank, text in sorted(until("word of every rank", 60, all_ranks))
            for said in (json.loads(text),)
        ]

    def load(self) -> float:
        """Milliseconds that a load of the live version takes, by three calls."""
        # The follower writes its directory behind the patch.
        written = re.compile(rf"overwritten .*version={self.version}\b")
        until("written directory", 120, lambda: written.search(self.follow_log.read_text()))
        update = {"model_path": str(self.work / "host"), "weight_version": self.label(), "flush_cache": False}
        began = time.perf_counter()
        self.server.call("/pause_generation", {"mode": "in_place"})
        told = self.server.call("/update_weights_from_disk", update)
        self.server.call("/continue_generation", {"torch_empty_cache": False})
        assert "patched" not in told["message"], told
        return 1e3 * (time.perf_counter() - began)

    def patch(self, to: str, load: Load | None, beside: contextlib.AbstractContextManager) -> dict:
        turn = {"to": to, **self.step(to)}
        said = len(self.follow_log.read_text())
        with beside:
            began = time.perf_counter()
            [engine] = self.follows("/activate")["applied"]["engines"]
            ended = time.perf_counter()
        assert engine["label"] == self.label(), engine
        turn["pause_ms"] = engine["pause_ms"]
        turn["calls"] = self.calls(said)
        if load is not None:
            turn.update(load.gap(began, ended))
        turn["by_rank"] = said = self.said()
        turn["cache"] = "/".join(sorted({rank["cache"] for rank in said}))
        # An element is counted by each rank that has a part of its tensor.
        turn.update({name: max(rank[name] for rank in said) for name in ("elements", *TIMES)})
        turn["equal"] = self.sums() == self.results["sums"][to]
        assert turn["equal"], turn
        return turn

    def calls(self, said: int) -> list[tuple[str, float]]:
        """The calls of an activation, from the first that changes something on, and their milliseconds. The follower had
        said so much before."""
        found = re.findall(r'call="/([\w/?=]+)" status=\d+ ms=([\d.]+)', self.follow_log.read_text()[said:])
        calls = [(path, round(float(ms), 2)) for path, ms in found]
        changes = ("pause_generation", "update_weights_from_disk")
        return calls[next(n for n, (path, _) in enumerate(calls) if path in changes) :]

    def token(self, load: Load) -> dict:
        """The gap that a request of one token makes, which an activation would ask for."""
        began = time.perf_counter()
        self.server.call("/generate", request(1, [0]))
        gap = load.gap(began, time.perf_counter())
        return {"token_gap_ms": gap["gap_ms"]}

    def truth(self) -> None:
        """Checksums of each version, of a load."""
        self.follows("/prepare")
        self.follows("/activate")
        self.results["sums"] = {"A": self.sums()}
        self.ranks = self.results["ranks"] = len(self.results["sums"]["A"])
        for to in self.others:
            update = {"model_path": str(self.others[to]), "weight_version": "other", "flush_cache": False}
            self.server.call("/update_weights_from_disk", update)
            self.results["sums"][to] = self.sums()
        self.server.call("/update_weights_from_disk", {"model_path": str(self.base), "weight_version": self.label()})
        assert self.sums() == self.results["sums"]["A"]
        assert len({str(sums) for sums in self.results["sums"].values()}) == len(self.results["sums"])

    def block(self, name: str, other: str, turns: int) -> None:
        load = Load(self.server.port) if name != "idle" else None
        rows, loads, quiet, publishing = [], [], [], []
        for number in range(turns):
            began = time.perf_counter()
            beside = spinning() if name == "busy" else contextlib.nullcontext()
            row = self.patch(other if self.at == "A" else "A", load, beside)
            rows.append(row)
            if load:
                published = began + row["publish_s"] + row["follow_s"] + row["wait_s"]
                publishing += load.gaps(began, published)
                # The files are written now, and then nothing happens.
                time.sleep(1.5)
                now = time.perf_counter()
                quiet += load.gaps(now - 1, now)
                row.update(self.token(load))
            if number % 2 and self.loads < LOADS and name != "busy":
                self.loads += 1
                row["load_ms"] = self.load()
                loads.append(row["load_ms"])
                time.sleep(0.5)
            shown = {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}
            print(f"  {name}:{other} {shown}", flush=True)
            self.results["turns"].append({"block": f"{name}:{other}", **row})
            self.save()
        text = f"{name}:{other} n={turns}"
        figures = ("pause_ms", "hook_ms", "wrote_ms", "prepared_ms", "gap_ms", "token_gap_ms")
        for key in (*figures, "publish_s", "follow_s", "wait_s"):
            if values := sorted(row[key] for row in rows if key in row):
                text += f"\n  {key:12} least {values[0]:.2f} median {statistics.median(values):.2f} most {values[-1]:.2f}"
        for call in dict.fromkeys(path for row in rows for path, _ in row["calls"]):
            if values := sorted(ms for row in rows for path, ms in row["calls"] if path == call):
                text += f"\n  {call} least {values[0]:.2f} median {statistics.median(values):.2f} most {values[-1]:.2f}"
        if loads:
            ratio = statistics.median(loads) / statistics.median(row["pause_ms"] for row in rows)
            text += f"\n  load_ms      median {statistics.median(loads):.0f} of {len(loads)}; ratio {ratio:.0f}"
        if quiet:
            step = statistics.median(ms for ms, _ in quiet)
            text += f"\n  gap of a patch in steps of {step:.1f} ms: {sorted(round(row['gap_ms'] / step, 1) for row in rows)}"
            alone = sorted(round(row["gap_ms"] / step, 1) for row in rows if not row["renewed"])
            text += f"\n  without a request that began: {alone}"
            for what, gaps in (("quiet", quiet), ("publishing", publishing)):
                text += f"\n  gaps, {what}: {percentiles([ms for ms, _ in gaps])}"
                text += f"; with a request that began: {percentiles([ms for ms, renewed in gaps if renewed])}"
        if load:
            load.end()
        print(text, flush=True)
        self.results["notes"].append(text)
        self.save()

    def preparing(self, other: str) -> None:
        """Decoding while one delta is prepared again and again, and without."""
        load = Load(self.server.port)
        if self.at not in ("A", other):
            self.patch("A", load, contextlib.nullcontext())
        self.step(other if self.at == "A" else "A")
        [delta] = PLUGINS.glob("delta-*")
        for _ in range(WINDOWS):
            began = time.perf_counter()
            time.sleep(WINDOW)
            quiet = load.steps(began, time.perf_counter())
            began, count, names = time.perf_counter(), 0, (delta, delta.with_name("delta-0000000000000000"))
            while time.perf_counter() - began < WINDOW:
                names[0].rename(names[1])
                names, count = names[::-1], count + 1
                time.sleep(0.04)
            busy = load.steps(began, time.perf_counter())
            text = f"preparing:{other} about {count} times in {WINDOW} s: quiet {quiet}, preparing {busy}"
            print(text, flush=True)
            self.results["notes"].append(text)
            if names[0] != delta:
                names[0].rename(delta)
        time.sleep(0.2)
        self.prepared()
        [engine] = self.follows("/activate")["applied"]["engines"]
        assert engine["label"] == self.label() and self.sums() == self.results["sums"][self.at]
        load.end()
        self.save()

    def save(self) -> None:
        self.out.write_text(json.dumps(self.results))


def main(port: str, work: str, log: str, out: str, a: str, b: str, c: str, *blocks: str) -> None:
    Path(work).mkdir(parents=True, exist_ok=True)
    bench = Bench(int(port), Path(work), Path(log), Path(out), [Path(a), Path(b), Path(c)])
    try:
        bench.truth()
        for block in blocks or ("in_place:B:9", "idle:B:7", "in_place:C:9", "preparing:B", "busy:B:5"):
            name, other, *turns = block.split(":")
            began = time.monotonic()
            if name == "preparing":
                bench.preparing(other)
            else:
                bench.block(name, other, int(turns[0]))
            print(f"[{block}: {time.monotonic() - began:.0f} s]", flush=True)
    finally:
        bench.follower.terminate()
        bench.follower.wait(60)
        bench.save()


if __name__ == "__main__":
    main(*sys.argv[1:])
