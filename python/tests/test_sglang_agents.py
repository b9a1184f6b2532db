"""Agents as users train them: an environment of ``verifiers``, the clients of two vendors and TRL have a stock SGLang answer,
its weights are patched after each step, and each token that was trained on is proven.

``DRIFTLESS_AGENTS_TOKENIZER`` names a checkpoint whose tokenizer and chat template the model has; ``DRIFTLESS_VERIFIERS_PYTHON``
and ``DRIFTLESS_CLIENTS_PYTHON`` the interpreters that have these packages.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import driftless_rl
import pytest
import torch
from driftless_rl.transformers import PublishCallback
from driftless_rl.trl import fleet_rollouts
from servers import MOVED, until
from sglang_engine import STAND_INS, Sglang
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

TOKENIZER = os.environ.get("DRIFTLESS_AGENTS_TOKENIZER")
VERIFIERS = os.environ.get("DRIFTLESS_VERIFIERS_PYTHON")
CLIENTS = os.environ.get("DRIFTLESS_CLIENTS_PYTHON")
pytestmark = [
    pytest.mark.skipif(not STAND_INS, reason="DRIFTLESS_SGLANG_PYTHONPATH is not set"),
    pytest.mark.skipif(not TOKENIZER, reason="DRIFTLESS_AGENTS_TOKENIZER is not set"),
]
STEPS = 3
DRIFTLESS = [sys.executable, "-m", "driftless_rl"]

# Two turns, and the more words begin with a letter the more it is worth.
ENVIRONMENT = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    letter: str

class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def said(self, trace) -> float:
        return float(trace.transcript.lower().count(self.data.letter))

class Letters(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for letter in "etaoinsh":
            yield Task(Data(prompt=f"Use {letter} often.", letter=letter), self.config.task)

class Settings(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Twice(vf.Env[Settings]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("And once more.")

__all__ = ["Letters", "Twice"]
"""

HOOK = """
from anthropic import AsyncAnthropic
from driftless_rl.hook import generate, reward
from openai import AsyncOpenAI

@generate
async def answer(turn):
    messages = [{"role": "user", "content": turn.prompt}]
    for asked in ("Again.", "Once more."):
        if turn.label == "openai":
            client = AsyncOpenAI(base_url=turn.base_url, api_key=turn.api_key, max_retries=0)
            said = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message.content
        else:
            client = AsyncAnthropic(base_url=turn.base_url.removesuffix("/v1"), api_key=turn.api_key, max_retries=0)
            async with client.messages.stream(model="policy", max_tokens=8, messages=messages) as stream:
                said = await stream.get_final_text()
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": asked}]

@reward
def score(samples):
    return [float(sample.response.count("e")) for sample in samples]
"""


def write_model(directory: Path) -> Path:
    """A random model with a real tokenizer."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(TOKENIZER)),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(directory)
    shutil.copy(Path(TOKENIZER) / "generation_config.json", directory)
    return directory


class Patched:
    """A server, and a follower that patches it with each version of a run."""

    def __init__(self, root: Path, forks) -> None:
        self.root, self.base = root, write_model(root / "base")
        self.store, self._lines = (root / "store").as_uri(), root / "lines"
        self._ended = contextlib.ExitStack()
        self.server = Sglang(root, self.base, forks=forks)
        self._ended.callback(self.server.end)
        follow = [*DRIFTLESS, "follow", "--store", self.store, "--run", "run", "--checkpoint-dir", root / "host"]
        follow += ["--hf-checkpoint", self.base, "--engine", self.server.url, "--plugin-dir", self.server.plugins]
        with self._lines.open("w") as shown:
            self._follower = subprocess.Popen([*follow, "--poll-ms", "50", "--plugin", "auto"], stdout=shown)
        self._ended.callback(self._follower.wait, MOVED)
        self._ended.callback(self._follower.terminate)

    def __enter__(self) -> "Patched":
        return self

    def __exit__(self, *raised) -> None:
        self._ended.close()

    def train(self, *flags: str, python: str, **environment: str) -> Path:
        """Three steps of a run of two prompts and two answers each; its directory. Programs of ``python`` see the wheel."""
        run, package = self.root / "rl", Path(driftless_rl.__file__).parents[1]
        own = {
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{self.root}:{package}",
            "HOME": str(self.root),
        }
        command = [*DRIFTLESS, "train", "--store", self.store, "--run", "run", "--hf-checkpoint", self.base, "--save", run]
        command += ["--rollout-external-engine-addrs", f"127.0.0.1:{self.server.port}", "--num-rollout", str(STEPS)]
        command += ["--learner", f"exec '{sys.executable}' -m driftless_rl.learner --device cpu", "--lr", "1e-5"]
        command += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"]
        command += ["--entropy-coef", "0.01", *flags]
        subprocess.run(command, env=os.environ | own | environment, timeout=900, check=True)
        return run

    def until_patched(self) -> None:
        """Waits for the last version, and sees that all but the first were patched."""
        count = STEPS + 1
        until("line of each version", MOVED, lambda: len(self._lines.read_text().splitlines()) == count, [self.server.log])
        assert self.server.patched() == STEPS, self._lines.read_text()


@pytest.fixture
def patched(tmp_path, forks):
    with Patched(tmp_path, forks) as made:
        yield made


def assert_proven(run: Path, samples: int) -> None:
    """Each trained token of a run is one that the engine drew, and each answer has two turns of the policy."""
    said = subprocess.run([*DRIFTLESS, "verify", run, "--json"], capture_output=True, text=True, timeout=120)
    report = json.loads(said.stdout)
    assert said.returncode == 0 and report["faults"] == 0, said
    assert (report["steps"], report["samples"], report["replies"]) == (STEPS, samples, 2 * samples), report
    assert report["tokens"] > 0 and not any(report["unchecked"].values()), report


@pytest.mark.skipif(not VERIFIERS, reason="DRIFTLESS_VERIFIERS_PYTHON is not set")
def test_environment_of_verifiers_trains_and_each_token_is_proven(patched):
    (patched.root / "letters.py").write_text(ENVIRONMENT)
    settings = json.dumps({"player": {"harness": {"id": "null"}}})
    run = patched.train("--environment", "verifiers:letters", "--environment-args", settings, python=VERIFIERS)
    patched.until_patched()
    assert_proven(run, 4 * STEPS)


@pytest.mark.skipif(not CLIENTS, reason="DRIFTLESS_CLIENTS_PYTHON is not set")
def test_clients_of_both_vendors_train_and_each_token_is_proven(patched):
    (patched.root / "hook.py").write_text(HOOK)
    rows = [{"text": f"Question {n}", "label": ("openai", "anthropic")[n % 2]} for n in range(4)]
    prompts = patched.root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    hook = f"exec '{CLIENTS}' -m driftless_rl.hook '{patched.root / 'hook.py'}'"
    flags = ["--custom-generate-command", hook, "--custom-rm-command", hook, "--prompt-data", prompts]
    run = patched.train(*flags, "--input-key", "text", "--label-key", "label", python=CLIENTS)
    patched.until_patched()
    assert_proven(run, 4 * STEPS)


def test_rollout_func_of_trl_draws_by_each_published_version(patched):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    drawn, root = [], patched.root

    def letters(completions, versions, **columns):
        drawn.append(versions)
        return [float(text.count("e")) for text in completions]

    publish = PublishCallback(patched.store, "run", baseline_dir=root / "baseline")
    arguments = GRPOConfig(
        output_dir=str(root / "out"),
        num_generations=2,
        max_completion_length=8,
        beta=0.0,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-5,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    with driftless_rl.Fleet([patched.server.url], patched.base) as fleet:
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(patched.base, dtype=torch.bfloat16),
            letters,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["a b", "b c", "c d", "d e"]}),
            processing_class=AutoTokenizer.from_pretrained(patched.base),
            callbacks=[publish],
            rollout_func=fleet_rollouts(fleet, publish),
        )
        trainer.train()
    patched.until_patched()
    run = publish.published.label.split(":")[0]
    labels = [{label for spans in step for label, _, _ in spans} for step in drawn]
    assert labels == [{f"{run}:{step}"} for step in range(STEPS)]
