"""driftless keeps a fleet of LLM inference engines in step with an RL trainer.

``Publisher`` publishes a trainer's tensors from where they lie: numpy arrays, and torch tensors in host memory or on GPUs.
``Follower`` keeps a checkpoint directory at the newest version, ``Fleet`` has engines generate, ``RolloutLog`` is the
durable log of samples, and ``Codec`` encodes single tensors. Everything that can go wrong is a subclass of ``Error``. The
command ``driftless`` is ``python -m driftless_rl``.

Importing this package imports neither torch nor numpy.
"""

import atexit as _atexit

from ._native import Codec, EngineStatus, Generation, Published, __version__, end as _end
from ._errors import (
    BusyError,
    CancelledError,
    ClosedError,
    DeadlineError,
    EngineError,
    Error,
    ForkedError,
    LayoutChangedError,
    NotFiniteError,
    RefusedError,
    RunError,
    StoreError,
    TensorError,
    UsageError,
)
from . import _namesake
from ._fleet import Fleet
from ._follower import Follower
from ._log import Group, RolloutLog, RolloutProducer, RolloutReader, Sample
from ._publisher import LazyTensor, Publisher, Slice

__all__ = [
    "BusyError",
    "CancelledError",
    "ClosedError",
    "Codec",
    "DeadlineError",
    "EngineError",
    "EngineStatus",
    "Error",
    "Fleet",
    "Follower",
    "ForkedError",
    "Generation",
    "Group",
    "LazyTensor",
    "LayoutChangedError",
    "NotFiniteError",
    "Published",
    "Publisher",
    "RefusedError",
    "RolloutLog",
    "RolloutProducer",
    "RolloutReader",
    "RunError",
    "Sample",
    "Slice",
    "StoreError",
    "TensorError",
    "UsageError",
    "__version__",
]

_namesake.warn()

# What daemon threads are still publishing is stopped while its memory is there. Nothing of it is committed half.
_atexit.register(_end, 30.0)
