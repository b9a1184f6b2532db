"""Models whose output head is their embedding: published without the head, followed and patched with and without it."""

import logging
import re
import types
from pathlib import Path

import driftless_rl
import pytest
import torch
from conftest import Store, read_checkpoint, run_command
from driftless_rl._patchable import live_model
from safetensors.torch import load_file, save_file
from sglang_models import make, step
from test_sglang_model import Fused, Host, reply
from tiny import dense
from torch import nn

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
TIED = {"config.json": b'{"tie_word_embeddings": true}'}
UNTIED = {"config.json": b'{"tie_word_embeddings": false}'}


def with_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As `state_dict()` of a tied model has them."""
    return tensors | {HEAD: tensors[EMBED]}


def state() -> dict[str, torch.Tensor]:
    return with_head({EMBED: torch.randn(24, 4).bfloat16(), "model.norm.weight": torch.ones(4)})


def followed(store: Store) -> dict:
    directory = store.root / "host"
    run_command("follow", "--store", store.url, "--run", "run", "--checkpoint-dir", str(directory), "--once")
    return read_checkpoint(directory)


def test_tied_head_is_left_out_and_that_is_said_once(store, caplog):
    tensors = state()
    with store.publisher(files=TIED) as publisher, caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert publisher.publish(tensors).left_out == {HEAD: EMBED}
            tensors[EMBED][3] += 1
        # In memory of its own, and read when it is its turn.
        tensors[HEAD] = tensors[EMBED].clone()
        assert publisher.publish(tensors).left_out == {HEAD: EMBED}
        lazy = driftless_rl.LazyTensor((24, 4), torch.bfloat16, tensors[EMBED].clone)
        assert publisher.publish(tensors | {HEAD: lazy}).left_out == {HEAD: EMBED}
        assert publisher.publish({name: tensors[name] for name in tensors if name != HEAD}).left_out == {}
    (said,) = [record.getMessage() for record in caplog.records]
    assert HEAD in said and EMBED in said
    assert followed(store).keys() == {EMBED, "model.norm.weight"}


@pytest.mark.parametrize("files", [UNTIED, {"config.json": b"{}"}], ids=["untied", "silent"])
def test_memory_that_is_shared_reaches_engines_under_each_name_that_no_config_ties(store, files, caplog):
    tensors = state()
    with store.publisher(files=files) as publisher:
        assert publisher.publish(tensors).left_out == {}
        tensors[EMBED][3] += 1
        published = publisher.publish(tensors)
    assert published.changed == 4 and not caplog.records, "the bytes of both are stored once"
    found = followed(store)
    assert found[HEAD] == found[EMBED]


def test_run_that_has_the_head_keeps_it(store, caplog):
    tensors = state()
    with store.publisher(files=UNTIED) as publisher:
        publisher.publish(tensors)
    tensors[EMBED][3] += 1
    with store.publisher(files=TIED, resume=True) as publisher:
        published = publisher.publish(tensors)
    assert (published.full_because, published.left_out, caplog.records) == (None, {}, [])
    assert HEAD in followed(store)


def test_tied_head_that_is_another_matrix_is_refused(store):
    tensors = state()
    with store.publisher(files=TIED) as publisher:
        with pytest.raises(driftless_rl.TensorError, match="tie_word_embeddings") as raised:
            publisher.publish(tensors | {HEAD: tensors[EMBED] + 1})
        assert raised.value.tensor == HEAD and publisher.version is None


def test_command_leaves_the_head_of_a_directory_out(store):
    directory = store.root / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_bytes(TIED["config.json"])
    tensors = state()
    where = ("--store", store.url, "--run", "run", "--checkpoint", str(directory), "--baseline-dir", str(store.baseline))
    for start, said in (("--new-run", True), ("--resume", False)):
        save_file(tensors | {HEAD: tensors[EMBED].clone()}, directory / "model.safetensors")
        found = run_command("publish", *where, start)
        assert (f"{HEAD} is left out: config.json ties it to {EMBED}" in found) == said, found
        tensors[EMBED][3] += 1
    assert HEAD not in followed(store)


class Tying(Fused):
    """An engine's model that has no head of its own."""

    config = types.SimpleNamespace(tie_word_embeddings=True)

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__({name: tensor for name, tensor in tensors.items() if name != HEAD})

    def load_weights(self, weights) -> None:
        super().load_weights((name, tensor) for name, tensor in weights if name != HEAD)


class TiedHost(Host):
    """One whose run has the head, which the engine was not started with."""

    def __init__(self, store, root) -> None:
        super().__init__(store, root, kind=Tying)

    def first(self, directory: Path) -> dict[str, torch.Tensor]:
        return with_head(make(directory, "tied", 1))

    def step(self, density: float = 0.02) -> str:
        return self.publish(with_head(step(self.versions[-1], len(self.versions), density)))


@pytest.fixture
def host(store, tmp_path):
    host = TiedHost(store, tmp_path)
    yield host
    host.publisher.close()
    host.follower.close()


def test_versions_with_the_head_are_patched(host, tmp_path):
    for version, density in enumerate((0.02, 0.2, 0.001), 1):
        label = host.step(density)
        host.told(None)
        assert reply(host.live.patch(label))["patched"] == label and host.holds(version)
    assert HEAD in read_checkpoint(tmp_path / "host")


def test_head_that_ranks_published_apart_is_compared(host, store):
    host.publisher.close()
    host.publisher = store.publisher(resume=True, rank=0, ranks=1)
    for version in (1, 2):
        host.versions.append(with_head(step(host.versions[-1], version, 0.02)))
        host.publisher.publish(host.versions[-1], attempt=f"job-{version}")
        host.follower.advance()
        host.told(None)
        assert host.live.patch(host.label()) and host.holds(version)


def test_head_that_parts_from_the_embedding_is_not_patched(host):
    new = with_head(step(host.versions[-1], 1, 0.02))
    new[HEAD] = new[HEAD].clone()
    new[HEAD][0, 0] += 1
    label = host.publish(new)
    host.told("the word embeddings")
    assert host.live.patch(label) is None


class Copying(nn.Module):
    """An engine's model that keeps each tensor as it is, but for the head."""

    config = types.SimpleNamespace(text_config=types.SimpleNamespace(tie_word_embeddings=True))

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        held = {name.replace(".", "/"): tensor.clone() for name, tensor in tensors.items() if name != HEAD}
        self.held = nn.ParameterDict(held).requires_grad_(False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name != HEAD:
                self.held[name.replace(".", "/")].data.copy_(tensor)


class Rollout:
    """An engine that was started with the tensors in `start`, and a follower of the first page's run."""

    label, told = Host.label, Host.told

    def __init__(self, store: Store, start: Path) -> None:
        self.directory, self.where, self.patched = store.root / "host", store.root / "plugins", 0
        self.model = Copying(load_file(start / "model.safetensors"))
        self.live = live_model(self.model, start, self.where, (30000, 0, 1))
        self.follower = driftless_rl.Follower(store.url, "my-run", self.directory, plugin_dir=self.where)

    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.directory / "model.safetensors")

    def load(self) -> None:
        self.follower.advance()
        self.model.load_weights(self.tensors().items())
        self.live.loaded(self.label())

    def patch(self) -> None:
        self.follower.advance()
        self.told(None)
        assert reply(self.live.patch(self.label()))["patched"] == self.label()
        self.patched += 1
        expected = {name.replace(".", "/"): tensor for name, tensor in self.tensors().items()}
        assert expected.keys() == self.model.held.keys()
        assert all(torch.equal(expected[name], tensor) for name, tensor in self.model.held.items())


@pytest.mark.parametrize("both", [False, True], ids=["without", "with"])
def test_code_of_the_first_page_patches_a_tied_model(store, monkeypatch, both):
    """Its engine was started from a checkpoint with the head, or without it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(store.root / "cache"))
    start, page = store.root / "start", Path(__file__).parents[2] / "docs/python.md"
    dense(tie_word_embeddings=True).bfloat16().save_pretrained(start)
    if both:
        tensors = load_file(start / "model.safetensors")
        save_file(tensors | {HEAD: tensors[EMBED].clone()}, start / "model.safetensors", metadata={"format": "pt"})
    code = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1]
    for here, found in [("/models/Qwen3-0.6B", str(start)), ("file:///shared/store", store.url), ("lr=1e-6", "lr=1e-5")]:
        assert code.count(here) == 1
        code = code.replace(here, found)
    rollout = Rollout(store, start)

    def batches():
        for number in range(4):
            if number == 1:
                rollout.load()
            elif number > 1:
                rollout.patch()
            ids = torch.arange(12).reshape(2, 6) + number
            yield {"input_ids": ids, "labels": ids}

    exec(code, {"batches": batches()})
    rollout.patch()
    assert rollout.patched == 3
    rollout.follower.close()
