"""Where the plugin hangs in SGLang: inner names, looked up and compared before anything is hooked."""

import asyncio
import inspect
import logging
import multiprocessing
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .._inner import find, resolve
from . import _spans, _versioned

_log = logging.getLogger("driftless")

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_SCHEDULER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_MIXIN = "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"

# The functions that are hooked, each where releases have it, newer ones first, and how its parameters begin.
_LOAD = ((f"{_RUNNER}.load_model",), ("self",))
_REQUEST = (tuple(f"{owner}.update_weights_from_disk" for owner in (_SCHEDULER, _MIXIN)), ("self", "recv_req"))
_DISK = (
    tuple(f"{owner}.update_weights_from_disk" for owner in (_UPDATER, _RUNNER)),
    ("self", "model_path", "load_format"),
)
# Other ways to change weights, as far as this release has them.
_OTHERS = tuple(
    f"{owner}.{name}"
    for owner in (_UPDATER, _RUNNER)
    for name in (
        "update_weights_from_tensor",
        "update_weights_from_distributed",
        "load_weights_from_distributed",
        "update_weights_from_ipc",
    )
)

# Where the process of the HTTP server hands requests on.
_SERVER = "sglang.srt.managers.tokenizer_manager"
_TOKENIZER = f"{_SERVER}.TokenizerManager"
_HAND_ON = ((f"{_TOKENIZER}.update_weights_from_disk",), ("self", "obj"))
_MAKE = ((f"{_TOKENIZER}.__init__",), ("self", "server_args"))
_WAIT = ((f"{_TOKENIZER}._wait_for_model_update_from_disk",), ("self", "obj"))
_UPDATE = "sglang.srt.managers.io_struct.UpdateWeightFromDiskReqInput"
_UPDATED = "sglang.srt.managers.io_struct.UpdateWeightFromDiskReqOutput"


class _Request(threading.local):
    """What the updater is not told of the request that this thread carries out."""

    # The version's label.
    label = None
    # What drops the cache, if the request does not ask for that itself.
    flush = None
    # The ranks that carry it out, if there are several.
    group = None
    # Whether the engine generates meanwhile, so that it is patched or left as it is.
    only_patch = False


_request = _Request()
# The models of this process, by id.
_models: dict = {}


def register() -> None:
    """Registers the hooks, or says why not and leaves SGLang as it is."""
    found = [find(*function) for function in (_LOAD, _REQUEST, _DISK)]
    if wrong := [why for name, why in found if name is None]:
        why = "; ".join(wrong)
        _log.warning("driftless: this SGLang is not known, weights are loaded as without the plugin: %s", why)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    (load, _), (request, _), (disk, _) = found
    HookRegistry.register(load, _loaded, HookType.AFTER)
    HookRegistry.register(request, _carry_out, HookType.AROUND)
    HookRegistry.register(disk, _update_from_disk, HookType.AROUND)
    for name in filter(resolve, _OTHERS):
        HookRegistry.register(name, _changed, HookType.BEFORE)
    _versioned.register(HookRegistry, HookType)
    _spans.register(HookRegistry, HookType)
    # That of the HTTP server, in whatever way it was started. Others do not need that module, which takes time to load.
    if multiprocessing.parent_process() is None or _SERVER in sys.modules:
        _register_server(HookRegistry, HookType)


def _register_server(registry, types) -> None:
    """Hooks into the process of the HTTP server; where it is not known, engines are paused for patches."""
    (hand_on, _), (make, _), (wait, _) = find(*_HAND_ON), find(*_MAKE), find(*_WAIT)
    if hand_on and make and wait and _carries_manifest():
        registry.register(hand_on, _handed_on, types.AROUND)
        registry.register(wait, _one_by_one, types.AROUND)
        registry.register(make, _made, types.AFTER)


def _carries_manifest() -> bool:
    """Whether SGLang carries ``manifest`` from the call to the ranks."""
    return "manifest" in getattr(resolve(_UPDATE), "__annotations__", ())


def _made(result, manager, *args, **kwargs) -> None:
    """The server will hand requests on."""
    _announce(manager)


def _announce(manager) -> None:
    """Tells followers that they may ask for patches without a pause."""
    from .._native import announce_server, plugin_dir

    _quietly(lambda: announce_server(plugin_dir(), manager.server_args.port))


def _asks_only(request) -> bool:
    """Whether a request is for a patch or nothing."""
    return _asks(request) == "patch"


def _asks(request) -> str | None:
    """What a request is for that only the plugin does: ``patch``, ``compare``."""
    manifest = getattr(request, "manifest", None)
    return manifest.get("driftless") if isinstance(manifest, dict) else None


class _Paused:
    """SGLang's manager of requests, which says that it is paused: an update then waits for no request to end. The
    scheduler's thread patches between two steps, so it need not be paused in truth."""

    is_pause = True

    def __init__(self, manager) -> None:
        object.__setattr__(self, "_manager", manager)

    def __getattr__(self, name: str):
        return getattr(self._manager, name)

    def __setattr__(self, name: str, value) -> None:
        setattr(self._manager, name, value)


def _handed_on(original, manager, obj, *args, **kwargs):
    # Its file may have been removed since.
    _announce(manager)
    return original(_Paused(manager) if _asks(obj) in ("patch", "compare") else manager, obj, *args, **kwargs)


async def _one_by_one(original, manager, *args, **kwargs):
    """Hands an update on once the one before is answered. SGLang keeps one answer, and ends by a second one. Its own lock
    against that is passed by requests of the plugin, and by all of them while the engine is paused."""
    lock = vars(manager).setdefault("_driftless_update", asyncio.Lock())
    async with lock:
        return await original(manager, *args, **kwargs)


def _loaded(result, runner, *args, **kwargs) -> None:
    """After the engine's own first load: learns the map, and watches for deltas. A failure never ends the engine."""
    if getattr(runner, "is_draft_worker", False):
        return
    refuse = None
    try:
        import torch

        from .. import _patchable
        from .._native import plugin_dir

        arguments = runner.server_args
        _spans.begin(arguments)
        if (why := _versioned.begin(arguments)) is not None:
            _log.warning("driftless: a patch beside running requests leaves others the prefixes of older weights: %s", why)
        # Engines with other kinds of parallelism are not followed.
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        place = (plugin_dir(), (arguments.port, rank, arguments.tp_size))
        refuse = lambda why: _patchable.refuse(*place, why)
        if getattr(arguments, "enable_memory_saver", False):
            raise ValueError("its weights may be released (--enable-memory-saver)")
        began = time.perf_counter()
        model = _patchable.live_model(runner.model, Path(runner.model_config.model_path), *place)
        _models[id(runner.model)] = model
        if _carries_manifest() and _knows_answer():
            model.announce_compare()
        _log.info("driftless: learned where weights lie, in %.3f s", time.perf_counter() - began)
    except Exception as error:
        _log.warning("driftless: this model is not patched, its weights are loaded from disk: %s", error)
        if refuse is not None:
            _quietly(refuse, str(error))


def _quietly(call, *args) -> None:
    try:
        call(*args)
    except Exception as error:
        _log.warning("driftless: %s", error)


def _carry_out(original, manager, *args, **kwargs):
    request = args[0] if args else kwargs.get("recv_req")
    if _asks(request) == "compare":
        return _compare(manager, request)
    _versioned.changes()
    _requested(manager, request)
    return original(manager, *args, **kwargs)


def _knows_answer() -> bool:
    """Whether the answer of a rank is what :func:`_compare` makes."""
    return {"success", "message"} <= getattr(resolve(_UPDATED), "__annotations__", {}).keys()


def _compare(manager, request):
    """Compares, and answers that nothing was updated: SGLang then leaves label, path and cache as they are."""
    from .. import _patchable
    from .._native import patch_refused

    label, group = getattr(request, "weight_version", None) or "", _group(manager)
    try:
        if len(_models) != 1:
            # The other ranks wait for what this one says.
            _patchable.agree(b"\0", group)
            raise LookupError(f"there are {len(_models)} models here whose weights are known, expected 1")
        (model,) = _models.values()
        reply = model.compare(label, Path(request.model_path), request.manifest.get("sample"), group)
    except Exception as error:  # nothing may leave: SGLang would end
        reply = patch_refused(label, f"{type(error).__name__}: {error}")
    _log.info("%s", reply)
    answer: Any = resolve(_UPDATED)
    return answer(success=False, message=reply)


def _requested(manager, request) -> None:
    _request.label = getattr(request, "weight_version", None)
    _request.flush = None if getattr(request, "flush_cache", True) else getattr(manager, "flush_cache", None)
    _request.group, _request.only_patch = _group(manager), _asks_only(request)


def _group(manager):
    """The processes of the engine's ranks, which carry out each request together; None for one rank."""
    import torch

    group = getattr(manager, "tp_cpu_group", None)
    return group if group is not None and torch.distributed.get_world_size(group) > 1 else None


def _cache(flush) -> str | None:
    """What becomes of what the cache has of the old weights. Unless requests are keyed, it is dropped if none holds it. None
    if ``flush`` cannot be asked. A request that asks for it itself ends some releases where requests hold the cache."""
    if flush is None:
        return None
    if _versioned.keyed():
        return "versioned"
    try:
        keeps_memory = "empty_cache" in inspect.signature(flush).parameters
        dropped = flush(empty_cache=False) if keeps_memory else flush()
        return "dropped" if dropped else "kept"
    except Exception as error:
        _log.warning("driftless: the cache is left to the follower: %s", error)
        return None


def _live(holder):
    """The model of an updater, or of a runner in the releases where that updates."""
    model = holder.get_model() if hasattr(holder, "get_model") else holder.model
    return _models.get(id(model))


def _changed(holder, *args, **kwargs) -> None:
    """Somebody else changes the weights: nothing is known of them until the next load."""
    _versioned.changes()
    _spans.change(None)
    if (model := _live(holder)) is not None:
        model.loaded(None)


def _update_from_disk(original, holder, *args, **kwargs):
    from .._native import patch_refused

    began, label = time.perf_counter(), _request.label
    flush, group, only_patch = _request.flush, _request.group, _request.only_patch
    # A draft model's updater is called for the same request.
    _request.__dict__.clear()
    model = _live(holder)
    plain = len(args) <= 2 and not any(kwargs.get(name) for name in ("weight_name_filter", "recapture_cuda_graph"))
    if only_patch or label is not None and plain:
        try:
            done = _patch(model, label or "", group)
            if done is None and only_patch:
                raise LookupError("nothing is prepared for it")
        except Exception as error:  # nothing may leave: SGLang would end
            reply = patch_refused(label or "", f"{type(error).__name__}: {error}")
            _log.warning("%s", reply)
            # Only the follower that offered the delta asks for its label. It fences the engine, and asks for a load.
            return False, reply
        if done is not None:
            _spans.change(label)
            reply = done.reply(time.perf_counter() - began, _cache(flush))
            _log.info("%s", reply)
            return True, f"{reply}."
    _spans.change(None)
    if model is not None:
        model.loaded(None)
    result = original(holder, *args, **kwargs)
    if result[0] and plain:
        _spans.change(label)
        if model is not None:
            model.loaded(label)
    return result


def _patch(model, label: str, group):
    """How it was patched; None if nothing is prepared. A rank without a model has its vote as well: the others wait for it."""
    if model is not None:
        return model.patch(label, group)
    if group is not None:
        from .. import _patchable
        from .._native import LOADS

        _patchable.least(LOADS, group)
    return None
