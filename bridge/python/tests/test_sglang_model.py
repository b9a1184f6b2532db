"""Prepared deltas in a live model, without SGLang: found, checked, written, taken back."""

import json
import os
import sys
import types

import driftless
import pytest
import torch
from driftless.sglang import _hooks
from driftless.sglang._model import LiveModel, NotPatched
from driftless.sglang._place import RankFile
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


class Host:
    """A live model at version 0, and a follower that prepares deltas for it."""

    def __init__(self, store, root) -> None:
        self.where = root / "plugins"
        self.versions = [make(root / "base", "untied", 1)]
        self.model = Fused(self.versions[0])
        self.rank_file = RankFile(self.where, 30000, 0, 1)
        self.live = LiveModel(self.model, root / "base", self.rank_file)
        self.publisher = store.publisher()
        self.publisher.publish(self.versions[0])
        self.follower = driftless.Follower(store.url, "run", root / "host", plugin_dir=self.where)
        self.follower.advance()
        self.live.loaded(self.label())
        self._seen = {}

    def label(self) -> str:
        return self.follower.status()["applied"]["label"]

    def step(self, density: float = 0.02) -> str:
        """The next version, which is prepared or not; returns its label."""
        self.versions.append(step(self.versions[-1], len(self.versions), density))
        self.publisher.publish(self.versions[-1])
        self.follower.advance()
        return self.label()

    def look(self) -> str | None:
        """What the plugin says of the one offer."""
        self._seen = self.live._look(self.where, self._seen)
        [told] = json.loads((self.where / "rank-30000-0.json").read_text())["deltas"].values()
        return told["why_not"]

    def holds(self, version: int) -> bool:
        expected = Fused(self.versions[version]).state_dict()
        return all(torch.equal(expected[name], tensor) for name, tensor in self.model.state_dict().items())


@pytest.fixture
def host(store, tmp_path):
    host = Host(store, tmp_path)
    yield host
    host.publisher.close()
    host.follower.close()


def test_each_delta_leads_to_the_weights_that_a_load_gives(host):
    for version, density in enumerate((0.001, 0.02, 0.2, 0.05), 1):
        label = host.step(density)
        assert host.look() is None
        assert host.live.patch(label)
        assert host.holds(version)
        assert host.live.patch(label) is None, "a delta is written once"


def test_an_element_that_changed_meanwhile_takes_all_of_it_back(host):
    label = host.step(0.2)
    assert host.look() is None
    # The last place that is written: what was before it is written already, and taken back.
    host.model.rest["model/norm/weight"].data.view(torch.int16)[:] ^= 1
    held = {name: tensor.clone() for name, tensor in host.model.state_dict().items()}
    with pytest.raises(NotPatched, match="changed after the delta was prepared"):
        host.live.patch(label)
    assert all(torch.equal(held[name], tensor) for name, tensor in host.model.state_dict().items())
    # SGLang loads then, and goes on from there.
    host.model.load_weights(host.versions[1].items())
    host.live.loaded(label)
    label = host.step()
    assert host.look() is None and host.live.patch(label) and host.holds(2)


def test_weights_that_are_not_the_base_are_not_patched(host):
    host.step()
    host.model.rest["lm_head/weight"].data.add_(1)
    assert "are not those of" in host.look()
    host.live.loaded(None)
    assert "live is None" in host.look()
    host.live.loaded(host.label() + "?partial")
    assert "the delta starts from" in host.look()


def test_another_label_is_loaded(host):
    label = host.step()
    assert host.look() is None
    assert host.live.patch(label + "?partial") is None


def test_a_moved_parameter_is_loaded(host):
    label = host.step()
    assert host.look() is None
    host.model.qkv.data = host.model.qkv.data.clone()
    with pytest.raises(NotPatched, match="not where they were learned"):
        host.live.patch(label)


def test_a_torn_or_foreign_file_is_told_and_nothing_else(host):
    label = host.step()
    [path] = host.where.glob("delta-*")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert "its digest" in host.look()
    path.write_bytes(b"something else")
    assert "its length" in host.look()
    assert host.live.patch(label) is None
    path.write_bytes(content)
    assert host.look() is None
    path.unlink()
    assert host.live._look(host.where, {}) == {}
    assert host.live.patch(label) and host.holds(1)


def test_native_calls_refuse_what_lies_outside(host):
    from driftless._driftless import PreparedDelta

    host.step()
    [path] = host.where.glob("delta-*")
    delta = PreparedDelta(path)
    index, shape = next((i, shape) for i, (name, _, shape, _) in enumerate(delta.tensors()) if name == "lm_head.weight")
    live = [("weight", host.versions[0]["lm_head.weight"].clone().view(-1))]
    whole, size = (0, [32, 1]), list(shape)
    assert delta.prepare(live, [(index, 0, size, whole, whole)]).elements > 0
    for copies in (
        [(index, 0, size, whole, (1, [32, 1]))],
        [(index, 0, size, whole, (0, [2**40, 2**40]))],
        [(index, 0, size, (0, [1, 1]), whole)],
        [(index, 0, [100], whole, whole)],
        [(index, 0, [0, 32], whole, whole)],
        [(index, 0, [2**63, 2**63], (0, [1, 2**63]), (0, [1, 2**63]))],
        [(index, 1, size, whole, whole)],
        [(999, 0, size, whole, whole)],
    ):
        with pytest.raises(driftless.Error):
            delta.prepare(live, copies)
    with pytest.raises(driftless.TensorError, match="dtype"):
        delta.prepare([("weight", live[0][1].float())], [(index, 0, size, whole, whole)])


def test_a_directory_that_others_can_enter_is_refused(tmp_path):
    where = tmp_path / "plugins"
    where.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="0700"):
        RankFile(where, 1, 0, 1)
    link = tmp_path / "link"
    where.chmod(0o700)
    link.symlink_to(where)
    with pytest.raises(PermissionError):
        RankFile(link, 1, 0, 1)


def fake_sglang(monkeypatch, updater) -> list:
    """Modules with the names that the plugin hooks, and the hooks that it registers."""
    registered = []

    class Runner:
        def load_model(self): ...

    class Manager:
        def update_weights_from_disk(self, recv_req): ...

    class Registry:
        @staticmethod
        def register(name, hook, kind):
            registered.append((name.rsplit(".", 2)[-2:], kind))

    classes = {
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": Registry,
            "HookType": types.SimpleNamespace(BEFORE="before", AFTER="after", AROUND="around"),
        },
        "sglang.srt.model_executor.model_runner": {"ModelRunner": Runner},
        "sglang.srt.managers.scheduler_components.weight_updater": {"SchedulerWeightUpdaterManager": Manager},
        "sglang.srt.model_executor.model_runner_components.weight_updater": {"WeightUpdater": updater},
    }
    for name, content in classes.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            if package not in sys.modules or end < len(parts) and not hasattr(sys.modules[package], "__fake__"):
                module = types.ModuleType(package)
                module.__path__, module.__fake__ = [], True
                monkeypatch.setitem(sys.modules, package, module)
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        for key, value in content.items():
            setattr(sys.modules[name], key, value)
    return registered


def test_hooks_are_registered_for_known_names_alone(monkeypatch, caplog):
    class Known:
        def update_weights_from_disk(self, model_path, load_format, weight_name_filter=None): ...

        def update_weights_from_tensor(self, named_tensors): ...

    class Other:
        def update_weights_from_disk(self, path): ...

    with monkeypatch.context() as patched:
        registered = fake_sglang(patched, Known)
        _hooks.register()
        assert [(target[1], kind) for target, kind in registered] == [
            ("load_model", "after"),
            ("update_weights_from_disk", "before"),
            ("update_weights_from_disk", "around"),
            ("update_weights_from_tensor", "before"),
        ]
    with monkeypatch.context() as patched:
        registered = fake_sglang(patched, Other)
        _hooks.register()
        assert registered == []
    assert "takes self, path, expected self, model_path, load_format" in caplog.text


def test_register_imports_no_torch():
    import subprocess

    script = (
        "import sys, threading, driftless.sglang as s; s.register();"
        "assert 'torch' not in sys.modules and threading.active_count() == 1"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if "sglang-0" not in path)}
    # Isolated from site-packages, where there may be an SGLang that imports torch itself.
    subprocess.run([sys.executable, "-S", "-c", script], check=True, timeout=60, env=environment)
