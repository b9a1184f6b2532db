"""``python -m driftless_rl.learner``: the process that ``driftless train --learner`` starts."""

from __future__ import annotations

import argparse
import os
import sys

SOCKET = "DRIFTLESS_LEARNER_SOCKET"


def main() -> int:
    about = "A learner for `driftless train --learner`."
    parser = argparse.ArgumentParser(prog="python -m driftless_rl.learner", description=about)
    parser.add_argument("--fsdp", action="store_true", help="shard the model over the ranks of torchrun, with FSDP2")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA, if any")
    parser.add_argument("--attn-implementation", help="attention of transformers; its own choice by default")
    parser.add_argument("--sign-key", help="file of the key that signs versions; version 0 is signed by the loop")
    parser.add_argument("--trust-key", action="append", default=[], help="public key of others whose versions are gone on from")
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds that ranks wait for each other (1800)")
    args = parser.parse_args()
    path = os.environ.get(SOCKET)
    if path is None:
        parser.error(f"{SOCKET}: expected the name of a socket, found none; `driftless train --learner` sets it")
    # It takes seconds to import torch.
    try:
        from ._learner import Learner
        from ._ranks import Ranks, Refused
        from ._serve import serve
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed here ({sys.executable}): pip install torch transformers numpy")

    try:
        with Ranks.join(args.fsdp, args.device, args.deadline) as ranks:
            settings = {"sign_key": args.sign_key, "trust_keys": args.trust_key}
            serve(path, ranks, lambda hello: Learner(hello, ranks, args.attn_implementation, settings))
    except Refused as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
