"""A backend for vLLM's weight transfer: weights are patched in place instead of loaded from a checkpoint.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins``. In a server that was started with
``--weight-transfer-config '{"backend": "driftless"}'``, ``driftless follow`` has the delta that it has prepared written
into the weights. In every other case the server loads the checkpoint, as it does without the backend.
"""

import functools


@functools.cache
def register() -> None:
    """Adds the backend ``driftless`` to the vLLM of this process, if its classes are known. A second call does nothing."""
    from . import _backend

    _backend.register()
