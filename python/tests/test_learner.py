"""The learner through its protocol, on a real socket, log and store."""

import base64
import json
import math
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import driftless_rl
import numpy as np
import pytest
import torch
from conftest import read_checkpoint, run_command
from driftless_rl.learner import _attention
from driftless_rl.learner._ranks import Ranks, Refused
from driftless_rl.learner._serve import serve
from learner_loop import CPU, DEADLINE, OPTIONS, Asked, Loop, write_model
from test_learner_model import loops
from transformers import AutoModelForCausalLM


@pytest.fixture
def loop(tmp_path):
    return Loop(tmp_path)


@pytest.fixture
def asked(loop):
    learner = Asked(loop.root)
    yield learner
    learner.close()


def follow(loop, name="host"):
    """Has the command bring a host to the newest version, and reads every tensor of it."""
    host = loop.root / name
    given = ["--store", loop.store, "--run", "run", "--checkpoint-dir", str(host), "--hf-checkpoint", str(loop.checkpoint)]
    run_command("follow", *given, "--once")
    return read_checkpoint(host)


def values(tensors):
    """Tensors of a checkpoint as f64."""
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    return {
        name: torch.frombuffer(bytearray(content), dtype=dtypes[dtype]).reshape(shape).double()
        for name, (dtype, shape, content) in tensors.items()
    }


def by_hand(loop):
    """Loss, gradients and entropy of the first step in f64, one sample after the other."""
    model = AutoModelForCausalLM.from_pretrained(loop.checkpoint, dtype=torch.float64)
    reader = driftless_rl.RolloutReader(loop.root / "log")
    records = [reader.get(sample["position"]) for sample in loop.samples]
    rollouts = [sample["rollout_id"] for sample in loop.samples]
    counts = {one: sum(int(r.loss_mask.sum()) for r, id in zip(records, rollouts) if id == one) for one in set(rollouts)}
    loss, entropy, apart = torch.zeros((), dtype=torch.float64), 0.0, []
    for record, sample in zip(records, loop.samples):
        tokens = torch.from_numpy(record.tokens.astype(np.int64)).unsqueeze(0)
        log_probs = torch.log_softmax(model(input_ids=tokens).logits[0] / 0.9, -1)
        for at in np.flatnonzero(record.loss_mask):
            row, weight = log_probs[record.prompt_len + at - 1], 1 / (len(counts) * counts[sample["rollout_id"]])
            new = row[record.response[at]]
            ratio = (new - float(record.log_probs[at])).exp()
            gain = ratio * sample["advantage"], ratio.clamp(0.8, 1.2) * sample["advantage"]
            loss = loss - weight * torch.minimum(*gain)
            entropy -= weight * (row.exp() * row).sum().item()
            apart.append(abs(new.item() - float(record.log_probs[at])))
    loss.backward()
    return loss.item(), entropy, sorted(apart), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_step_is_that_of_loops_in_float64_and_reaches_a_follower(loop, asked):
    hello = asked.ask("hello", **loop.hello(options={"use_rollout_logprobs": True}))
    assert hello["protocol"] == 3 and hello["progress"] is None and "qwen3" in hello["name"]
    stats = asked.ask("step", rollout_id=0, samples=loop.samples)["stats"]
    loss, entropy, apart, gradients = by_hand(loop)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
    wanted = {"loss": loss, "entropy": entropy, "grad_norm": norm, "lr": OPTIONS["lr"]}
    wanted |= {"log_prob_diff_p99": apart[math.ceil(0.99 * len(apart)) - 1], "log_prob_diff_max": apart[-1]}
    assert {name: stats[name] for name in wanted} == pytest.approx(wanted, abs=1e-5)
    assert asked.ask("publish", step=1) == {"version": 1}
    before, after = values(read_checkpoint(loop.checkpoint)), values(follow(loop))
    assert before.keys() == after.keys() == gradients.keys()
    for name, gradient in gradients.items():
        clipped = gradient * min(1.0, 1.0 / norm)
        decay = 1 - OPTIONS["lr"] * OPTIONS["weight_decay"] if gradient.dim() > 1 else 1.0
        # The first step of AdamW: both moments are the gradient's own.
        moved = before[name] * decay - OPTIONS["lr"] * clipped / (clipped.abs() + 1e-8)
        sure = clipped.abs() > 1e-4
        assert sure.any() and (after[name] - moved)[sure].abs().max() < 1e-6, name
        assert torch.allclose(after[name][clipped == 0], (before[name] * decay)[clipped == 0], rtol=1e-6, atol=0.0)


def test_rollout_in_several_steps_is_as_many_small_ones(loop, asked):
    """Where the engines' log-probs are those of the old policy, a step does not look back at those before it."""
    at_once = {"global_batch_size": 1, "use_rollout_logprobs": True}
    asked.ask("hello", **loop.hello(options=at_once))
    found = asked.ask("step", rollout_id=0, samples=loop.samples)["stats"]
    other = Asked(loop.root)
    other.ask("hello", **loop.hello(options={"use_rollout_logprobs": True}))
    single = [other.ask("step", rollout_id=0, samples=loop.samples[at : at + 2])["stats"] for at in (0, 2, 4)]
    for name in ("loss", "grad_norm", "entropy", "ppo_kl"):
        assert found[name] == pytest.approx(sum(stats[name] for stats in single) / 3, abs=1e-7)
    ask = lambda learner: learner.ask("log_probs", rollout_id=0, samples=loop.samples)
    assert ask(asked) == ask(other)
    other.close()


def test_old_policy_is_the_one_before_the_first_of_several_steps(loop, asked):
    options = {"global_batch_size": 1, "lr": 0.01, "clip_grad": 0.0}
    asked.ask("hello", **loop.hello(options=options))
    before = asked.ask("log_probs", rollout_id=0, samples=loop.samples)["log_probs"]
    stats = asked.ask("step", rollout_id=0, samples=loop.samples)["stats"]
    # The first step finds the old policy itself; the later ones do not, and are compared with it.
    assert abs(stats["ppo_kl"]) > 1e-5
    log = driftless_rl.RolloutReader(loop.root / "log")
    apart = []
    for values, sample in zip(before, loop.samples):
        record = log.get(sample["position"])
        apart += [abs(a - b) for a, b, mask in zip(values, record.log_probs, record.loss_mask) if mask]
    assert stats["log_prob_diff_max"] == pytest.approx(max(apart), abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"global_batch_size": 1}])
def test_step_tells_the_log_probs_before_it_if_it_is_asked(loop, asked, options):
    asked.ask("hello", **loop.hello(options={"lr": 0.01, **options}))
    before = np.concatenate(asked.ask("log_probs", rollout_id=0, samples=loop.samples)["log_probs"])
    samples = [{**sample, "stale": 1} if at == 3 else sample for at, sample in enumerate(loop.samples)]
    reply = asked.ask("step", rollout_id=0, samples=samples, trained_log_probs=True)
    told = np.frombuffer(base64.b64decode(reply["trained_log_probs"]), "<f4")
    log = driftless_rl.RolloutReader(loop.root / "log")
    masks = [log.get(sample["position"]).loss_mask != 0 for sample in samples]
    masks[3] = np.r_[False, masks[3][1:]]
    trained = np.concatenate(masks)
    assert len(told) == len(before) and (np.isnan(told) == ~trained).all()
    assert told[trained] == pytest.approx(before[trained], abs=1e-5)
    assert "trained_log_probs" not in asked.ask("step", rollout_id=1, samples=samples)


def test_records_that_are_appended_later_are_found(loop, asked):
    asked.ask("hello", **loop.hello())
    first = asked.ask("log_probs", rollout_id=0, samples=loop.samples)["log_probs"]
    assert [len(values) for values in first] == [3, 5, 2, 7, 1]
    position = loop.append(9, [1, 2, 3, 4, 5], [-1.0, -1.0], np.ones(2, np.uint8))
    more = asked.ask("log_probs", rollout_id=1, samples=[{**loop.samples[0], "position": position}, *loop.samples])
    assert np.concatenate(more["log_probs"][1:]) == pytest.approx(np.concatenate(first), abs=1e-6)
    assert len(more["log_probs"][0]) == 2 and max(more["log_probs"][0]) < 0


@pytest.mark.parametrize("kind", ["tied", "tied-twice", "moe"])
def test_versions_and_directories_have_the_state_dict_bit_for_bit(tmp_path, kind):
    loop = Loop(tmp_path, kind, torch.bfloat16)
    asked = Asked(tmp_path)
    asked.ask("hello", **loop.hello(options={"lr": 0.01}))
    for step in (1, 2):
        assert "stats" in asked.ask("step", rollout_id=step - 1, samples=loop.samples)
        assert asked.ask("publish", step=step) == {"version": step}
    found, start = follow(loop), read_checkpoint(loop.checkpoint)
    assert found.keys() == start.keys()
    assert all(found[name][:2] == start[name][:2] and found[name][2] != start[name][2] for name in start)
    for _ in range(2):
        assert asked.ask("save_hf", dir=str(tmp_path / "out")) == {}
    assert read_checkpoint(tmp_path / "out") == found
    names = lambda directory: sorted(path.name for path in directory.iterdir())
    assert names(tmp_path / "out") == names(loop.checkpoint)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (loop.checkpoint / "tokenizer.json").read_bytes()
    # What engines load is what the learner computes with.
    asked.close()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "host", dtype="auto")
    assert again.dtype == torch.bfloat16


def test_tensors_that_would_be_rounded_are_refused_by_name(tmp_path):
    loop = Loop(tmp_path, "moe-gates", torch.bfloat16)
    asked = Asked(tmp_path)
    error = asked.ask("hello", **loop.hello()).get("error", "")
    assert "`model.layers.0.mlp.gate.weight`: expected BF16" in error and "give `--dtype float32`" in error
    asked.close()


def test_tensors_of_another_dtype_are_trained_in_their_own(tmp_path):
    loop = Loop(tmp_path, "moe-gates", torch.bfloat16)
    asked = Asked(tmp_path)
    asked.ask("hello", **loop.hello(options={"dtype": "float32", "lr_warmup_iters": 1}))
    start = read_checkpoint(loop.checkpoint)
    for step in (1, 2):
        assert "stats" in asked.ask("step", rollout_id=step - 1, samples=loop.samples)
        assert asked.ask("publish", step=step) == {"version": step}
        found = follow(loop, f"host-{step}")
        # The learning rate of the first step is 0.
        assert (found == start) == (step == 1)
    gate = values(found)["model.layers.0.mlp.gate.weight"]
    assert found["model.layers.0.mlp.gate.weight"][0] == "F32" and not torch.equal(gate, gate.bfloat16().double())
    # What engines load is what the learner computes with.
    told = asked.ask("log_probs", rollout_id=2, samples=loop.samples)
    asked.close()
    other = Asked(tmp_path)
    fresh = {"hf_checkpoint": str(tmp_path / "host-2"), "save": str(tmp_path / "other")}
    other.ask("hello", **loop.hello(options={"dtype": "float32"}, **fresh))
    assert other.ask("log_probs", rollout_id=2, samples=loop.samples) == told
    other.close()


def test_small_steps_add_up_in_masters_of_a_bf16_model(tmp_path):
    loop = Loop(tmp_path, "dense", torch.bfloat16)
    asked = Asked(tmp_path)
    asked.ask("hello", **loop.hello(options={"lr": 1e-5, "weight_decay": 0.0}))
    for step in range(12):
        asked.ask("step", rollout_id=step, samples=loop.samples)
        if step in (0, 11):
            asked.ask("publish", step=step + 1)
            follow(loop, f"host-{step}")
    asked.close()
    start = read_checkpoint(loop.checkpoint)["lm_head.weight"][2]
    moved = [
        sum(a != b for a, b in zip(start, read_checkpoint(tmp_path / f"host-{step}")["lm_head.weight"][2])) for step in (0, 11)
    ]
    assert 2 * moved[0] < moved[1]


def test_step_that_is_not_finite_leaves_weights_and_moments(loop, asked):
    step = lambda learner, samples: learner.ask("step", rollout_id=0, samples=samples)
    asked.ask("hello", **loop.hello(options={"clip_grad": 0.0}))
    before = asked.ask("log_probs", rollout_id=0, samples=loop.samples)
    huge = [{**sample, "advantage": 1e38} for sample in loop.samples]
    assert step(asked, huge)["not_finite"].startswith("gradient norm is")
    assert asked.ask("log_probs", rollout_id=0, samples=loop.samples) == before
    stats = step(asked, loop.samples)
    assert "stats" in stats
    after = asked.ask("log_probs", rollout_id=0, samples=loop.samples)
    # One that has never seen it goes the same way.
    other = Asked(loop.root)
    other.ask("hello", **loop.hello(options={"clip_grad": 0.0}))
    assert step(other, loop.samples) == stats
    assert other.ask("log_probs", rollout_id=0, samples=loop.samples) == after
    other.close()


def test_process_that_was_killed_goes_on_to_equal_weights(loop):
    """The program itself, its end, and its checkpoints."""
    progress = {"step": 2, "seed": 7, "nested": {"of": ["the loop", 0.1, None]}}
    killed = Asked(loop.root, ["driftless_rl.learner", "--device", "cpu"])
    assert killed.ask("hello", **loop.hello())["progress"] is None
    for step in range(2):
        killed.ask("step", rollout_id=step, samples=loop.samples)
        assert killed.ask("save", progress={**progress, "step": step + 1}) == {}
    whole = killed.ask("step", rollout_id=2, samples=loop.samples)
    expected = killed.ask("log_probs", rollout_id=2, samples=loop.samples)
    os.kill(killed.process.pid, signal.SIGKILL)
    assert killed.process.wait(DEADLINE) == -signal.SIGKILL
    # As if it had been killed within a save.
    (loop.root / "save/partial").mkdir()
    (loop.root / "save/partial/rank-0.safetensors").write_bytes(b"half")
    again = Asked(loop.root)
    assert again.ask("hello", **loop.hello())["progress"] == progress
    assert again.ask("step", rollout_id=2, samples=loop.samples) == whole
    assert again.ask("log_probs", rollout_id=2, samples=loop.samples) == expected
    for _ in range(2):
        assert again.ask("save", progress=progress) == {}
    kept = sorted(path.name for path in (loop.root / "save").iterdir())
    assert kept == ["checkpoint-00000003", "checkpoint-00000004"]
    again.close()


def test_reference_policy_and_entropy_are_part_of_the_loss(loop, asked):
    kl = {"use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.1}
    tis = {"use_tis": True, "tis_clip_low": 0.1, "tis_clip": 1.5}
    asked.ask("hello", **loop.hello(options={**kl, **tis, "entropy_coef": 0.01}))
    first = asked.ask("step", rollout_id=0, samples=loop.samples)["stats"]
    # The reference is what the run starts from.
    assert first["kl_loss"] == pytest.approx(0.0, abs=1e-9) and 0 < first["tis_clipfrac"] < 1
    second = asked.ask("step", rollout_id=1, samples=loop.samples)["stats"]
    assert second["kl_loss"] > 1e-7


def test_rows_are_padded_if_the_reference_cannot_be_packed(loop, asked, monkeypatch):
    # As on a GPU, with a kernel that takes no padded row.
    monkeypatch.setattr(_attention, "takes", lambda device, dtype: True)
    monkeypatch.setattr(_attention, "flash", loops)
    reference = write_model(loop.root / "reference", "mamba", torch.float32)
    kl = {"use_kl_loss": True, "kl_loss_type": "k1", "kl_loss_coef": 0.1, "ref_load": str(reference)}
    hello = asked.ask("hello", **loop.hello(options={**kl, "max_tokens_per_gpu": 64}))
    assert hello["name"].endswith("padded")
    together = asked.ask("step", rollout_id=0, samples=loop.samples)["stats"]
    other = Asked(loop.root)
    # One sample in each batch.
    other.ask("hello", **loop.hello(options={**kl, "micro_batch_size": 1}))
    assert other.ask("step", rollout_id=0, samples=loop.samples)["stats"]["kl_loss"] == pytest.approx(together["kl_loss"], abs=1e-6)
    other.close()


def test_calls_that_cannot_be_are_answered_with_an_error(loop, asked):
    assert "expected `hello`" in asked.ask("step", samples=[])["error"]
    assert "expected protocol 3, found 1" in asked.ask("hello", **loop.hello(protocol=1))["error"]
    assert "`ppo_epochs` is 4" in asked.ask("hello", **loop.hello(options={"ppo_epochs": 4}))["error"]
    assert "expected `log`, a string, found 3" in asked.ask("hello", **loop.hello(log=3))["error"]
    nowhere = asked.ask("hello", **loop.hello(hf_checkpoint=str(loop.root / "nowhere")))
    assert "nowhere" in nowhere["error"]
    assert asked.ask("hello", **loop.hello())["protocol"] == 3
    assert "found a second one" in asked.ask("hello", **loop.hello())["error"]
    step = lambda **sample: asked.ask("step", rollout_id=0, samples=[{**loop.samples[0], **sample}])["error"]
    assert "position 99: expected a record" in step(position=99)
    assert "`position`" in step(position="first") and "`advantage`" in step(advantage=None)
    loop.append(7, [1, 2, 3, 64], [-1.0], np.ones(1, np.uint8))
    assert "expected token ids 0..64, found 1..=64" in step(position=5)
    assert "found 'dance'" in asked.ask("dance")["error"]
    (loop.root / "papers").mkdir()
    (loop.root / "papers/thesis.txt").write_text("all of it")
    assert "expected a Hugging Face directory" in asked.ask("save_hf", dir=str(loop.root / "papers"))["error"]
    assert (loop.root / "papers/thesis.txt").exists()
    # It is still of use.
    assert "stats" in asked.ask("step", rollout_id=0, samples=loop.samples)


def test_line_that_is_no_call_is_answered_with_an_error(loop, asked):
    asked.connection.sendall(b"not json\n")
    assert "expected a JSON object" in json.loads(asked.lines.readline())["error"]


def test_checkpoint_of_another_model_or_a_damaged_one_is_refused(loop, asked):
    asked.ask("hello", **loop.hello())
    assert asked.ask("save", progress={"step": 1}) == {}
    state = loop.root / "save/checkpoint-00000001/state.json"
    content = json.loads(state.read_text())
    hello = lambda: _hello_of_another(loop)
    state.write_text(json.dumps(content | {"model": "0" * 64}))
    assert "found one of 000000000000" in hello()
    state.write_text(json.dumps(content))
    weights = state.with_name("rank-0.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "expected a whole checkpoint" in hello()


def _hello_of_another(loop):
    other = Asked(loop.root)
    error = other.ask("hello", **loop.hello())["error"]
    other.close()
    return error


class Broken:
    """Answers the first call only."""

    def hello(self):
        return {}

    def answer(self, call):
        raise MemoryError("of the GPU")


def test_failure_that_nobody_foresaw_is_answered_and_ends_the_process(loop):
    path = str(loop.root / "socket")
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(path)
        listener.listen(1)
        ended = pool.submit(serve, path, CPU, lambda hello: Broken())
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb") as lines:
            for call in (loop.hello(), {}):
                lines.write(json.dumps({"id": 1, "call": "hello" if call else "step", **call}).encode() + b"\n")
                lines.flush()
                reply = json.loads(lines.readline())
            assert reply == {"id": 1, "error": "MemoryError: of the GPU"}
            assert isinstance(ended.exception(timeout=DEADLINE), MemoryError)


def test_ranks_that_torchrun_did_not_start_are_refused(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(Refused, match="torchrun"):
        Ranks.join(True, "cpu", DEADLINE)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Refused, match="found 2 ranks without it"):
        Ranks.join(False, "cpu", DEADLINE)


def test_program_without_a_socket_says_what_sets_it():
    environment = {name: value for name, value in os.environ.items() if name != "DRIFTLESS_LEARNER_SOCKET"}
    command = [sys.executable, "-m", "driftless_rl.learner"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 2 and "driftless train --learner" in done.stderr
