"""FSDP2 in two processes, published from their shards, and from the checkpoint of both."""

import subprocess
import sys
import textwrap

from conftest import CONFIG, read_checkpoint, run_command

# Both ranks train one model and publish it; rank 0 also saves the whole tensors to compare with.
TRAINER = """
    import sys, torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Shard
    import driftless_rl, driftless_rl.torch

    root, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(6)
    # 65 rows do not divide by two, and three rows leave one rank little; the scale is replicated by nobody.
    model = torch.nn.Sequential(torch.nn.Linear(32, 65), torch.nn.ReLU(), torch.nn.Linear(65, 3)).bfloat16()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    publisher = driftless_rl.Publisher(
        f"file://{root}/store", "run", rank=rank, ranks=2, baseline_dir=f"{root}/baseline-{rank}", join_deadline=120.0,
        files={"config.json": CONFIG},
    )
    for step in range(3):
        model(torch.randn(8, 32, dtype=torch.bfloat16)).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = model.state_dict() | {"scale": torch.full((3,), float(step))}
        publisher.publish(driftless_rl.torch.slices(state, rank=rank), step=step, attempt=f"job-{step}")
        assert publisher.version == step
    dcp.save({"model": state, "optimizer": optimizer.state_dict()}, checkpoint_id=f"{root}/dcp")
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    if rank == 0:
        torch.save(whole, f"{root}/whole.pt")
    try:
        publisher.publish(model.state_dict(), attempt="job-whole")
    except driftless_rl.TensorError as error:
        assert "driftless_rl.torch.slices" in str(error), error
    else:
        raise AssertionError("a DTensor was published as if it were whole")
    for refused in (Shard(1), Partial()):
        value = DTensor.from_local(torch.zeros(4, 4), mesh, [refused])
        try:
            driftless_rl.torch.slices({"w": value}, rank=rank)
        except driftless_rl.TensorError as error:
            assert error.tensor == "w" and "redistribute" in str(error)
        else:
            raise AssertionError(refused)
    publisher.close()
    dist.destroy_process_group()
"""


def test_shards_of_two_ranks_make_the_whole_model(store):
    import torch
    from driftless_rl.dcp import dcp_tensors

    script = textwrap.dedent(TRAINER).replace("CONFIG", repr(CONFIG))
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, store.root, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
    host = store.root / "host"
    run_command("follow", "--store", store.url, "--run", "run", "--checkpoint-dir", str(host), "--once")
    found = read_checkpoint(host)
    whole = torch.load(store.root / "whole.pt")
    saved = dcp_tensors(store.root / "dcp", prefix="model.")
    assert saved.keys() == whole.keys() and all(torch.equal(saved[name].read(), whole[name]) for name in whole)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert found[name][1] == list(tensor.shape)
        assert found[name][2] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), name
