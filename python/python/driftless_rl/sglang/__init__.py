"""A plugin for SGLang: weights are patched in place instead of loaded from a checkpoint.

SGLang finds :func:`register` by the entry point ``sglang.srt.plugins``. Where ``driftless follow`` has prepared a
delta from the live version to the one that is asked for, ``/update_weights_from_disk`` writes it into the weights. In
every other case SGLang loads the checkpoint, as it does without the plugin.
"""

import functools

from .. import _namesake


@functools.cache
def register() -> None:
    """Hooks into the SGLang of this process, if its inner names are known. A second call does nothing.

    Imports no torch, starts no thread.
    """
    from . import _hooks

    _hooks.register()


_namesake.take_over("sglang._hooks", register)
