"""``python -m driftless_rl.hook FILE [ARGUMENT…]``: the process that a flag of ``driftless train`` names."""

from __future__ import annotations

import sys

from ._serve import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
