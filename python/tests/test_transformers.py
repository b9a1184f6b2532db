"""The callback, under the real Trainer, on tiny models."""

import json

import driftless_rl
import pytest
import torch
from conftest import Store, read_checkpoint, run_command
from driftless_rl.transformers import PublishCallback, hf_state_dict
from tiny import dense, moe
from transformers import AutoModelForCausalLM, Trainer, TrainerState, TrainingArguments


def train(store: Store, model, steps: int, resume=None, every=1, arguments={}, **settings):
    settings = {"baseline_dir": store.baseline, **settings}
    callback = PublishCallback(store.url, "run", publish_every=every, **settings)
    arguments = TrainingArguments(
        output_dir=str(store.root / "out"),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_steps": 2, **arguments},
    )
    rows = [{"input_ids": [i % 64, 3, 5, 7], "labels": [i % 64, 3, 5, 7]} for i in range(32)]
    Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[callback]).train(resume_from_checkpoint=resume)
    return callback


def host(store: Store):
    directory = store.root / "host"
    run_command("follow", "--store", store.url, "--run", "run", "--checkpoint-dir", str(directory), "--once")
    return directory


def content(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("make", [dense, lambda: dense(tie_word_embeddings=True), moe], ids=["dense", "tied", "moe"])
def test_trainer_publishes_what_it_would_save(store, make):
    model = make()
    callback = train(store, model, steps=3)
    assert callback.published.version == 3 and 0 < callback.published.changed
    model.save_pretrained(store.root / "saved")
    saved, found = read_checkpoint(store.root / "saved"), read_checkpoint(host(store))
    assert found == saved
    again = type(model).from_pretrained(store.root / "host", dtype="auto")
    ids = torch.arange(8).unsqueeze(0)
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    assert json.loads((store.root / "host/config.json").read_text())["architectures"] == [type(model).__name__]


def test_trainer_that_goes_on_goes_on_with_the_run(store):
    train(store, dense(), steps=2)
    model = dense()
    callback = train(store, model, steps=5, resume=str(store.root / "out/checkpoint-2"), every=2)
    # Versions 0 to 2 before; then at the begin, after step 4, and after the last one.
    assert callback.published.version == 5
    assert read_checkpoint(host(store))["lm_head.weight"][2] == content(model.lm_head.weight)


@pytest.mark.parametrize("step", [0, 2])
def test_model_is_published_when_a_training_goes_on(store, step):
    train(store, dense(), steps=3)
    saved = AutoModelForCausalLM.from_pretrained(store.root / "out/checkpoint-2") if step else dense()
    callback = PublishCallback(store.url, "run", baseline_dir=store.baseline, resume="auto")
    callback.on_train_begin(None, TrainerState(global_step=step), None, model=saved)
    assert callback.published.version == 4 and callback.published.changed > 0
    assert read_checkpoint(host(store))["lm_head.weight"][2] == content(saved.lm_head.weight)
    callback.on_train_end(TrainingArguments(use_cpu=True), TrainerState(global_step=step), None, model=saved)


def test_newest_version_is_the_best_model_where_it_is_loaded(store):
    model = dense()
    # The loss falls: the best model by this is the one after the first step.
    best = dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True)
    callback = train(store, model, steps=3, arguments=dict(save_steps=1, eval_strategy="steps", eval_steps=1, **best))
    assert callback.published.version == 4 and callback.published.changed > 0
    first = AutoModelForCausalLM.from_pretrained(store.root / "out/checkpoint-1")
    assert torch.equal(first.lm_head.weight, model.lm_head.weight)
    assert read_checkpoint(host(store))["lm_head.weight"][2] == content(model.lm_head.weight)


def test_floats_are_published_as_the_dtype_that_is_asked_for(store):
    model = dense()
    train(store, model, steps=1, dtype=torch.bfloat16)
    tensors = read_checkpoint(host(store))
    assert {dtype for dtype, _, _ in tensors.values()} == {"BF16"}
    assert tensors["lm_head.weight"][2] == content(model.lm_head.weight.bfloat16())


def test_steps_below_one_are_refused(store):
    with pytest.raises(driftless_rl.UsageError):
        PublishCallback(store.url, "run", publish_every=0)


@pytest.mark.parametrize(
    "wrap",
    [torch.compile, torch.nn.DataParallel, lambda model: torch.nn.DataParallel(torch.compile(model))],
    ids=["compiled", "parallel", "both"],
)
def test_wrapped_model_has_the_names_of_its_checkpoint(wrap):
    model = dense()
    assert hf_state_dict(wrap(model)).keys() == hf_state_dict(model).keys()


def test_parameters_that_zero_3_partitioned_are_refused_on_every_process(store):
    model = dense()
    # What DeepSpeed marks them with.
    model.lm_head.weight.ds_id = 0
    callback = PublishCallback(store.url, "run", baseline_dir=store.baseline)
    for first in (True, False):
        with pytest.raises(driftless_rl.UsageError, match="ZeRO-3"):
            callback.on_train_begin(None, TrainerState(is_world_process_zero=first), None, model=model)
