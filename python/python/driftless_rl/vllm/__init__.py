"""A backend for vLLM's weight transfer: weights are patched in place instead of loaded from a checkpoint.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins``. In a server that was started with
``--weight-transfer-config '{"backend": "driftless"}'``, ``driftless follow`` has the delta that it has prepared written
into the weights. In every other case the server loads the checkpoint, as it does without the backend.
"""

import functools

from .. import _namesake
from .._inner import resolve


@functools.cache
def register() -> None:
    """Adds the backend ``driftless`` to the vLLM of this process, if its classes are known. A second call does nothing."""
    from . import _backend

    _ask_for_tiles()
    _backend.register()


def _ask_for_tiles() -> None:
    """Asks Linux for AMX's tile registers, which a process has only once it asked.

    vLLM's attention on the CPU uses them wherever the processor has them, and never asks. oneDNN asks when it first
    multiplies with them. Where the attention comes first, as it may after a reload, the worker ends by SIGILL.
    """
    if resolve("vllm") is None:
        return
    import torch

    supported = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    if supported():
        torch.cpu._init_amx()


_namesake.take_over("vllm._backend", register)
