"""SGLang's prefix cache, keyed by the weights that fill it: no request finds what older weights left.

A key of the weights stands in front of each request's own ``extra_key``, which SGLang's cache takes for a part of every
prefix. A request takes the key when it is made, and again whenever it is admitted: it may have waited through a change of
the weights, or have been retracted. While it runs it keeps its key, as it keeps its cache. What it leaves then lies under
a key that no later request has, and is evicted like all that nobody asks for.
"""

import inspect
import os

from .._inner import find, resolve

_OWNER = "sglang.srt.managers.schedule_batch.Req"
_MADE = ((f"{_OWNER}.__init__",), ("self", "rid"))
_ADMITTED = ((f"{_OWNER}.init_next_round_input",), ("self", "tree_cache"))
# Options of caches that lie outside of the engine or are not SGLang's own. Not all of them take the key.
_OTHERS = (
    "hicache_storage_backend",
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_cache_external_linker",
    "radix_cache_backend",
)
# That of a tree in C++, which does not take the key either.
_OTHER_TREE = "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"


class _Weights:
    """Those of this process. All ranks of an engine carry out the same requests, so their keys are the same."""

    # Whether requests are keyed.
    keyed = False
    # How often they changed, or may have.
    changes = 0

    def key(self) -> str:
        """No two weights have the same, even if they are of one version: what ran through a change lies under the old key.
        Requests of an engine whose weights never changed are left as they are."""
        return f"driftless-{self.changes}:" if self.keyed and self.changes else ""


_weights = _Weights()


def register(registry, types) -> None:
    """Hooks into SGLang's requests, if they are known; :func:`begin` says it if not."""
    if _unknown() is None:
        registry.register(_MADE[0][0], _made, types.AFTER)
        registry.register(_ADMITTED[0][0], _admitted, types.BEFORE)


def begin(arguments) -> str | None:
    """Keys the requests of an engine with these arguments from now on, or says why not."""
    why = _unknown() or _unkeyed(arguments)
    _weights.keyed = why is None
    return why


def keyed() -> bool:
    """Whether requests are keyed."""
    return _weights.keyed


def changes() -> None:
    """The weights change now, or may: requests that are admitted from now on find nothing that lies in the cache."""
    _weights.changes += 1


def _unknown() -> str | None:
    """Why requests of this release cannot be keyed."""
    for function in (_MADE, _ADMITTED):
        name, why = find(*function)
        if name is None:
            return why
    taken = inspect.signature(resolve(_MADE[0][0])).parameters
    return None if "extra_key" in taken else f"{_OWNER} has no extra_key"


def _unkeyed(arguments) -> str | None:
    """Why the requests of this engine are not keyed."""
    if not all(hasattr(resolve(name), "__wrapped__") for (name,), _ in (_MADE, _ADMITTED)):
        return f"{_OWNER} is not hooked"
    if os.environ.get(_OTHER_TREE, "").lower() not in ("", "0", "false", "no", "n"):
        return f"its prefix cache may not take the key ({_OTHER_TREE})"
    used = [name for name in _OTHERS if getattr(arguments, name, None)]
    return f"its prefix cache may not take the key (--{used[0].replace('_', '-')})" if used else None


def _made(result, request, *args, **kwargs) -> None:
    _take_key(request)


def _admitted(request, tree_cache=None, *args, **kwargs) -> None:
    # Without the cache it is the next part of a prompt that is being computed.
    if tree_cache is not None and not _holds_cache(request):
        _take_key(request)


def _holds_cache(request) -> bool:
    held = getattr(request, "kv", None)
    return held is not None and getattr(held, "holds_kv", True)


def _take_key(request) -> None:
    """Gives a request the key of the weights, in the place of the one that it has."""
    new, old = _weights.key(), getattr(request, "_driftless_key", "")
    session = getattr(request, "session", None)
    if getattr(session, "streaming", False):
        # It keeps its cache from one request to the next.
        new = vars(session).setdefault("_driftless_key", new)
    if new != old:
        own = (request.extra_key or "")[len(old) :]
        request.extra_key, request._driftless_key = new + own, new
