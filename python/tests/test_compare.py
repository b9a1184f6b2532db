"""Live weights compared with a checkpoint, through the map that the plugin has learned; and what SGLang is answered."""

import json
import sys
import types
from collections.abc import Callable

import pytest
import torch
from driftless_rl import _patchable
from driftless_rl._errors import Error
from driftless_rl._patchable import live_model
from driftless_rl.sglang import _hooks
from sglang_models import make
from test_sglang_model import Fused, Host, Making, Ranks, host

__all__ = ["host"]


def compared(host: Host, directory, sample: int | None = None) -> dict:
    return json.loads(host.live.compare("a:1", directory, sample).removeprefix("driftless: "))


def names(said: dict) -> list[str]:
    assert said["compared"] == "a:1" and said["tensors"] > 0
    assert said["differing"]["count"] >= len(said["differing"]["first"])
    return said["differing"]["first"]


@pytest.mark.parametrize("host", [Fused, Making], indirect=True)
def test_weights_equal_the_version_that_was_loaded_or_patched_and_no_other(host, tmp_path):
    assert names(compared(host, tmp_path / "base")) == []
    label = host.step(0.02)
    host.told(None)
    assert host.live.patch(label) is not None
    assert names(compared(host, tmp_path / "host")) == []
    # Each tensor changed somewhere.
    said = compared(host, tmp_path / "base")
    assert said["differing"]["count"] == said["tensors"] == len(host.versions[0]) and len(names(said)) == 5
    # One element of one tensor, in whatever form the model keeps it.
    host.model.rest["model/norm/weight"].data.view(torch.int16)[3] ^= 1
    assert names(compared(host, tmp_path / "host")) == ["model.norm.weight"]
    assert any(names(compared(host, tmp_path / "host", sample)) for sample in range(4))


@pytest.mark.parametrize("host", [Making], indirect=True)
@pytest.mark.parametrize("name", ["gate", "norm", "more", "both"])
def test_what_the_model_makes_of_a_tensor_is_compared(name, host, tmp_path):
    held = host.model.state_dict()[name].view(-1)
    before = held[-1].clone()
    held[-1] += 1
    said = names(compared(host, tmp_path / "base"))
    assert len(said) == 1 and (name != "both" or said == ["model.layers.1.mlp.up_proj.weight"])
    held[-1] = before
    assert names(compared(host, tmp_path / "base")) == []


def test_other_checkpoints_are_refused_and_weights_that_moved_too(host, tmp_path):
    make(tmp_path / "moe", "moe", 1)
    (tmp_path / "empty").mkdir()
    for directory, why in (("moe", "in the checkpoint"), ("empty", "no such file"), ("none", "no such file")):
        with pytest.raises(Error, match=why):
            host.live.compare("a:1", tmp_path / directory, None)
    norm = host.model.rest["model/norm/weight"]
    norm.data = norm.data.clone()
    with pytest.raises(Error, match="is not where it was learned"):
        host.live.compare("a:1", tmp_path / "base", None)


class Agreeing(Ranks):
    """The group of two ranks that compare."""

    def __init__(self, monkeypatch) -> None:
        super().__init__(monkeypatch)
        monkeypatch.setattr(_patchable, "agree", self._least)

    def _count(self) -> None:
        lengths = {len(said) for said in self.votes}
        assert len(lengths) == 1, "each says as much"
        self.found = bytes(map(min, zip(*self.votes)))
        self.votes.clear()


def test_what_one_rank_finds_all_ranks_say(store, tmp_path, monkeypatch):
    host, ranks = Host(store, tmp_path, ranks=2), Agreeing(monkeypatch)
    second = Fused(host.versions[0])
    other = live_model(second, tmp_path / "base", host.where, (30000, 1, 2))
    make(tmp_path / "moe", "moe", 1)

    def both(directory) -> list[str]:
        return ranks.both(*(lambda live=live: live.compare("a:1", directory, None, ranks) for live in (host.live, other)))

    def found(said: str) -> list[str]:
        return names(json.loads(said.removeprefix("driftless: ")))

    assert [found(said) for said in both(tmp_path / "base")] == [[], []]
    second.rest["model/norm/weight"].data.view(torch.int16)[0] ^= 1
    assert [found(said) for said in both(tmp_path / "base")] == [["model.norm.weight"]] * 2
    assert all("in the checkpoint" in said for said in both(tmp_path / "moe"))
    with pytest.raises(Error, match="cannot agree"):
        host.live.compare("a:1", tmp_path / "base", None)
    # One whose weights moved has the other refuse as well.
    norm = second.rest["model/norm/weight"]
    norm.data = norm.data.clone()
    first, last = both(tmp_path / "base")
    assert "the weights of each rank should be compared" in first and "is not where it was learned" in last
    host.publisher.close()
    host.follower.close()


def answer(monkeypatch, directory, driftless: str = "compare", group=None) -> tuple:
    """What a rank of SGLang makes of a request, and the requests that it carried out itself."""
    answers = types.ModuleType("sglang.srt.managers.io_struct")
    answers.UpdateWeightFromDiskReqOutput = type("Output", (types.SimpleNamespace,), {})
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, answers.__name__, answers)
    monkeypatch.setattr(_hooks, "resolve", lambda name: getattr(answers, name.rpartition(".")[2], None))
    manager = types.SimpleNamespace(flush_cache=lambda empty_cache=True: True, tp_cpu_group=group)
    manifest = {"driftless": driftless, "sample": None}
    request = types.SimpleNamespace(
        weight_version="a:1", model_path=str(directory), flush_cache=False, manifest=manifest
    )
    carried: list = []
    original: Callable = lambda manager, request: carried.append(request)
    return _hooks._carry_out(original, manager, request), carried


def test_sglang_is_answered_that_nothing_was_updated(host, monkeypatch, tmp_path):
    monkeypatch.setattr(_hooks, "_models", {1: host.live})
    told, carried = answer(monkeypatch, tmp_path / "base")
    assert told.success is False and carried == []
    assert names(json.loads(told.message.removeprefix("driftless: "))) == []
    told, carried = answer(monkeypatch, tmp_path / "none")
    assert told.success is False and carried == []
    said = json.loads(told.message.removeprefix("driftless: "))
    assert said["label"] == "a:1" and "no such file" in said["refused"]
    # A rank whose weights are not known; and whatever else is asked is SGLang's.
    monkeypatch.setattr(_hooks, "_models", {})
    told, carried = answer(monkeypatch, tmp_path / "base")
    assert "there are 0 models here" in told.message and carried == []
    assert answer(monkeypatch, tmp_path / "base", "patch")[1] != []
