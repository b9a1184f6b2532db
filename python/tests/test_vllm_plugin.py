"""The backend in vLLM's own factory and engine class, beside a stand-in for a model: what a server cannot be made to do.

Servers are in ``test_vllm_server.py``.
"""

import importlib.util
import json
import random
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import driftless_rl
import driftless_rl.vllm
import pytest
import torch
from conftest import assert_this_wheel_hooks
from sglang_models import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCABULARY, make, step
from torch import nn

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

# Registers the backend in a process of its own, and says what Linux lets that process have of the processor.
TILES = """
import ctypes
import driftless_rl.vllm
driftless_rl.vllm.register()
permitted = ctypes.c_ulong()
ARCH_PRCTL, ARCH_GET_XCOMP_PERM, TILE_DATA = 158, 0x1022, 18
assert ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_GET_XCOMP_PERM, ctypes.byref(permitted)) == 0
print(permitted.value >> TILE_DATA & 1)
"""
PORT = 8000


class Stacked(nn.Module):
    """What vLLM makes of a dense checkpoint: stacked projections, one embedding for both ends, a padded vocabulary."""

    QKV = {"q_proj": (0, HEADS * HEAD_DIM), "k_proj": (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)}
    QKV["v_proj"] = ((HEADS + KV_HEADS) * HEAD_DIM, KV_HEADS * HEAD_DIM)
    GATE_UP = {"gate_proj": (0, INNER), "up_proj": (INNER, INNER)}

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.embed = self._empty(VOCABULARY + 28, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY + 28, bias=False)
        self.head.weight = self.embed
        self.rest = nn.ParameterDict()
        for layer in range(LAYERS):
            self.rest[f"{layer} qkv"] = self._empty((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
            self.rest[f"{layer} gate_up"] = self._empty(2 * INNER, HIDDEN)
        for name, tensor in tensors.items():
            if self._stacked(name) is None and "embed" not in name:
                self.rest[name.replace(".", " ")] = self._empty(*tensor.shape)
        self.load_weights(tensors.items())

    @staticmethod
    def _empty(*size: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(size, dtype=torch.bfloat16), requires_grad=False)

    def _stacked(self, name: str) -> torch.Tensor | None:
        """The part of a stacked projection that a tensor goes to."""
        for stack, parts in (("qkv", self.QKV), ("gate_up", self.GATE_UP)):
            if (part := parts.get(name.split(".")[-2])) is not None:
                return self.rest[f"{name.split('.')[2]} {stack}"].data.narrow(0, *part)
        return None

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            part = self._stacked(name)
            if part is not None:
                part.copy_(tensor)
            elif "embed" in name:
                self.embed.data[:VOCABULARY].copy_(tensor)
                self.embed.data[VOCABULARY:].fill_(0)
            else:
                self.rest[name.replace(".", " ")].data.copy_(tensor)


class Host:
    """A worker's engine with a live model at version 0, and a follower that prepares deltas for it."""

    def __init__(self, store, root, monkeypatch) -> None:
        self.where = root / "plugins"
        monkeypatch.setenv("DRIFTLESS_PLUGIN_DIR", str(self.where))
        # vLLM's CPU worker does so too.
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
        self.checkpoint = root / "base"
        self.versions = [make(self.checkpoint, "tied", 1)]
        self.publisher = store.publisher()
        self.publisher.publish(self.versions[0])
        self.follower = driftless_rl.Follower(store.url, "run", root / "host", plugin_dir=self.where)
        self.follower.advance()

    def start(self, workers: int = 1, sleeps: bool = False, model: nn.Module | None = None) -> None:
        """What a worker does after it has loaded the model."""
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        driftless_rl.vllm.register()
        self.model = model or Stacked(self.versions[0])
        parallel = SimpleNamespace(rank=0, world_size=workers, data_parallel_size=1)
        model_config = SimpleNamespace(model=str(self.checkpoint), enable_sleep_mode=sleeps)
        config = SimpleNamespace(parallel_config=parallel, model_config=model_config)
        transfer = WeightTransferConfig(backend="driftless")
        self.engine = WeightTransferEngineFactory.create_engine(transfer, config, torch.device("cpu"), self.model)

    def label(self) -> str:
        return self.follower.status()["applied"]["label"]

    def loaded(self, label: str) -> None:
        """A follower has had the engine load, and says so behind its fence."""
        self.engine.init_transfer_engine(self.engine.parse_init_info({"port": PORT, "label": f"{label}?partial"}))

    def step(self, density: float = 0.02) -> str:
        """The next version, which the follower offers; returns its label."""
        self.versions.append(step(self.versions[-1], len(self.versions), density))
        self.publisher.publish(self.versions[-1])
        self.follower.advance()
        return self.label()

    def said(self) -> dict:
        return json.loads((self.where / f"rank-{PORT}-0.json").read_text())

    def told(self, expected: str | None) -> None:
        """Waits until the worker says of a delta that it is prepared, or why not."""
        end = time.monotonic() + 60
        while True:
            said = self.said()["deltas"].values()
            whys = [told["why_not"] for told in said if told["target"] in ("", self.label())]
            if any(why is None if expected is None else why and expected in why for why in whys):
                return
            assert time.monotonic() < end, (expected, said)
            time.sleep(0.005)

    def goes_on_from(self, label: str) -> None:
        """Has version 1 loaded, as a follower does after a refusal; the next one is patched again."""
        self.model.load_weights(self.versions[1].items())
        self.loaded(label)
        label = self.step()
        self.told(None)
        self.update(label)
        assert self.holds(2)

    def update(self, label: str) -> None:
        """An update as vLLM's worker carries it out."""
        self.engine.start_weight_update()
        self.engine.update_weights({"label": label})
        self.engine.finish_weight_update()

    def refuses(self, label: str, why: str) -> None:
        """The update is refused, and the model is what it was."""
        held = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        with pytest.raises(driftless_rl.EngineError) as raised:
            self.update(label)
        said = json.loads(str(raised.value).removeprefix("driftless: "))
        assert said["label"] == label and re.search(why, said["refused"])
        assert all(torch.equal(held[name], tensor) for name, tensor in self.model.state_dict().items())

    def holds(self, version: int) -> bool:
        expected = Stacked(self.versions[version]).state_dict()
        return all(torch.equal(expected[name], tensor) for name, tensor in self.model.state_dict().items())


@pytest.fixture
def host(store, tmp_path, monkeypatch):
    host = Host(store, tmp_path, monkeypatch)
    yield host
    host.publisher.close()
    host.follower.close()


def test_engine_after_twenty_deltas_holds_what_a_load_gives(host):
    host.start()
    host.loaded(host.label())
    densities = random.Random(20)
    for version in range(1, 21):
        label = host.step(densities.choice((0.0005, 0.01, 0.05, 0.2)))
        host.told(None)
        host.update(label)
        assert host.holds(version)
    assert host.model.head.weight is host.model.embed


def test_update_of_a_version_that_is_not_prepared_is_refused(host):
    host.start()
    label = host.label()
    host.refuses(label, "no delta from the live version")
    host.loaded(label)
    label = host.step()
    host.told(None)
    host.refuses(label + "7", "no delta from the live version")


def test_update_from_another_base_is_refused_until_a_load(host):
    host.start()
    host.loaded(host.label().split(":")[0] + ":7")
    label = host.step()
    host.told("the live version")
    host.refuses(label, "no delta from the live version")
    host.goes_on_from(label)


def test_update_of_weights_that_somebody_changed_is_refused(host):
    host.start()
    host.loaded(host.label())
    host.model.embed.data.view(torch.int16)[:] ^= 1
    host.refuses(host.step(), "no delta from the live version")
    host.told("the live weights")
    # After the delta was prepared, too.
    host.model.load_weights(host.versions[1].items())
    host.loaded(host.label())
    label = host.step(0.2)
    host.told(None)
    host.model.rest["model norm weight"].data.view(torch.int16)[:] ^= 64
    host.refuses(label, "the live weights")


def test_update_from_a_torn_file_is_refused(host):
    host.start()
    host.loaded(host.label())
    label = host.step()
    host.told(None)
    [offer] = [path for path in host.where.glob("delta-*") if "." not in path.name]
    content = bytearray(offer.read_bytes())
    offer.unlink()
    content[64] ^= 1
    (host.where / "delta-0123456789abcdef").write_bytes(content)
    host.told("checksum")
    host.refuses(label, "")


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ({"workers": 2}, "it has 2 workers"),
        ({"sleeps": True}, "--enable-sleep-mode"),
        ({"model": nn.Linear(4, 4)}, "load_weights"),
    ],
)
def test_engine_that_cannot_be_patched_says_why_and_goes_on(host, engine, why):
    host.start(**engine)
    host.loaded(host.label())
    assert why in host.said()["why_not"]
    host.refuses(host.step(), "no delta from the live version")


def test_worker_compares_its_weights_with_a_checkpoint(host):
    from vllm.v1.worker.worker_base import WorkerBase

    def compared(directory: str) -> dict:
        said = WorkerBase.driftless_compare(worker, "a:1", str(host.checkpoint.parent / directory))
        return json.loads(said.removeprefix("driftless: "))

    host.start()
    worker = SimpleNamespace(weight_transfer_engine=host.engine)
    assert "is not known" in compared("base")["refused"], "no follower has said what it loaded"
    host.loaded(host.label())
    assert host.said()["compares"]
    assert (compared("base")["compared"], compared("base")["differing"]["count"]) == ("a:1", 0)
    label = host.step()
    host.told(None)
    host.update(label)
    assert compared("host")["differing"]["count"] == 0 < compared("base")["differing"]["count"]
    assert "no such file" in compared("none")["refused"]


def test_engine_that_was_shut_down_learns_anew(host):
    host.start()
    host.loaded(host.label())
    label = host.step()
    host.told(None)
    host.engine.shutdown()
    host.refuses(label, "no delta from the live version")
    host.goes_on_from(label)


def test_info_of_another_backend_is_refused_by_vllm(host):
    host.start()
    with pytest.raises(ValueError, match="Invalid init_info"):
        host.engine.parse_init_info({"master_address": "localhost"})
    with pytest.raises(ValueError, match="Invalid update_info"):
        host.engine.update_weights({"names": []})
    assert not host.engine.supports_draft_weight_update


def test_register_twice_is_one_backend():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    driftless_rl.vllm.register()
    driftless_rl.vllm.register()
    assert "driftless" in WeightTransferEngineFactory._registry


@pytest.mark.parametrize("where", ["first", "last"])
def test_vllm_gets_one_backend_and_it_is_of_this_wheel(older_wheel, where):
    names = {"plugins": "vllm.plugins", "ours": "driftless_rl.vllm._backend", "call": "load_general_plugins"}
    assert_this_wheel_hooks(older_wheel, where, **names)


@pytest.mark.parametrize(
    ("name", "found", "why"),
    [
        ("receive_weights", lambda self, info, stream: None, "takes self, info, stream, expected self, update_info"),
        ("shutdown", None, "there is no vllm.distributed.weight_transfer.base.WeightTransferEngine.shutdown"),
        ("__abstractmethods__", frozenset({"shutdown", "verify"}), "wants verify"),
    ],
)
def test_an_unknown_release_is_left_as_it_is(name, found, why, monkeypatch, caplog):
    from driftless_rl.vllm import _backend
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
    if found is None:
        monkeypatch.delattr(WeightTransferEngine, name)
    else:
        monkeypatch.setattr(WeightTransferEngine, name, found)
    _backend.register()
    assert WeightTransferEngineFactory._registry == {}
    assert why in caplog.text and "has no backend `driftless`" in caplog.text


def test_register_without_vllm_imports_neither_it_nor_torch():
    script = (
        "import sys; sys.modules['vllm'] = None;"
        "import driftless_rl.vllm as v; v.register(); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.count("this vLLM is not known") == 1


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
def test_process_with_the_plugin_may_use_tiles_before_anything_multiplies():
    done = subprocess.run([sys.executable, "-c", TILES], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split()[-1] == "1", done.stdout
