"""The plugin in an unmodified SGLang on the CPU, patched by a real follower."""

import asyncio
import json
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import driftless_rl
import pytest
from conftest import Store, read_checkpoint
from servers import MOVED, Forks, free_port, until
from sglang_engine import STAND_INS, Sglang
from sglang_models import make, step

pytestmark = pytest.mark.skipif(not STAND_INS, reason="DRIFTLESS_SGLANG_PYTHONPATH is not set")


class Scene:
    """A run, a server on its base, and a directory of versions beside it. Tests of one model share it."""

    def __init__(self, store: Store, root: Path, kind: str, ranks: int = 1, forks: Forks | None = None) -> None:
        self.store, self.base, self.host = store, root / "base", root / "host"
        self.tensors = make(self.base, kind, 1)
        self.server = Sglang(root, self.base, ranks, forks)
        self.logs = [self.server.log, root / "follower.log"]
        self.publisher = self.begin(baseline_dir=store.baseline, hf_checkpoint=self.base)
        self.version = self.publisher.version

    def begin(self, **settings) -> driftless_rl.Publisher:
        publisher = driftless_rl.Publisher(self.store.url, "run", **settings)
        publisher.publish(self.tensors)
        return publisher

    def next(self, density: float) -> dict:
        return step(self.tensors, self.version, density)

    def publish(self, density: float) -> None:
        self.version += 1
        print(f"version {self.version}: seed {self.version}, density {density}")
        self.tensors = self.next(density)
        self.publisher.publish(self.tensors)

    def label(self) -> str:
        return f"{self.publisher.run_id[:12]}:{self.version}"

    def serves(self, label: str) -> None:
        until(f"server with {label}", MOVED, lambda: self.server.label() == label, self.logs)

    def wait_written(self) -> None:
        """The follower writes its directory behind the patch."""
        state = self.host / ".driftless/state.json"
        until("written directory", MOVED, lambda: json.loads(state.read_text())["applied"]["version"] == self.version)

    def assert_as_loaded(self) -> None:
        """The weights are those that SGLang loads from the directory."""
        self.wait_written()
        before = self.server.state()
        self.server.load(self.host, self.server.label())
        assert self.server.state() == before

    def end(self) -> None:
        self.server.end()
        self.publisher.close()


class HeadedScene(Scene):
    """A tied model whose run has the head, which the server was not started with: its first config did not tie it."""

    def begin(self, **settings) -> driftless_rl.Publisher:
        self.tensors = self.with_head(self.tensors)
        untied = json.loads((self.base / "config.json").read_text()) | {"tie_word_embeddings": False}
        with driftless_rl.Publisher(self.store.url, "run", files={"config.json": json.dumps(untied).encode()}, **settings) as first:
            first.publish(self.tensors)
        return super().begin(resume=True, **settings)

    def next(self, density: float) -> dict:
        return self.with_head(super().next(density))

    def with_head(self, tensors: dict) -> dict:
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}


@pytest.fixture(scope="module")
def scenes():
    started = {}
    yield started
    for scene in started.values():
        scene.end()


@pytest.fixture
def scene(scenes, tmp_path_factory, request):
    """That of the model which a test names. A server takes longer to start than all that is done with it."""
    if request.param not in scenes:
        root = tmp_path_factory.mktemp(request.param)
        # One of them starts as users start theirs.
        forks = None if request.param == "tied" else request.getfixturevalue("forks")
        scenes[request.param] = Scene(Store(root), root, request.param, forks=forks)
    return scenes[request.param]


@pytest.fixture
def follow(request):
    """Starts ``driftless follow`` with further options, for the test's scene."""
    started = []

    def start(*options: str, scene: Scene | None = None, stdout=None) -> subprocess.Popen:
        scene = scene or request.getfixturevalue("scene")
        command = [sys.executable, "-m", "driftless_rl", "follow", "--store", scene.store.url, "--run", "run"]
        command += ["--checkpoint-dir", str(scene.host), "--hf-checkpoint", str(scene.base), "--poll-ms", "50"]
        command += ["--engine", scene.server.url, "--plugin-dir", str(scene.server.plugins), *options]
        with scene.logs[1].open("a") as log:
            started.append(subprocess.Popen(command, start_new_session=True, stdout=stdout, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize(("scene", "mode"), [("tied", "in_place"), ("untied", "retract")], indirect=["scene"])
def test_each_version_is_patched_and_equals_a_load(scene, mode, follow):
    follow("--plugin", "require", "--pause-generation-mode", mode)
    scene.serves(scene.label())
    assert scene.server.patched() == 0, "the first version is loaded"
    paused = scene.server.paused()
    # The last one is proved by the follower: it compares all checksums of what was patched.
    for count, density in enumerate((0.001, 0.01, 0.1, 0.02, 0.0, 0.05, 0.2, 0.003, 0.08, 0.015) * 5 + (0.01,), 1):
        scene.publish(density)
        scene.serves(scene.label())
        assert scene.server.patched() == count
        if mode == "in_place":
            assert scene.server.versioned() == count
            assert scene.server.paused() == paused or count > 50
        sums = scene.server.sums()
        if count % 10 == 1:
            scene.assert_as_loaded()
        else:
            scene.wait_written()
            scene.server.load(scene.host, scene.label())
        assert scene.server.sums() == sums


def test_ranks_are_patched_together_while_they_generate(scenes, tmp_path_factory, follow, forks):
    root = tmp_path_factory.mktemp("ranks")
    scene = scenes["ranks"] = HeadedScene(Store(root), root, "tied", ranks=2, forks=forks)
    follow("--plugin", "require", "--pause-generation-mode", "in_place", scene=scene)
    scene.serves(scene.label())
    paused = scene.server.paused()
    for count, density in enumerate((0.01, 0.1, 0.001), 1):
        with scene.server.generating():
            scene.publish(density)
            scene.serves(scene.label())
        assert (scene.server.patched(), scene.server.paused()) == (2 * count, paused)
        first, second = scene.server.sums()
        assert first != second, "each rank has its part"
        scene.assert_as_loaded()
    assert "lm_head.weight" in read_checkpoint(scene.host)


@pytest.mark.parametrize("scene", ["untied"], indirect=True)
def test_what_cannot_be_patched_is_loaded(scene, follow):
    port = free_port()
    follow("--plugin", "require", "--coordinated", "--listen", f"127.0.0.1:{port}")

    def post(path: str) -> None:
        """Has the follower do it, once it is not busy."""

        def done() -> bool:
            call = urllib.request.Request(f"http://127.0.0.1:{port}{path}", b"", method="POST")
            try:
                urllib.request.urlopen(call, timeout=MOVED).close()
            except urllib.error.HTTPError as error:
                assert error.code == 409, (path, error.code, error.read())
                return False
            return True

        until(path, MOVED, done)

    def prepare() -> None:
        scene.publish(0.02)
        post("/prepare")

    def told(why_not: str | None) -> None:
        def look() -> bool:
            deltas = scene.server.told()["deltas"].values()
            mine = [told["why_not"] for told in deltas if told["target"] == scene.label()]
            return any(why == why_not if why_not is None or why is None else why_not in why for why in mine)

        until(f"rank that says {why_not}", MOVED, look)

    until("follower", MOVED, lambda: _answers(port))
    prepare()
    post("/activate")
    assert scene.server.label() == scene.label()
    patched = scene.server.patched()

    # Patched, with a torn file of another checkpoint directory beside it.
    prepare()
    [offer] = scene.server.plugins.glob("delta-*")
    offer.with_name("delta-0123456789abcdef").write_bytes(offer.read_bytes()[:-1])
    told(None)
    post("/activate")
    assert (scene.server.label(), scene.server.patched()) == (scene.label(), patched + 1)
    scene.assert_as_loaded()

    # Weights that changed after the delta was prepared: written in part, taken back, loaded.
    prepare()
    told(None)
    scene.server.call("/weights_checker", {"action": "reset_tensors"})
    post("/activate")
    assert (scene.server.label(), scene.server.patched()) == (scene.label(), patched + 1)
    assert "the old values of the delta" in scene.server.log.read_text()
    scene.assert_as_loaded()

    # Weights of another version under the base's label.
    scene.server.load(scene.base, scene.label())
    prepare()
    told("those of")
    post("/activate")
    assert (scene.server.label(), scene.server.patched()) == (scene.label(), patched + 1)
    scene.assert_as_loaded()

    # And on from there.
    prepare()
    told(None)
    post("/activate")
    assert (scene.server.label(), scene.server.patched()) == (scene.label(), patched + 2)
    scene.assert_as_loaded()


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("scene", ["moe"], indirect=True)
def test_family_that_no_table_knows_is_patched_and_compared(scene, follow, tmp_path):
    """By the plugin's own map, since nobody here knows its checksums."""
    lines = tmp_path / "lines"
    with lines.open("w") as shown:
        follow("--plugin", "require", "--compare", "require", "--engine-sample-ms", "100", stdout=shown)
    scene.serves(scene.label())
    assert scene.server.patched() == 0
    for count in range(1, 4):
        scene.publish(0.02)
        scene.serves(scene.label())
        assert scene.server.patched() == count
        scene.assert_as_loaded()
    until("line of each version", MOVED, lambda: len(lines.read_text().splitlines()) == 4)
    first, *others = lines.read_text().splitlines()
    assert ", loaded in " in first and all(", patched in " in line for line in others)
    assert "not compared" not in lines.read_text()
    # Somebody else has it load other weights, and the label stays. They are found, and loaded over.
    scene.server.call("/update_weights_from_disk", {"model_path": str(scene.base), "flush_cache": False})
    assert scene.server.label() == scene.label()
    until("foreign weights", MOVED, lambda: scene.server.compare(scene.host, scene.label())["count"] == 0)
    scene.assert_as_loaded()


@pytest.mark.parametrize("scene", ["untied", "moe"], indirect=True)
def test_comparison_names_what_somebody_else_loaded(scene, tmp_path):
    server, host = scene.server, tmp_path / "host"
    assert server.told()["compares"]
    follower = driftless_rl.Follower(
        scene.store.url, "run", host, hf_checkpoint=scene.base, plugin_dir=server.plugins
    )
    with follower:
        follower.advance()
        server.load(host, scene.label())
        patched, first = server.patched(), scene.label()
        assert server.compare(host, first)["count"] == 0, "a load"
        scene.publish(0.02)
        follower.advance()
        label = scene.label()
        until("prepared delta", MOVED, lambda: (label, None) in told(server))
        server.load(host, label)
        assert server.patched() == patched + 1
        serving, sums = server.call("/model_info"), server.sums()
        with server.generating():
            assert server.compare(host, label)["count"] == 0, "a patch"
            assert server.compare(host, label, sample=7)["count"] == 0
        assert (server.call("/model_info"), server.sums()) == (serving, sums)
        # Somebody else has it load other weights: the label stays.
        server.call("/update_weights_from_disk", {"model_path": str(scene.base), "flush_cache": False})
        assert server.label() == label
        for sample in (None, 0, 1):
            found = server.compare(host, label, sample)
            assert found["count"] > 5 and set(found["first"]) <= scene.tensors.keys()
        server.load(host, label)
        assert server.compare(host, label)["count"] == 0


@pytest.mark.parametrize("scene", ["untied"], indirect=True)
def test_updates_that_meet_are_answered_one_by_one(scene, tmp_path):
    """SGLang alone ends when the plugin's request meets another one: it keeps one answer."""
    server, host = scene.server, tmp_path / "host"
    with driftless_rl.Follower(scene.store.url, "run", host, hf_checkpoint=scene.base) as follower:
        follower.advance()
    label = scene.label()
    with ThreadPoolExecutor(12) as threads:
        server.call("/pause_generation", {"mode": "retract"})
        load = {"model_path": str(host), "weight_version": label, "flush_cache": False}
        loads = [threads.submit(server.call, "/update_weights_from_disk", load) for _ in range(4)]
        compared = [threads.submit(server.compare, host, label) for _ in range(8)]
        assert all(load.result()["success"] for load in loads)
        assert {found.result()["count"] for found in compared[1:]} <= {0, len(scene.tensors)}
        server.call("/continue_generation", {})
    server.load(host, label)
    assert server.compare(host, label)["count"] == 0


def told(server: Sglang) -> list[tuple]:
    """Of each delta that it was offered, the label, and why it is not prepared."""
    return [(told["target"], told["why_not"]) for told in server.told()["deltas"].values()]


@pytest.mark.parametrize("scene", ["untied"], indirect=True)
def test_fleet_generates_tokens_with_log_probs_and_versions(scene):
    label, newer = scene.label(), f"{scene.publisher.run_id[:12]}:{scene.version + 1}"
    scene.server.load(scene.base, label)
    with driftless_rl.Fleet([scene.server.url], scene.base, deadline=60.0) as fleet:
        made = fleet.generate([1, 2, 3, 4], min_version=label, max_new_tokens=8, temperature=0, ignore_eos=True)
        assert made.output_ids == scene.server.state()[1] and made.finish == "length"
        assert len(made.log_probs) == 8 and all(-20 < value <= 0 for value in made.log_probs)
        assert made.versions == [(label, 0, 8)] and made.engine == scene.server.url
        prompt = list(range(64, 0, -1)) * 2
        first, second = (fleet.generate(prompt, max_new_tokens=1).cached_tokens for _ in range(2))
        assert first == 0 and second >= 100

        async def several() -> list[driftless_rl.Generation]:
            prompts = [[number, 5] for number in range(1, 9)]
            return await asyncio.gather(*(fleet.generate_async(ids, max_new_tokens=4, ignore_eos=True) for ids in prompts))

        made = asyncio.run(several())
        assert len({one.rid for one in made}) == 8 and {len(one.output_ids) for one in made} == {4}
        (engine,) = fleet.status()
        assert engine.up and engine.serving == label and engine.in_flight == 0
        with pytest.raises(driftless_rl.UsageError, match="token id"):
            fleet.generate([1, 10**6])
        with pytest.raises(driftless_rl.UsageError, match="version label"):
            fleet.generate([1], min_version="7")
        # No engine serves that version.
        assert fleet.submit([1], min_version=newer).cancel()
        waiting = fleet.submit([1], min_version=newer)
    with pytest.raises(driftless_rl.ClosedError):
        waiting.result(timeout=60)
    with pytest.raises(driftless_rl.ClosedError):
        fleet.generate([1])
    with driftless_rl.Fleet([scene.server.url], scene.base, deadline=0.5) as fleet:
        with pytest.raises(driftless_rl.DeadlineError) as raised:
            fleet.generate([1], min_version=newer)
        assert raised.value.retryable and raised.value.code == 4
    # An interpreter ends although a sample is on its way.
    script = "import driftless_rl, sys; fleet = driftless_rl.Fleet([sys.argv[1]], sys.argv[2]); fleet.submit([1], min_version=sys.argv[3])"
    subprocess.run([sys.executable, "-c", script, scene.server.url, str(scene.base), newer], timeout=120, check=True)
    with pytest.raises(driftless_rl.EngineError, match="hidden_size"):
        make(scene.host.parent / "other", "untied", 1)
        config = scene.host.parent / "other/config.json"
        config.write_text(config.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
        driftless_rl.Fleet([scene.server.url], config.parent)
