"""torch_store.py HOST PORT: torch's own TCPStore client, and a gloo group of two, against the store at that address."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

HOST, PORT = sys.argv[1], int(sys.argv[2])


def connect(seconds=20):
    return dist.TCPStore(HOST, PORT, 2, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=True)


def client():
    store = connect()
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.add("count", 5) == 5 and store.add("count", -2) == 3
    assert store.get("count") == b"3"
    assert store.check(["key", "count"]) and not store.check(["key", "none"])
    assert store.compare_set("key", "other", "new") == b"value"
    assert store.compare_set("key", "value", "new") == b"new"
    assert store.compare_set("fresh", "", "made") == b"made"
    store.append("key", "er")
    assert store.get("key") == b"newer"
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["a", "b"]) == [b"1", b"2"]
    before = store.num_keys()
    assert store.delete_key("a") and not store.delete_key("a")
    assert store.num_keys() == before - 1
    big = bytes(range(256)) * 2048
    store.set("big", big)
    assert store.get("big") == big
    # What is never set ends in torch's own error, and the connection is good afterwards.
    try:
        store.wait(["never"], timedelta(milliseconds=200))
        raise SystemExit("a wait for nothing ended")
    except dist.DistStoreError as error:
        assert "never" in str(error) or "timeout" in str(error).lower(), error
    assert store.get("b") == b"2"
    # Set by the other end, by way of a prefix as groups have them.
    assert dist.PrefixStore("group", store).get("from-the-server") == b"hello"


def rank(number):
    # Torch's own default is half an hour; a group whose other rank has died ends with this one.
    store = dist.PrefixStore("pair", connect())
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=60))
    tensor = torch.arange(1000, dtype=torch.float32) * (number == 0)
    dist.broadcast(tensor, src=0)
    assert torch.equal(tensor, torch.arange(1000, dtype=torch.float32)), number
    total = torch.tensor([number + 1])
    dist.all_reduce(total)
    assert total.item() == 3
    dist.barrier()
    dist.destroy_process_group()


# The other rank begins when `client` has counted its keys. It does not begin at all when this process has ended before.
ready, begin = os.pipe()
child = os.fork()
if child == 0:
    os.close(begin)
    if os.read(ready, 1):
        rank(1)
    os._exit(0)
client()
os.write(begin, b"1")
rank(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
print("torch", torch.__version__, "OK", flush=True)
