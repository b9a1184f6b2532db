"""The callback, under TRL's trainers, on tiny models."""

import json
from concurrent.futures import Future
from types import SimpleNamespace

import driftless_rl
import pytest
import tiny
from conftest import read_checkpoint, run_command
from datasets import Dataset
from driftless_rl.transformers import PublishCallback
from driftless_rl.trl import fleet_rollouts
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

ARGUMENTS = dict(
    max_steps=2,
    per_device_train_batch_size=2,
    learning_rate=1e-3,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
)


def sft(store, callback, **settings):
    arguments = SFTConfig(output_dir=str(store.root / "out"), max_length=8, **ARGUMENTS)
    rows = Dataset.from_dict({"text": ["a b c d", "b c d e", "c d e f", "d e f g"]})
    return SFTTrainer(
        tiny.speaker(), args=arguments, train_dataset=rows, processing_class=tiny.tokenizer(), callbacks=[callback], **settings
    )


def grpo(store, callback, **settings):
    def lengths(completions, **columns):
        return [float(index % 2) for index, _ in enumerate(completions)]

    arguments = GRPOConfig(
        output_dir=str(store.root / "out"), num_generations=2, max_completion_length=4, beta=0.0, **ARGUMENTS
    )
    rows = Dataset.from_dict({"prompt": ["a b", "b c", "c d", "d e"]})
    return GRPOTrainer(
        tiny.speaker(),
        lengths,
        args=arguments,
        train_dataset=rows,
        processing_class=tiny.tokenizer(),
        callbacks=[callback],
        **settings,
    )


@pytest.mark.parametrize("make", [sft, grpo])
def test_trl_trainer_publishes_what_it_would_save(store, make):
    callback = PublishCallback(store.url, "run", baseline_dir=store.baseline)
    trainer = make(store, callback)
    trainer.train()
    assert callback.published.version == 2 and callback.published.changed > 0
    trainer.save_model(store.root / "saved")
    host = store.root / "host"
    run_command("follow", "--store", store.url, "--run", "run", "--checkpoint-dir", str(host), "--once")
    assert read_checkpoint(host) == read_checkpoint(store.root / "saved")
    assert json.loads((host / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert (host / "tokenizer.json").exists()


@pytest.mark.parametrize("make", [sft, grpo])
def test_adapters_are_refused_before_a_run_begins(store, make):
    callback = PublishCallback(store.url, "run", baseline_dir=store.baseline)
    trainer = make(store, callback, peft_config=LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(driftless_rl.UsageError, match="merge_and_unload"):
        trainer.train()
    assert not (store.root / "store").exists()


class Scribe:
    """A fleet whose engines write two tokens, and which remembers what it was asked."""

    def __init__(self) -> None:
        self.asked = []

    def submit(self, input_ids, **settings):
        self.asked.append((list(input_ids), settings))
        future = Future()
        versions = [(settings["min_version"], 0, 2)]
        future.set_result(SimpleNamespace(output_ids=[3 + len(self.asked) % 8, 1], log_probs=[-0.5, -0.25], versions=versions))
        return future


@pytest.mark.parametrize("prompts", [["a b", "b c", "c d", "d e"], [[{"role": "user", "content": "a b"}]] * 4], ids=["text", "chat"])
def test_grpo_learns_what_a_fleet_draws_by_its_newest_weights(store, prompts):
    fleet, rewarded = Scribe(), []

    def lengths(completions, completion_ids, versions, **columns):
        rewarded.append((completion_ids, versions))
        return [float(index % 2) for index, _ in enumerate(completions)]

    publish = PublishCallback(store.url, "run", baseline_dir=store.baseline)
    arguments = GRPOConfig(
        output_dir=str(store.root / "out"), num_generations=2, max_completion_length=4, temperature=0.7, beta=0.0, **ARGUMENTS
    )
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}a {{ message.content }} b{% endfor %}"
    trainer = GRPOTrainer(
        tiny.speaker(),
        lengths,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[publish],
        rollout_func=fleet_rollouts(fleet, publish),
    )
    trainer.train()
    assert len(fleet.asked) == 4 and publish.published.version == 2 and publish.published.changed > 0
    first = [settings["min_version"] for _, settings in fleet.asked]
    run = publish.published.label.split(":")[0]
    assert first == [f"{run}:0", f"{run}:0", f"{run}:1", f"{run}:1"]
    settings = fleet.asked[0][1]
    assert (settings["temperature"], settings["max_new_tokens"], settings["top_k"]) == (0.7, 4, -1)
    wanted = {len(tokenizer(text)["input_ids"]) for text in (["a b"] if isinstance(prompts[0], str) else ["a a b b"])}
    assert {len(ids) for ids, _ in fleet.asked} == wanted
    assert [ids for ids, _ in rewarded] == [[[4, 1], [5, 1]], [[6, 1], [7, 1]]]
    assert rewarded[1][1] == [[(f"{run}:1", 0, 2)]] * 2


def test_settings_that_a_fleet_does_not_know_are_refused():
    trainer = SimpleNamespace(min_p=0.1, repetition_penalty=1.0)
    with pytest.raises(driftless_rl.UsageError, match="min_p: expected 0.0, found 0.1"):
        fleet_rollouts(Scribe())(["a"], trainer)
