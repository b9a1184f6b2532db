"""torch_peer.py HOST PORT GROUP RANK WORLD: a rank of a group over NCCL, on the GPU of that number.

A line of lengths in bytes: enqueue a broadcast of each, say "waiting", and "received" once all have arrived.
"""

import os
import sys

os.environ["NCCL_CUMEM_ENABLE"] = "0"
# NCCL prints to standard output, where only answers belong.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, default_pg_timeout

host, port, name, rank, world = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
torch.cuda.set_device(rank)
store = dist.TCPStore(host, port, world, is_master=False, wait_for_workers=False)
# What SGLang's init_custom_process_group does.
group, _ = _new_process_group_helper(
    world,
    rank,
    [],
    Backend("nccl"),
    dist.PrefixStore(name, store),
    group_name=name,
    backend_options=None,
    timeout=default_pg_timeout,
    device_id=None,
)
_world.pg_group_ranks[group] = {n: n for n in range(world)}
print("in the group", file=answers, flush=True)
memory = torch.empty(0, dtype=torch.uint8, device=f"cuda:{rank}")
joined = False
for line in sys.stdin:
    lengths = [int(word) for word in line.split()]
    if memory.numel() < sum(lengths):
        memory = None
        torch.cuda.empty_cache()
        memory = torch.empty(sum(lengths), dtype=torch.uint8, device=f"cuda:{rank}")
    torch.cuda.synchronize()
    if not joined:
        # Joining waits for rank 0, which waits for this word.
        print("waiting", file=answers, flush=True)
    parts, handles = memory[: sum(lengths)].split(lengths), []
    for part in parts:
        handles.append(dist.broadcast(part, src=0, group=group, async_op=True))
    if joined:
        print("waiting", file=answers, flush=True)
    joined = True
    torch.cuda.synchronize()
    print("received", file=answers, flush=True)
