"""The prefix cache of an unmodified SGLang on the CPU that the plugin patches while requests hold it."""

import functools
import json
import os.path
import random
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import driftless_rl
import pytest
import torch
from conftest import Store
from driftless_rl.sglang import _hooks, _versioned
from servers import MOVED, until
from sglang_engine import STAND_INS, Sglang
from sglang_models import VOCABULARY, make

on_sglang = pytest.mark.skipif(not STAND_INS, reason="DRIFTLESS_SGLANG_PYTHONPATH is not set")
# Requests that run at once; the next one waits.
AT_ONCE = 2


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def ask(server: Sglang, prompt: list[int], count: int = 1, **further) -> dict:
    """What a server says of a prompt. The log-probabilities are of its last tokens and of the next one: those of more would
    keep it from using its cache."""
    body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": len(prompt) - 8, **further}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    said = server.call("/generate", body)
    return said["meta_info"] | {"output_ids": said["output_ids"]}


class Scene:
    """A server whose weights a follower patches in place, version by version to others whose cache is nothing alike."""

    def __init__(self, root, forks) -> None:
        store, self.host = Store(root), root / "host"
        self.tensors = make(root / "base", "untied", 1)
        self.server = Sglang(root, root / "base", forks=forks, further=["--max-running-requests", str(AT_ONCE)])
        self.publisher = driftless_rl.Publisher(
            store.url, "run", baseline_dir=store.baseline, hf_checkpoint=root / "base"
        )
        self.publisher.publish(self.tensors)
        self.version, self.threads = self.publisher.version, ThreadPoolExecutor(8)
        self.logs = [self.server.log, root / "follower.log"]
        command = [sys.executable, "-m", "driftless_rl", "follow", "--store", store.url, "--run", "run", "--poll-ms", "50"]
        command += ["--checkpoint-dir", str(self.host), "--hf-checkpoint", str(root / "base"), "--plugin", "require"]
        command += ["--engine", self.server.url, "--plugin-dir", str(self.server.plugins)]
        with self.logs[1].open("w") as log:
            mode = ["--pause-generation-mode", "in_place"]
            self.follower = subprocess.Popen([*command, *mode], stdout=log, stderr=log)
        self.serves()

    def label(self) -> str:
        return f"{self.publisher.run_id[:12]}:{self.version}"

    def serves(self) -> None:
        label = self.label()
        until(f"server with {label}", MOVED, lambda: self.server.label() == label, self.logs)

    def patch(self) -> None:
        """To a version with other keys and values."""
        patched, drawn = self.server.patched(), torch.Generator().manual_seed(self.version)
        for name, tensor in self.tensors.items():
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                self.tensors[name] = torch.empty_like(tensor).normal_(0.0, 0.2, generator=drawn)
        self.version += 1
        self.publisher.publish(self.tensors)
        self.serves()
        assert self.server.patched() == patched + 1

    def wait_written(self) -> None:
        """The follower writes its directory behind the patch."""
        state = self.host / ".driftless/state.json"
        until("written directory", MOVED, lambda: json.loads(state.read_text())["applied"]["version"] == self.version)

    def ask(self, *args, **further) -> dict:
        return ask(self.server, *args, **further)

    def begin(self, prompt: list[int], name: str) -> Future:
        """A request that runs until it is ended. Two of these have room in the cache."""
        running = self.count("running")
        begun = self.threads.submit(self.ask, prompt, 3000, rid=name)
        until("running request", MOVED, lambda: self.count("running") > running)
        return begun

    def finish(self, begun: Future, name: str) -> dict:
        assert not begun.done()
        self.server.call("/abort_request", {"rid": name})
        return begun.result(MOVED)

    def count(self, state: str) -> int:
        return self.server.call("/v1/loads")["loads"][0][f"num_{state}_reqs"]

    def computed(self) -> int:
        """Batches of prompts."""
        return self.server.log.read_text().count("Prefill batch")

    def end(self) -> None:
        self.follower.terminate()
        self.follower.wait(MOVED)
        self.server.end()
        self.publisher.close()


def log_probs(said: dict) -> list[float]:
    made = [value for value, *_ in said["input_token_logprobs"] + said["output_token_logprobs"] if value is not None]
    assert len(made) >= 8
    return made


@pytest.fixture(scope="module")
def scene(tmp_path_factory, forks):
    made = Scene(tmp_path_factory.mktemp("cache"), forks)
    yield made
    made.end()


@on_sglang
def test_no_prefix_of_older_weights_is_reused(scene, forks, tmp_path):
    waited, later, own = (tokens(seed, 300) for seed in range(3))
    for prompt in (waited, later, own):
        scene.ask(prompt)
        assert scene.ask(prompt)["cached_tokens"] >= 280
    # They hold the cache: it cannot be dropped.
    running, place = scene.begin(own, "running"), scene.begin(tokens(3, 10), "place")
    waiting = scene.threads.submit(scene.ask, waited)
    until("waiting request", MOVED, lambda: scene.count("waiting") == 1)
    scene.patch()
    assert not waiting.done()
    scene.finish(place, "place")
    said = {"waited": waiting.result(MOVED), "later": scene.ask(later)}
    assert {name: one["cached_tokens"] for name, one in said.items()} == {"waited": 0, "later": 0}
    assert scene.ask(waited)["cached_tokens"] >= 280, "that of its own version is"

    # What ran goes on with its own cache, of which nobody else finds anything.
    first = scene.finish(running, "running")
    assert len(first["weight_versions"]) == 2
    own += first["output_ids"]
    assert len(own) > 310
    assert scene.ask(own)["cached_tokens"] == 0
    assert scene.ask(own)["cached_tokens"] >= len(own) - 20

    # Both are what a fresh server says, which has loaded the version.
    scene.wait_written()
    fresh = Sglang(tmp_path, scene.host, forks=forks)
    try:
        loaded = {"waited": ask(fresh, waited), "later": ask(fresh, later)}
    finally:
        fresh.end()
    assert {name: one["cached_tokens"] for name, one in loaded.items()} == {"waited": 0, "later": 0}
    assert {name: log_probs(one) for name, one in said.items()} == {name: log_probs(one) for name, one in loaded.items()}


@on_sglang
def test_what_is_retracted_is_computed_by_the_new_weights(scene):
    prompt = tokens(4, 300)
    running = scene.begin(prompt, "running")
    scene.patch()
    scene.server.call("/pause_generation", {"mode": "retract"})
    computed = scene.computed()
    scene.server.call("/continue_generation", {})
    until("prompt that is computed again", MOVED, lambda: scene.computed() > computed)
    scene.finish(running, "running")
    said = scene.ask(prompt)
    assert said["cached_tokens"] >= 280
    scene.wait_written()
    scene.server.load(scene.host, scene.label())
    assert log_probs(said) == pytest.approx(log_probs(scene.ask(prompt)), abs=0.05)


def spans(labels: list[str | None]) -> list[tuple]:
    """What the plugin told of each token, as SGLang tells it."""
    found = []
    for at, label in enumerate(labels):
        if label in ("", None) and found:
            found[-1][2] = at + 1
        else:
            found.append([label, at, at + 1])
    return [tuple(span) for span in found]


@on_sglang
def test_each_token_names_the_weights_that_drew_it(scene):
    """On a processor no step is under way while weights change, and SGLang's own spans are exact."""
    said = scene.ask(tokens(6, 20), count=3)
    assert said["driftless_labels"] == [scene.label(), "", ""]
    running, drawn = scene.begin(tokens(7, 20), "spans"), [scene.label()]
    for _ in range(3):
        scene.patch()
        drawn.append(scene.label())
    said = scene.finish(running, "spans")
    assert spans(said["driftless_labels"]) == [(span["version"], span["start"], span["end"]) for span in said["weight_versions"]]
    assert [label for label, *_ in spans(said["driftless_labels"])] == drawn
    assert len(said["driftless_labels"]) == len(said["output_ids"])
    assert "driftless_labels" not in scene.server.call("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}})["meta_info"]


@on_sglang
def test_prefixes_of_one_version_are_all_reused(scene):
    """As many as without the plugin's key: all that earlier requests have computed."""
    kept, cached, shared = [], 0, 0
    system, asked = tokens(5, 100), []
    for group in range(4):
        prompt = system + tokens(10 + group, 60)
        asked += [prompt, prompt, prompt, prompt + tokens(20 + group, 40)]
    scene.patch()
    for prompt in asked:
        said = scene.ask(prompt, count=4)
        cached += said["cached_tokens"]
        shared += max((min(len(os.path.commonprefix([prompt, one])), len(prompt) - 8) for one in kept), default=0)
        kept.append(prompt + said["output_ids"][:-1])
    print(f"{cached} of {sum(map(len, asked))} tokens were cached, at most {shared}")
    assert 0 < 0.98 * shared <= cached
    # A client's own key separates still.
    assert scene.ask(asked[0], extra_key="mine")["cached_tokens"] == 0
    assert scene.ask(asked[0], extra_key="mine")["cached_tokens"] >= 150
    assert scene.ask(asked[0], extra_key="theirs")["cached_tokens"] == 0


class Req:
    """A request as SGLang has it, as far as keys go."""

    def __init__(self, rid, extra_key=None, session=None) -> None:
        self.rid, self.extra_key, self.session = rid, extra_key, session
        self.kv = SimpleNamespace(holds_kv=False)

    def init_next_round_input(self, tree_cache=None) -> None:
        """It looks for its prefix."""


@pytest.fixture
def keys(monkeypatch):
    """The plugin's, hooked into these requests, in an engine whose weights have changed once."""

    class Registry:
        @staticmethod
        def register(name, hook, kind):
            original = getattr(Req, name.rpartition(".")[2])

            @functools.wraps(original)
            def hooked(*args, **kwargs):
                result = hook(*args, **kwargs) if kind == "before" else original(*args, **kwargs)
                return original(*args, **kwargs) if kind == "before" else hook(result, *args, **kwargs)

            monkeypatch.setattr(Req, original.__name__, hooked)

    monkeypatch.setattr(_versioned, "_weights", _versioned._Weights())
    for name in ("_MADE", "_ADMITTED"):
        (function,), parameters = getattr(_versioned, name)
        monkeypatch.setattr(_versioned, name, ((f"{__name__}.Req.{function.rpartition('.')[2]}",), parameters))
    _versioned.register(Registry, SimpleNamespace(BEFORE="before", AFTER="after"))
    assert _versioned.begin(SimpleNamespace()) is None
    assert Req(1, "mine").extra_key == "mine" and Req(1).extra_key is None, "nothing of older weights is there"
    _versioned.changes()
    return _versioned


def test_request_takes_the_key_of_the_weights_when_admitted(keys):
    first, other = Req(1), Req(2, "mine")
    assert other.extra_key == first.extra_key + "mine" != "mine"
    # What the engine adds stays, and what another one has is the same.
    other.extra_key += "|size=2"
    # Somebody else writes to the weights.
    _hooks._changed(SimpleNamespace(model=None))
    kept = first.extra_key
    assert Req(3).extra_key not in (kept, None)
    # The next part of a prompt, and a request that has a cache.
    first.init_next_round_input()
    first.kv.holds_kv = True
    first.init_next_round_input(object())
    assert first.extra_key == kept
    # It was retracted.
    first.kv.holds_kv = False
    first.init_next_round_input(object())
    other.init_next_round_input(object())
    assert (first.extra_key, other.extra_key) == (Req(3).extra_key, Req(3).extra_key + "mine|size=2")


def test_request_of_a_release_with_less_is_keyed_too(keys):
    request = Req(1)
    keys.changes()
    request.kv = object()
    request.init_next_round_input(object())
    assert request.extra_key != Req(2).extra_key, "it has a cache"
    request.kv = None
    request.init_next_round_input(object())
    assert request.extra_key == Req(2).extra_key


def test_session_that_keeps_its_cache_keeps_its_key(keys):
    class Session:
        streaming = True

    session, other = Session(), Session()
    first = Req(1, session=session).extra_key
    keys.changes()
    assert Req(2, session=session).extra_key == first != Req(3, session=other).extra_key


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"tree": "1"}, "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"),
        ({"made": "old"}, "has no extra_key"),
        ({"made": None}, "there is no"),
        ({"hooked": False}, "is not hooked"),
    ],
)
def test_engine_that_cannot_be_keyed_says_why(options, why, keys, monkeypatch):
    if "tree" in options:
        monkeypatch.setenv("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", options["tree"])
    if "made" in options:
        monkeypatch.setattr(Req, "__init__", lambda self, rid: None)
    if options.get("made", "") is None:
        monkeypatch.setattr(_versioned, "_MADE", ((f"{__name__}.Req.gone",), ("self",)))
    if "hooked" in options:
        monkeypatch.setattr(Req, "init_next_round_input", lambda self, tree_cache: None)
    assert why in keys.begin(SimpleNamespace(**options))
    assert not keys.keyed()
