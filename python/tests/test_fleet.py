"""Fleets that cannot be. What a fleet gets from an engine is in `test_sglang_server.py`."""

import json
import socket
from pathlib import Path

import driftless_rl
import pytest

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("engines", [[], ["a:1", "http://a:1"], ["tgi+http://a:1"], ["http://user:secret@a:1"]], ids=str)
def test_addresses_that_cannot_be_are_refused(checkpoint, engines):
    with pytest.raises(driftless_rl.UsageError) as raised:
        driftless_rl.Fleet(engines, checkpoint)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("settings", [{"api_key": ""}, {"deadline": -1.0}], ids=str)
def test_settings_that_cannot_be_are_refused(checkpoint, settings):
    with pytest.raises(driftless_rl.UsageError):
        driftless_rl.Fleet(["127.0.0.1:1"], checkpoint, **settings)


def test_directory_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(driftless_rl.UsageError, match="config.json"):
        driftless_rl.Fleet(["127.0.0.1:1"], tmp_path)


def test_engine_that_is_not_there_is_named(checkpoint):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(driftless_rl.DeadlineError, match=url):
            driftless_rl.Fleet([url], checkpoint)
