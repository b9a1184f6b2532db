"""The callback, under TRL's trainers, on tiny models."""

import json

import driftless_rl
import pytest
import tiny
from conftest import read_checkpoint, run_command
from datasets import Dataset
from driftless_rl.transformers import PublishCallback
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
