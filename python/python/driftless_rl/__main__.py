"""``python -m driftless_rl`` is the command ``driftless``."""

import sys

from ._command import main

if __name__ == "__main__":
    sys.exit(main())
