"""gloo_root.py: rank 0 of a weight-update group over gloo, told what to do on standard input, one answer a line.

  join HOST PORT GROUP WORLD     -> joined, once every rank has
  broadcast FILE LENGTH...       -> sent, once every rank has received these bytes of the file, one broadcast a length
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, default_pg_timeout


def join(host, port, name, world):
    store = dist.TCPStore(host, int(port), world, is_master=False, wait_for_workers=False)
    group, _ = _new_process_group_helper(
        world,
        0,
        [],
        Backend("gloo"),
        dist.PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=default_pg_timeout,
        device_id=None,
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


group = None
for line in sys.stdin:
    command, *words = line.split()
    if command == "join":
        group = join(words[0], words[1], words[2], int(words[3]))
        print("joined", flush=True)
    else:
        with open(words[0], "rb") as file:
            for length in map(int, words[1:]):
                tensor = torch.frombuffer(bytearray(file.read(length)), dtype=torch.uint8)
                dist.broadcast(tensor, src=0, group=group)
        print("sent", flush=True)
