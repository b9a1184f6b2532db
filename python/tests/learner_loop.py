"""The loop's side of the learner's protocol, and tiny models that it trains."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import driftless_rl
import numpy as np
import torch
from driftless_rl.learner._learner import Learner
from driftless_rl.learner._options import Options
from driftless_rl.learner._ranks import Ranks
from driftless_rl.learner._serve import serve
from safetensors.torch import load_file, save_file
from transformers import MambaConfig, MambaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
EXPERTS = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24)
MODELS = {
    "dense": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL)),
    "tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True)),
    "tied-twice": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True)),
    "moe-gates": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS)),
    "moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS)),
    "mamba": lambda: MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)),
}
# Every option at its default, as the page of the protocol shows them.
PAGE = (Path(__file__).parents[2] / "docs/wire/learner.md").read_text()
DEFAULTS = json.loads(PAGE.split("at their defaults:\n\n")[1].split("\n\n")[0])
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "max_tokens_per_gpu": 16}
# Long enough for a loaded machine; only a hang reaches it.
DEADLINE = 300.0
CPU = Ranks(0, 1, torch.device("cpu"), DEADLINE)


def told(**options) -> dict:
    """``options`` and ``changed`` of a ``hello``."""
    return {"options": DEFAULTS | options, "changed": list(options)}


def options(**given) -> Options:
    """Those that a learner takes from a ``hello`` with these and defaults."""
    temperature = given.pop("temperature", 1.0)
    return Options.of(told(**given) | {"temperature": temperature})


def write_model(directory: Path, kind: str, dtype: torch.dtype) -> Path:
    """Writes a random checkpoint with a tokenizer's file."""
    torch.manual_seed(3)
    MODELS[kind]().to(dtype).save_pretrained(directory)
    if kind == "tied-twice":
        # Some checkpoints have the embedding a second time, as the head.
        tensors = load_file(directory / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if kind == "moe-gates":
        # Some checkpoints have the gates of their routers in f32.
        tensors = load_file(directory / "model.safetensors")
        tensors |= {name: torch.randn(tensor.shape) for name, tensor in tensors.items() if name.endswith("mlp.gate.weight")}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "tokenizer.json").write_text('{"of": "tests"}')
    return directory


class Loop:
    """A run with version 0 and a log of five samples, and a learner that is asked."""

    def __init__(self, root: Path, kind: str = "dense", dtype: torch.dtype = torch.float32) -> None:
        self.root, self.store = root, (root / "store").as_uri()
        self.checkpoint = write_model(root / "hf", kind, dtype)
        with driftless_rl.Publisher(self.store, "run", hf_checkpoint=self.checkpoint, baseline_dir=root / "baseline") as publisher:
            publisher.publish_reference(self.checkpoint)
            self.run_id = publisher.run_id
        self.log = driftless_rl.RolloutLog(root / "log", self.run_id)
        random = np.random.default_rng(5)
        for at, response in enumerate((3, 5, 2, 7, 1)):
            mask = np.ones(response, np.uint8)
            mask[1:2] = 0
            self.append(at, random.integers(0, 64, 3 + response), random.normal(-2, 0.5, response), mask)
        self.samples = [{"position": at, "rollout_id": at // 2, "advantage": (1.0, -0.5)[at % 2]} for at in range(5)]

    def append(self, sample_id: int, tokens, log_probs, mask) -> int:
        ids = {"sample_id": sample_id, "group_id": sample_id // 2, "rollout_id": 0}
        return self.log.append(**ids, tokens=tokens, prompt_len=3, log_probs=log_probs, loss_mask=mask)

    def hello(self, **fields) -> dict:
        hello = {
            "protocol": 3,
            "hf_checkpoint": str(self.checkpoint),
            "save": str(self.root / "save"),
            "keep": 2,
            "log": str(self.root / "log"),
            "store": self.store,
            "run": "run",
            "run_id": self.run_id,
            "model": "policy",
            "baseline_dir": str(self.root / "baseline"),
            "seed": 7,
            "temperature": 0.9,
        }
        return hello | told(**OPTIONS | fields.pop("options", {})) | fields


class Asked:
    """A learner on a socket: a thread of this process, or processes that ``command`` starts."""

    def __init__(self, root: Path, command: list[str] | None = None, ranks: Ranks = CPU) -> None:
        path = root / f"socket-{len(list(root.glob('socket-*')))}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(DEADLINE)
            listener.bind(str(path))
            listener.listen(1)
            if command is None:
                begin = lambda hello: Learner(hello, ranks, None, {})
                self.thread = threading.Thread(target=serve, args=(str(path), ranks, begin), daemon=True)
                self.thread.start()
            else:
                self.lock = (root / "lock").open("a+b")
                environment = os.environ | {"DRIFTLESS_LEARNER_SOCKET": str(path)}
                self.process = subprocess.Popen(
                    [sys.executable, "-m", *command], stdin=self.lock, env=environment, start_new_session=True
                )
            self.connection, _ = listener.accept()
        self.connection.settimeout(DEADLINE)
        self.lines = self.connection.makefile("rb")
        self.asked = 0

    def ask(self, call: str, **fields) -> dict:
        """The reply, without its number."""
        self.asked += 1
        self.connection.sendall(json.dumps({"id": self.asked, "call": call, **fields}).encode() + b"\n")
        reply = json.loads(self.lines.readline())
        assert reply.pop("id") == self.asked
        return reply

    def close(self) -> None:
        """Closes the socket, and waits for the learner, which ends by itself."""
        self.lines.close()
        self.connection.close()
        if hasattr(self, "thread"):
            self.thread.join(DEADLINE)
            assert not self.thread.is_alive()
        else:
            assert self.process.wait(DEADLINE) == 0
            self.lock.close()
