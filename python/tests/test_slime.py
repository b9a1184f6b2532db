"""slime's hook, called as slime calls it."""

import importlib
import json
from argparse import Namespace
from pathlib import Path

import driftless_rl
import driftless_rl.slime
import pytest
import torch
from conftest import CONFIG
from safetensors.torch import save_file

HOOK = "driftless_rl.slime.publish"


@pytest.fixture(autouse=True)
def trainer_that_ends():
    yield end
    end()


def end():
    """What the end of the trainer's process does."""
    while driftless_rl.slime._publishers:
        driftless_rl.slime._publishers.popitem()[1].close()


class Slime:
    """The part of slime that writes a version and calls the hook, with its names and order."""

    def __init__(self, root: Path, hook: str = HOOK, **settings) -> None:
        self.args = Namespace(
            update_weight_mode="full",
            update_weight_transport="disk",
            update_weight_disk_dir=str(root / "weights"),
            custom_update_weight_post_write_path=hook,
            hf_checkpoint="/models/start",
            **settings,
        )
        self.rollout_engines = (object(), object())
        self.weight_version = 0
        # `--custom-update-weight-post-write-path` is a module and a function in it.
        module, _, name = self.args.custom_update_weight_post_write_path.rpartition(".")
        self.hook = getattr(importlib.import_module(module), name)

    def update_weights(self, tensors):
        self.weight_version += 1
        version_dir = Path(self.args.update_weight_disk_dir) / f"weight_v{self.weight_version:06d}"
        version_dir.mkdir(parents=True)
        shards = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
        index = {}
        for number, shard in enumerate(shards):
            name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, version_dir / name)
            index |= dict.fromkeys(shard, name)
        (version_dir / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        (version_dir / "config.json").write_bytes(CONFIG)
        return self.hook(self.args, str(version_dir), list(self.rollout_engines))


def where(store, **settings):
    return dict(
        driftless_store=store.url, driftless_run="run", driftless_settings={"baseline_dir": str(store.baseline), **settings}
    )


def content(tensors):
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def weights(seed: int):
    torch.manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(64, 8, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(8),
        "model.layers.0.mlp.up_proj.weight": torch.randn(16, 8).to(torch.float8_e4m3fn),
    }


def test_versions_that_slime_writes_are_published(store):
    slime = Slime(store.root, **where(store))
    tensors = weights(1)
    assert slime.update_weights(tensors).version == 0
    tensors["model.norm.weight"][3] = 2.0
    published = slime.update_weights(tensors)
    assert (published.version, published.changed) == (1, 1)
    found = store.follow()
    assert {name: bytes for name, (_, _, bytes) in found.items()} == content(tensors)
    steps = [json.loads(path.read_text())["trainer_step"] for path in store.manifests()]
    assert steps == [1, 2]


def test_trainer_that_was_started_again_goes_on_with_the_run(store, tmp_path, trainer_that_ends):
    Slime(tmp_path / "first", **where(store)).update_weights(weights(1))
    trainer_that_ends()
    # slime counts from 1 again.
    assert Slime(tmp_path / "second", **where(store)).update_weights(weights(2)).version == 1


def test_ranks_behind_the_first_publish_nothing(store, monkeypatch):
    slime = Slime(store.root, **where(store))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert slime.update_weights(weights(1)) is None
    assert not (store.root / "store").exists()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "change, word",
    [
        (dict(update_weight_mode="delta"), "--layout slime"),
        (dict(driftless_store=None), "driftless_store"),
        (dict(driftless_run=""), "driftless_run"),
    ],
)
def test_settings_that_cannot_be_are_refused_on_every_rank(store, monkeypatch, rank, change, word):
    slime = Slime(store.root, **where(store))
    vars(slime.args).update(change)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    with pytest.raises(driftless_rl.UsageError, match=word):
        slime.update_weights(weights(1))
    assert not (store.root / "store").exists()


def test_other_errors_than_a_missing_run_are_not_hidden(store):
    with store.publisher():
        with pytest.raises(driftless_rl.BusyError):
            Slime(store.root, **where(store)).update_weights(weights(1))
    assert store.manifests() == []
