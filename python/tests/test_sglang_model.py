"""Prepared deltas in a live model, without SGLang: found, checked, written, refused."""

import asyncio
import json
import os
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import driftless_rl
import pytest
import torch
from driftless_rl import _patchable
from driftless_rl._patchable import live_model, refuse
from driftless_rl.sglang import _hooks
from sglang_models import make, step
from torch import nn


class Fused(nn.Module):
    """What engines do with a checkpoint: a fused matrix, a transposed one, a shard, a padded vocabulary, the rest."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.qkv = self._empty(64, 32)
        self.down = self._empty(64, 32)
        self.up = self._empty(64, 16)
        self.embed = self._empty(128, 32)
        self.rest = nn.ParameterDict({name.replace(".", "/"): self._empty(*t.shape) for name, t in tensors.items()})
        self.load_weights(tensors.items())

    @staticmethod
    def _empty(*size: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(size, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights) -> None:
        first = {"q_proj": (0, 32), "k_proj": (32, 16), "v_proj": (48, 16)}
        for name, tensor in weights:
            self.rest[name.replace(".", "/")].data.copy_(tensor)
            if name.startswith("model.layers.0.self_attn") and name.split(".")[-2] in first:
                self.qkv.data.narrow(0, *first[name.split(".")[-2]]).copy_(tensor)
            if name == "model.layers.0.mlp.down_proj.weight":
                self.down.data.copy_(tensor.t())
            if name == "model.layers.0.mlp.up_proj.weight":
                self.up.data.copy_(tensor.narrow(1, 16, 16))
            if name == "model.embed_tokens.weight":
                self.embed.data[:100].copy_(tensor)
                self.embed.data[100:].fill_(0)


class Making(Fused):
    """One that keeps a gate in f32, a norm with 1 added and in place of itself, a copy of it with 2, and two joined."""

    def load_weights(self, weights) -> None:
        if not hasattr(self, "gate"):
            self.gate = nn.Parameter(torch.zeros(64, 32, dtype=torch.float32), requires_grad=False)
            self.norm, self.both = self._empty(32), self._empty(128, 32)
            self.register_buffer("more", torch.zeros(32, dtype=torch.bfloat16))
        weights = dict(weights)
        super().load_weights(weights.items())
        self.gate.data.copy_(weights["model.layers.1.mlp.gate_proj.weight"])
        names = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]
        self.both.data.copy_(torch.cat([weights[name] for name in names]))
        norm = weights["model.norm.weight"].clone()
        norm += 1.0
        self.norm.data.copy_(norm)
        self.more.copy_(self.norm.data).add_(1.0)


class Deriving(Fused):
    """One that keeps something that it makes of its weights."""

    broken = False

    def load_weights(self, weights) -> None:
        super().load_weights(weights)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.double = self.qkv.data * 2
        assert not self.broken


def reply(done, stood_still: float = 0.5, cache: str | None = None) -> dict:
    """What a follower is answered of a patch."""
    return json.loads(done.reply(stood_still, cache).removeprefix("driftless: "))


class Host:
    """A live model at version 0, and a follower that prepares deltas for it."""

    def __init__(self, store, root, ranks: int = 1, kind: type[Fused] = Fused) -> None:
        self.where = root / "plugins"
        self.kind, self.versions = kind, [self.first(root / "base")]
        self.model = kind(self.versions[0])
        self.live = live_model(self.model, root / "base", self.where, (30000, 0, ranks))
        self.publisher = store.publisher()
        self.publisher.publish(self.versions[0])
        self.follower = driftless_rl.Follower(store.url, "run", root / "host", plugin_dir=self.where)
        self.follower.advance()
        self.live.loaded(self.label())

    def first(self, directory: Path) -> dict[str, torch.Tensor]:
        """Writes what the engine starts from, and returns the first version."""
        return make(directory, "untied", 1)

    def label(self) -> str:
        return self.follower.status()["applied"]["label"]

    def step(self, density: float = 0.02) -> str:
        """The next version, which the follower offers; returns its label."""
        return self.publish(step(self.versions[-1], len(self.versions), density))

    def publish(self, tensors: dict[str, torch.Tensor]) -> str:
        self.versions.append(tensors)
        self.publisher.publish(tensors)
        self.follower.advance()
        return self.label()

    def told(self, expected: str | None, port: int = 30000, rank: int = 0) -> None:
        """Waits until the plugin says of the newest version that it is prepared, or why not."""
        end = time.monotonic() + 60
        while True:
            deltas = json.loads((self.where / f"rank-{port}-{rank}.json").read_text())["deltas"].values()
            said = [told["why_not"] for told in deltas if told["target"] == self.label()]
            if any(why is None if expected is None else why and expected in why for why in said):
                return
            assert time.monotonic() < end, (expected, deltas)
            time.sleep(0.005)

    def holds(self, version: int) -> bool:
        expected = self.kind(self.versions[version]).state_dict()
        return all(torch.equal(expected[name], tensor) for name, tensor in self.model.state_dict().items())


@pytest.fixture
def host(store, tmp_path, request):
    host = Host(store, tmp_path, kind=getattr(request, "param", Fused))
    yield host
    host.publisher.close()
    host.follower.close()


@pytest.mark.parametrize("host", [Fused, Making], indirect=True)
def test_each_delta_leads_to_the_weights_that_a_load_gives(host):
    for version, density in enumerate((0.001, 0.02, 0.2, 0.05), 1):
        label = host.step(density)
        host.told(None)
        said = reply(host.live.patch(label))
        assert said["patched"] == label and said["elements"] > 0 and said["prepared_us"] > 0
        assert host.holds(version)
        assert host.live.patch(label) is None, "a delta is written once"


def test_an_element_that_changed_meanwhile_takes_all_of_it_back(host):
    label = host.step(0.2)
    host.told(None)
    host.model.rest["model/norm/weight"].data.view(torch.int16)[:] ^= 64
    held = {name: tensor.clone() for name, tensor in host.model.state_dict().items()}
    with pytest.raises(driftless_rl.RefusedError, match="the old values of the delta"):
        host.live.patch(label)
    assert all(torch.equal(held[name], tensor) for name, tensor in host.model.state_dict().items())
    # SGLang loads then, and goes on from there.
    host.model.load_weights(host.versions[1].items())
    host.live.loaded(label)
    label = host.step()
    host.told(None)
    assert host.live.patch(label) and host.holds(2)


def test_weights_that_are_not_the_base_are_not_patched(host):
    host.model.rest["lm_head/weight"].data.add_(1)
    label = host.step()
    host.told("those of")
    host.live.loaded(None)
    host.told("unknown")
    other = label.split(":")[0] + ":7"
    host.live.loaded(other + "?partial")
    host.told(f"found {other}")
    assert host.live.patch(label) is None


def test_another_label_is_loaded(host):
    label = host.step()
    host.told(None)
    assert host.live.patch(label + "?partial") is None


def test_a_moved_parameter_is_loaded(host):
    label = host.step()
    host.told(None)
    host.model.qkv.data = host.model.qkv.data.clone()
    with pytest.raises(driftless_rl.RefusedError, match="not where it was learned"):
        host.live.patch(label)
    host.model.qkv = None
    with pytest.raises(driftless_rl.RefusedError, match="not where it was learned"):
        host.live.patch(label)


def test_a_file_that_is_none_stands_in_no_way(host):
    (host.where / "delta-0123456789abcdef").write_bytes(b"something else")
    label = host.step()
    host.told(None)
    told = json.loads((host.where / "rank-30000-0.json").read_text())["deltas"]["delta-0123456789abcdef"]
    assert "its length" in told["why_not"]
    assert host.live.patch(label) and host.holds(1)


def test_derived_weights_are_made_anew(host, tmp_path):
    model = Deriving(host.versions[0])
    live = live_model(model, tmp_path / "base", host.where, (30001, 0, 1))
    live.loaded(host.label())
    label = host.step()
    host.told(None, 30001)
    assert live.patch(label)
    assert torch.equal(model.double, Fused(host.versions[1]).qkv.data * 2)
    label, model.broken = host.step(), True
    host.told(None, 30001)
    with pytest.raises(AssertionError):
        live.patch(label)
    host.step()
    host.told("unknown", 30001)


def test_a_directory_or_a_checkpoint_that_cannot_be_used_is_refused(tmp_path):
    where = tmp_path / "plugins"
    where.mkdir(mode=0o755)
    with pytest.raises(driftless_rl.Error, match="0700"):
        refuse(where, (1, 0, 1), "why")
    where.chmod(0o700)
    refuse(where, (1, 0, 1), "why")
    assert json.loads((where / "rank-1-0.json").read_text())["why_not"] == "why"
    versions = make(tmp_path / "base", "untied", 1)
    with pytest.raises(driftless_rl.Error):
        live_model(Fused(versions), tmp_path, where, (1, 0, 1))


def fake_sglang(monkeypatch, functions: dict[str, list[str]]) -> list:
    """Modules with these functions, each with its parameters, and the hooks that the plugin registers."""
    registered = []

    class Registry:
        @staticmethod
        def register(name, hook, kind):
            registered.append((".".join(name.rsplit(".", 2)[-2:]), kind))

    def module(name: str) -> types.ModuleType:
        found = sys.modules.get(name)
        if getattr(found, "__fake__", None) is not registered:
            found = types.ModuleType(name)
            found.__path__, found.__fake__ = [], registered
            monkeypatch.setitem(sys.modules, name, found)
            if "." in name:
                parent, _, leaf = name.rpartition(".")
                setattr(module(parent), leaf, found)
        return found

    registry = module("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = Registry
    registry.HookType = types.SimpleNamespace(BEFORE="before", AFTER="after", AROUND="around")
    update = {"__annotations__": {"manifest": dict}}
    module("sglang.srt.managers.io_struct").UpdateWeightFromDiskReqInput = type("Update", (), update)
    for name, parameters in functions.items():
        place, owner, function = name.rsplit(".", 2)
        where = module(place)
        if not hasattr(where, owner):
            setattr(where, owner, type(owner, (), {}))
        setattr(getattr(where, owner), function, eval(f"lambda {', '.join(parameters)}: None"))
    return registered


# Of each release, the functions that change weights, as its wheel has them.
RELEASES = json.loads((Path(__file__).parent / "sglang_releases.json").read_text())
# Of all of them, what the plugin asks of a request.
REQUEST = {"__init__": ["self", "rid", "extra_key"], "init_next_round_input": ["self", "tree_cache", "cow_mamba"]}
REQUEST = {f"sglang.srt.managers.schedule_batch.Req.{name}": taken for name, taken in REQUEST.items()}
# From 0.5.14 on, what it asks of a step.
STEP = {
    "scheduler.Scheduler.run_batch": ["self", "batch", "pp_proxy_tensors"],
    "scheduler.Scheduler.process_batch_result": ["self", "batch", "result"],
    "scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_customized_info": ["self", "i", "req", "logits_output"],
}
STEP = {f"sglang.srt.managers.{name}": taken for name, taken in STEP.items()}


@pytest.mark.parametrize("release", RELEASES)
def test_the_hooks_of_a_release_are_found(release, monkeypatch, caplog):
    registered = fake_sglang(monkeypatch, RELEASES[release] | REQUEST | (STEP if release >= "0.5.14" else {}))
    _hooks.register()
    assert not caplog.text
    kinds = dict(registered)
    assert len(kinds) == len(registered)
    steps = [kinds.pop(".".join(name.rsplit(".", 2)[-2:]), None) for name in STEP]
    assert steps == (["after", "before", "after"] if release >= "0.5.14" else [None] * 3)
    assert (kinds.pop("Req.__init__"), kinds.pop("Req.init_next_round_input")) == ("after", "before")
    before = {name for name, kind in kinds.items() if kind == "before"}
    # The process of the HTTP server, which has loaded its part of SGLang.
    assert kinds.pop("TokenizerManager.update_weights_from_disk") == "around"
    assert kinds.pop("TokenizerManager._wait_for_model_update_from_disk") == "around"
    assert kinds.pop("TokenizerManager.__init__") == "after"
    # The scheduler's, which takes the label and carries out comparisons, and the one that loads.
    [_, around] = sorted((name for name, kind in kinds.items() if kind == "around"), key=lambda name: "Scheduler" not in name)
    assert kinds["ModelRunner.load_model"] == "after"
    owner = around.removesuffix(".update_weights_from_disk")
    assert owner in ("WeightUpdater", "ModelRunner")
    # Whatever else writes to weights is seen: all of it belongs to the class that loads them.
    others = {name.rpartition(".")[2] for name in RELEASES[release] if f".{owner}." in name}
    others -= {"load_model", "update_weights_from_disk"}
    assert {name for name in before if name.startswith(owner)} == {f"{owner}.{name}" for name in others}
    assert len(before) == len(others)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("WeightUpdater.update_weights_from_disk", ["self", "path"]), "takes self, path, expected self, model_path"),
        (("SchedulerWeightUpdaterManager.update_weights_from_disk", ["self"]), "takes self, expected self, recv_req"),
        (("ModelRunner.load_model", None), "there is no sglang.srt.model_executor.model_runner.ModelRunner.load_model"),
    ],
)
def test_an_unknown_release_is_left_as_it_is(change, why, monkeypatch, caplog):
    functions = dict(RELEASES["0.5.23"])
    [name] = [name for name in functions if name.endswith(change[0])]
    del functions[name]
    if change[1] is not None:
        functions[name] = change[1]
    assert fake_sglang(monkeypatch, functions) == []
    _hooks.register()
    assert why in caplog.text and "weights are loaded as without the plugin" in caplog.text


@pytest.mark.parametrize(
    "change", ["update_weights_from_disk", "_wait_for_model_update_from_disk", "__init__", "manifest"]
)
def test_a_server_process_that_is_not_known_has_engines_paused(change, monkeypatch, caplog):
    functions = {name: taken for name, taken in RELEASES["0.5.23"].items() if not name.endswith(f"TokenizerManager.{change}")}
    registered = fake_sglang(monkeypatch, functions)
    if change == "manifest":
        sys.modules["sglang.srt.managers.io_struct"].UpdateWeightFromDiskReqInput.__annotations__ = {}
    _hooks.register()
    names = {name for name, _ in registered}
    assert "WeightUpdater.update_weights_from_disk" in names and not caplog.text
    assert not any(name.startswith("TokenizerManager") for name in names)


class Manager:
    """SGLang's manager of requests, as far as an update goes."""

    def __init__(self) -> None:
        self.is_pause, self.updated = False, []
        self.server_args = types.SimpleNamespace(port=30123)

    async def update(self, obj, request=None):
        self.updated = [*self.updated, self.is_pause]
        return self


def test_an_update_is_handed_on_without_a_pause_where_it_asks_for_that(monkeypatch, tmp_path):
    monkeypatch.setenv("DRIFTLESS_PLUGIN_DIR", str(tmp_path / "plugins"))
    manager = Manager()
    asked = types.SimpleNamespace(manifest={"driftless": "patch"})
    for obj, paused in [
        (asked, True),
        (types.SimpleNamespace(manifest={"driftless": "compare", "sample": 7}), True),
        (types.SimpleNamespace(manifest=None), False),
        (types.SimpleNamespace(manifest={"w": {"dtype": "bfloat16"}}), False),
        (types.SimpleNamespace(), False),
    ]:
        manager.updated.clear()
        asyncio.run(_hooks._handed_on(Manager.update, manager, obj, None))
        assert (manager.updated, manager.is_pause) == ([paused], False)


def test_updates_are_handed_on_one_by_one():
    manager, under_way = Manager(), 0

    async def hand_on(manager, obj):
        nonlocal under_way
        under_way += 1
        assert under_way == 1
        await asyncio.sleep(0)
        under_way -= 1
        if obj == "fails":
            raise ValueError(obj)
        return obj

    async def several():
        orders = ["a", "fails", "b", "c"]
        handed = (_hooks._one_by_one(hand_on, manager, obj) for obj in orders)
        return await asyncio.gather(*handed, return_exceptions=True)

    first, failed, *others = asyncio.run(several())
    assert (first, others) == ("a", ["b", "c"]) and isinstance(failed, ValueError)


def test_a_server_that_hands_on_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("DRIFTLESS_PLUGIN_DIR", str(tmp_path / "plugins"))
    manager, file = Manager(), tmp_path / "plugins/server-30123.json"
    _hooks._made(None, manager)
    said = json.loads(file.read_text())
    assert said["pid"] == os.getpid() and said["start"] > 0
    file.unlink()
    asyncio.run(_hooks._handed_on(Manager.update, manager, types.SimpleNamespace()))
    assert json.loads(file.read_text()) == said, "a file that was removed is written with the next update"


class Holder:
    """What SGLang asks to update a model: its updater, and the process's own load."""

    def __init__(self, model, loads: list) -> None:
        self.model, self.loads = model, loads

    def load(self, *args) -> tuple[bool, str]:
        self.loads.append(args)
        return True, "loaded"


def ask(holder, label: str | None, manifest=None, group=None) -> tuple[bool, str]:
    """An update of a rank, as SGLang's scheduler carries it out."""
    manager = types.SimpleNamespace(flush_cache=lambda empty_cache=True: True, tp_cpu_group=group)
    _hooks._requested(manager, types.SimpleNamespace(weight_version=label, flush_cache=False, manifest=manifest))
    return _hooks._update_from_disk(Holder.load, holder, "path", "auto")


def test_a_call_for_a_patch_alone_never_loads(host, monkeypatch):
    holder, only = Holder(host.model, []), {"driftless": "patch"}
    monkeypatch.setitem(_hooks._models, id(host.model), host.live)
    label = host.step()
    host.told(None)
    done, message = ask(holder, label, only)
    assert done and message.startswith('driftless: {"patched":') and message.endswith("}.")
    said = json.loads(message.removeprefix("driftless: ").removesuffix("."))
    assert (said["patched"], said["cache"]) == (label, "dropped") and said["stood_still_us"] >= said["wrote_us"]
    # It is live, so that nothing is prepared for it; a label that is none; another model.
    for label, model in [(label, host.model), (None, host.model), (label, nn.Module())]:
        done, message = ask(Holder(model, holder.loads), label, only)
        said = json.loads(message.removeprefix("driftless: "))
        assert (done, said["label"]) == (False, label or "") and "nothing is prepared" in said["refused"]
    assert holder.loads == []
    # The same without that is a load.
    assert ask(holder, "x:1") == (True, "loaded")
    assert len(holder.loads) == 1


class Ranks:
    """The group of two ranks, which are threads here."""

    def __init__(self, monkeypatch) -> None:
        self.votes, self.found, self.meet = [], None, threading.Barrier(2, self._count, timeout=60)
        monkeypatch.setattr(_patchable, "least", self._least)

    def _count(self) -> None:
        self.found = min(self.votes)
        self.votes.clear()

    def _least(self, vote: int, group) -> int:
        assert group is self
        self.votes.append(vote)
        self.meet.wait()
        return self.found

    def both(self, *calls) -> list:
        """What becomes of a call of each."""

        def outcome(call):
            try:
                return call()
            except driftless_rl.Error as error:
                return str(error)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(outcome, calls))


def test_ranks_are_patched_together_or_not_at_all(store, tmp_path, monkeypatch):
    host, ranks = Host(store, tmp_path, ranks=2), Ranks(monkeypatch)
    second = Fused(host.versions[0])
    other = live_model(second, tmp_path / "base", host.where, (30000, 1, 2))
    other.loaded(host.label())
    models = (host.model, second)

    def patched() -> list:
        label = host.step(0.2)
        host.told(None, rank=0)
        host.told(None, rank=1)
        return ranks.both(lambda: host.live.patch(label, ranks), lambda: other.patch(label, ranks))

    def hold(version: int) -> bool:
        expected = Fused(host.versions[version]).state_dict()
        return all(torch.equal(expected[name], model.state_dict()[name]) for model in models for name in expected)

    assert [reply(done)["patched"] for done in patched()] == [host.label()] * 2 and hold(1)
    # At one rank somebody else writes to a weight once the delta is prepared.
    told, norm = host.told, second.rest["model/norm/weight"].data.view(torch.int16)

    def told_and_spoiled(expected, port=30000, rank=0):
        told(expected, port, rank)
        if rank == 1:
            norm[:] ^= 64

    monkeypatch.setattr(host, "told", told_and_spoiled)
    first, last = patched()
    assert "the delta of each rank should be written" in first and "the old values of the delta" in last
    norm[:] ^= 64
    assert hold(1), "both took it back"
    monkeypatch.setattr(host, "told", told)
    for model, live in zip(models, (host.live, other)):
        model.load_weights(host.versions[2].items())
        live.loaded(host.label())
    assert [reply(done)["patched"] for done in patched()] == [host.label()] * 2 and hold(3)
    host.publisher.close()
    host.follower.close()


def test_a_rank_that_cannot_derive_has_all_take_back_what_they_derived(store, tmp_path, monkeypatch):
    host, ranks = Host(store, tmp_path, 2, Deriving), Ranks(monkeypatch)
    second = Deriving(host.versions[0])
    other = live_model(second, tmp_path / "base", host.where, (30000, 1, 2))
    other.loaded(host.label())
    label = host.step(0.2)
    host.told(None, rank=0)
    host.told(None, rank=1)
    broken = []

    def derive() -> None:
        Deriving.post_load_weights(second)
        if not broken:
            broken.append(True)
            raise driftless_rl.EngineError("no memory")

    other._derive = derive
    first, last = ranks.both(lambda: host.live.patch(label, ranks), lambda: other.patch(label, ranks))
    assert "each rank should be written" in first and last == "no memory"
    before = Fused(host.versions[0]).qkv.data
    for model in (host.model, second):
        assert torch.equal(model.qkv.data, before) and torch.equal(model.double, before * 2)
    assert not torch.equal(before, Fused(host.versions[1]).qkv.data)
    host.publisher.close()
    host.follower.close()


def test_a_rank_that_has_nothing_has_all_of_them_load(store, tmp_path, monkeypatch):
    host = Host(store, tmp_path, ranks=2)
    label, ranks = host.step(), Ranks(monkeypatch)
    host.told(None)
    both = ranks.both(lambda: host.live.patch(label, ranks), lambda: _hooks._patch(None, label, ranks))
    assert both == [None, None]
    with pytest.raises(driftless_rl.EngineError, match="cannot agree"):
        host.live.patch(label)
    host.publisher.close()
    host.follower.close()


@pytest.mark.parametrize(
    ("flush", "said"),
    [
        (lambda empty_cache=True: not empty_cache, "dropped"),
        (lambda empty_cache=True: False, "kept"),
        (lambda: True, "dropped"),
        (lambda **_: 1 / 0, None),
        (None, None),
    ],
)
def test_the_cache_is_dropped_unless_requests_hold_it(flush, said):
    assert _hooks._cache(flush) == said


def test_register_imports_no_torch():
    import subprocess

    script = (
        "import sys, threading, driftless_rl.sglang as s; s.register();"
        "assert 'torch' not in sys.modules and threading.active_count() == 1"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if "sglang-0" not in path)}
    # Isolated from site-packages, where there may be an SGLang that imports torch itself.
    subprocess.run([sys.executable, "-S", "-c", script], check=True, timeout=60, env=environment)
