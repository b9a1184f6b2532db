"""What W&B or trackio keep of a run, in the order in which they were told: ``sidecars.py {wandb,trackio} DIRECTORY``, as JSON."""

import json
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path


def records(log: bytes) -> Iterator[bytes]:
    """Those of a log of LevelDB behind W&B's head of seven bytes (https://github.com/google/leveldb/blob/main/doc/log_format.md)."""
    at, begun = 7, b""
    while at + 7 <= len(log):
        left = 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", log, at)
        if left < 7 or kind == 0:  # The rest of a block is filled up.
            at += left
            continue
        begun += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # One that is whole, or the last part of one.
            yield begun
            begun = b""


def of_wandb(directory: Path) -> Iterator[dict]:
    from wandb.proto.wandb_internal_pb2 import Record

    for file in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def of_trackio(directory: Path) -> Iterator[dict]:
    with sqlite3.connect(directory / "trackio/driftless.db") as database:
        for step, figures in database.execute("SELECT step, metrics FROM metrics WHERE run_name = 'math' ORDER BY id"):
            yield {"_step": step} | json.loads(figures)


if __name__ == "__main__":
    read = {"wandb": of_wandb, "trackio": of_trackio}[sys.argv[1]]
    print(json.dumps(list(read(Path(sys.argv[2])))))
