"""Models that accelerate has distributed by FSDP2 over two processes, published from their shards."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import driftless_rl
import pytest
from conftest import read_checkpoint

# Both ranks train a model and publish it, by the library's calls and by the callback; rank 0 also saves what was published.
TRAINER = """
    import os, sys, types, torch
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from safetensors.torch import save_file
    from torch.distributed.tensor import DTensor
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    import driftless_rl, driftless_rl.torch
    from driftless_rl.transformers import PublishCallback, hf_state_dict

    root, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    accelerator = Accelerator(cpu=True)
    # 65 rows do not divide by two.
    small = dict(
        vocab_size=65, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )

    def prepared(model):
        # accelerate takes the plugin on GPUs only. What it then does runs on the CPU as well.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        return model, optimizer

    def step(model, optimizer):
        ids = torch.randint(65, (2, 8))
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()

    def save(model, name):
        # As a model has it that nobody has distributed.
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        alone = type(model).__mro__[2](model.config).to(next(iter(whole.values())).dtype)
        assert type(alone).__name__ in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
        alone.load_state_dict(whole)
        if rank == 0:
            save_file(hf_state_dict(alone), f"{root}/{name}.safetensors")

    torch.manual_seed(1)
    model, optimizer = prepared(Qwen3ForCausalLM(Qwen3Config(**small, tie_word_embeddings=True)))
    ranks = dict(rank=rank, ranks=2, baseline_dir=f"{root}/baseline-{rank}", join_deadline=120.0)
    with driftless_rl.Publisher(f"file://{root}/store", "by-hand", **ranks) as publisher:
        for number in range(2):
            step(model, optimizer)
            parts = driftless_rl.torch.slices(hf_state_dict(model), rank=accelerator.process_index)
            publisher.publish(parts, step=number, attempt=f"job-{number}")
    save(model, "by-hand")

    model, optimizer = prepared(
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**small, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24))
    )
    arguments = types.SimpleNamespace(process_index=rank, world_size=2, load_best_model_at_end=True)
    state = types.SimpleNamespace(global_step=0, is_world_process_zero=rank == 0, best_model_checkpoint="last")
    try:
        PublishCallback(f"file://{root}/store", "nowhere").on_train_begin(arguments, state, None, model=model)
    except driftless_rl.UsageError as error:
        assert "baseline_dir" in str(error), error
    else:
        raise AssertionError("two processes shared a baseline")
    callback = PublishCallback(f"file://{root}/store", "callback", baseline_dir=f"{root}/baselines", dtype=torch.bfloat16)
    callback.on_train_begin(arguments, state, None, model=model)
    for state.global_step in (1, 2):
        step(model, optimizer)
        callback.on_step_end(arguments, state, None, model=model)
    # The best model is another one than the last step's.
    step(model, optimizer)
    callback.on_train_end(arguments, state, None, model=model)
    assert (callback.published is None) == (rank > 0)
    save(model.bfloat16(), "callback")
    accelerator.end_training()
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("accelerate")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-c", textwrap.dedent(TRAINER), root]
    # With GPUs in sight torch 2.11 crashes where it gathers shards that lie on the host.
    run = {"stderr": subprocess.PIPE, "text": True, "env": os.environ | {"CUDA_VISIBLE_DEVICES": ""}}
    ranks = [subprocess.Popen([*command, str(rank), str(port)], **run) for rank in (0, 1)]
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
    return root


@pytest.mark.parametrize("run, newest", [("by-hand", 1), ("callback", 3)])
def test_shards_that_accelerate_made_are_published_whole(published, run, newest):
    host = published / f"host-{run}"
    with driftless_rl.Follower(f"file://{published}/store", run, host) as follower:
        assert follower.advance() == newest
    saved = published / f"saved-{run}"
    saved.mkdir()
    (published / f"{run}.safetensors").rename(saved / "model.safetensors")
    assert read_checkpoint(host) == read_checkpoint(saved)
    if run == "callback":
        assert json.loads((host / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]
