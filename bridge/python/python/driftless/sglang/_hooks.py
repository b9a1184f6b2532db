"""Where the plugin hangs in SGLang: inner names, looked up and compared before anything is hooked."""

import inspect
import logging
import pkgutil
import threading
from pathlib import Path

_log = logging.getLogger("driftless")

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SCHEDULER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"

# Each with how its parameters begin.
_LOAD = (f"{_RUNNER}.load_model", ("self",))
_REQUEST = (f"{_SCHEDULER}.update_weights_from_disk", ("self", "recv_req"))
_DISK = (f"{_UPDATER}.update_weights_from_disk", ("self", "model_path", "load_format"))
# Other ways to change weights, as far as this release has them.
_OTHERS = (
    f"{_UPDATER}.update_weights_from_tensor",
    f"{_UPDATER}.load_weights_from_distributed",
    f"{_UPDATER}.update_weights_from_ipc",
)

# The label of the request that this thread carries out. The updater is not told.
_request = threading.local()
# The models of this process, by id.
_models: dict = {}


def register() -> None:
    """Registers the hooks, or says why not and leaves SGLang as it is."""
    wrong = [reason for name, parameters in (_LOAD, _REQUEST, _DISK) if (reason := _mismatch(name, parameters))]
    if wrong:
        why = "; ".join(wrong)
        _log.warning("driftless: this SGLang is not known, weights are loaded as without the plugin: %s", why)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_LOAD[0], _loaded, HookType.AFTER)
    HookRegistry.register(_REQUEST[0], _requested, HookType.BEFORE)
    HookRegistry.register(_DISK[0], _update_from_disk, HookType.AROUND)
    for name in filter(_resolve, _OTHERS):
        HookRegistry.register(name, _changed, HookType.BEFORE)


def _resolve(name: str):
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def _mismatch(name: str, parameters: tuple[str, ...]) -> str | None:
    found = _resolve(name)
    if found is None:
        return f"there is no {name}"
    names = tuple(inspect.signature(found).parameters)
    if names[: len(parameters)] == parameters:
        return None
    return f"{name} takes {', '.join(names)}, expected {', '.join(parameters)}"


def _loaded(result, runner, *args, **kwargs) -> None:
    """After the engine's own first load: learns the map, and watches for deltas. A failure never ends the engine."""
    if getattr(runner, "is_draft_worker", False):
        return
    rank_file = None
    try:
        import torch

        from ._model import LiveModel
        from ._place import RankFile, directory

        where = directory()
        arguments = runner.server_args
        # Engines with other kinds of parallelism are not followed.
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        rank_file = RankFile(where, arguments.port, rank, arguments.tp_size)
        model = LiveModel(runner.model, Path(runner.model_config.model_path), rank_file)
        threading.Thread(target=model.watch, args=(where,), name="driftless", daemon=True).start()
        _models[id(runner.model)] = model
    except Exception as error:
        _log.warning("driftless: this model is not patched, its weights are loaded from disk: %s", error)
        if rank_file is not None:
            _quietly(rank_file.refuse, str(error))


def _quietly(call, *args) -> None:
    try:
        call(*args)
    except OSError as error:
        _log.warning("driftless: %s", error)


def _requested(manager, *args, **kwargs) -> None:
    request = args[0] if args else kwargs.get("recv_req")
    _request.label = getattr(request, "weight_version", None)


def _changed(updater, *args, **kwargs) -> None:
    """Somebody else changes the weights: nothing is known of them until the next load."""
    model = _models.get(id(updater.get_model()))
    if model is not None:
        model.loaded(None)


def _update_from_disk(original, updater, *args, **kwargs):
    label, _request.label = getattr(_request, "label", None), None
    model = _models.get(id(updater.get_model()))
    if model is None:
        return original(updater, *args, **kwargs)
    plain = len(args) <= 2 and not any(kwargs.get(name) for name in ("weight_name_filter", "recapture_cuda_graph"))
    if label is not None and plain:
        from ._model import NotPatched

        try:
            done = model.patch(label)
        except NotPatched as error:
            # Only the follower that offered the delta asks for its label. It fences the engine, and asks for a load.
            return False, f"driftless: not patched to {label}: {error}"
        if done is not None:
            return True, f"driftless: {done}."
    model.loaded(None)
    result = original(updater, *args, **kwargs)
    if result[0] and plain:
        model.loaded(label)
    return result
