"""torch_root.py URL DIR_A DIR_B: a torch rank 0 that pushes one of two checkpoints into the engine, as trainers in Python do.

  push WHICH BUDGET   -> seconds, from before the first call to after the last reply; BUDGET 0 is one bucket
"""

import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request

os.environ["NCCL_CUMEM_ENABLE"] = "0"
# NCCL prints to standard output, where only answers belong.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, default_pg_timeout

# An engine keeps the groups that it has joined, so each process has its own.
URL, GROUP, PORT = sys.argv[1], f"torch-{os.getpid()}", 29471


def post(path, body):
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            value = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        value = {"success": False, "message": error.read().decode()}
    if not value["success"]:
        print(value, file=sys.stderr, flush=True)
        os._exit(1)


def buckets(weights, budget):
    groups, size = [[]], 0
    for name, tensor in weights.items():
        n = tensor.numel() * tensor.element_size()
        if budget and groups[-1] and size + n > budget:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += n
    return groups


def push(weights, budget):
    begin = time.monotonic()
    for names in buckets(weights, budget):
        body = {
            "names": names,
            "dtypes": [str(weights[n].dtype).removeprefix("torch.") for n in names],
            "shapes": [list(weights[n].shape) for n in names],
            "group_name": GROUP,
            "load_format": "flattened_bucket",
            "weight_version": "bench",
            "flush_cache": False,
        }
        whole = torch.cat([weights[n].flatten().view(torch.uint8) for n in names])
        call = threading.Thread(target=post, args=("/update_weights_from_distributed", body))
        call.start()
        dist.broadcast(whole, src=0, group=group, async_op=True).wait()
        call.join()
    torch.cuda.synchronize()
    return time.monotonic() - begin


torch.cuda.set_device(0)
sets = [load_file(os.path.join(directory, "model.safetensors"), device="cuda:0") for directory in sys.argv[2:4]]
master = dist.TCPStore("127.0.0.1", PORT, 2, is_master=True, wait_for_workers=False)
init = {"master_address": "127.0.0.1", "master_port": PORT, "rank_offset": 1, "world_size": 2, "group_name": GROUP, "backend": "nccl"}
join = threading.Thread(target=post, args=("/init_weights_update_group", init))
join.start()
store = dist.TCPStore("127.0.0.1", PORT, 2, is_master=False, wait_for_workers=False)
group, _ = _new_process_group_helper(
    2,
    0,
    [],
    Backend("nccl"),
    dist.PrefixStore(GROUP, store),
    group_name=GROUP,
    backend_options=None,
    timeout=default_pg_timeout,
    device_id=None,
)
_world.pg_group_ranks[group] = {0: 0, 1: 1}
join.join()
print("in the group", file=answers, flush=True)
for line in sys.stdin:
    _, which, budget = line.split()
    print(push(sets[int(which)], int(budget)), file=answers, flush=True)
