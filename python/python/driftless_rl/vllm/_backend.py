"""Where the backend hangs in vLLM: its factory and base class, compared before anything is registered."""

import logging

from .._inner import find, resolve

_log = logging.getLogger("driftless")

_PLACE = "vllm.distributed.weight_transfer"
_FACTORY = f"{_PLACE}.factory.WeightTransferEngineFactory"
_BASE = f"{_PLACE}.base.WeightTransferEngine"

# What the engine of this package implements, and what vLLM passes.
_METHODS = {
    "init_transfer_engine": ("self", "init_info"),
    "start_weight_update": ("self",),
    "receive_weights": ("self", "update_info"),
    "finish_weight_update": ("self",),
    "shutdown": ("self",),
}
_KNOWN = {
    f"{_FACTORY}.register_engine": ("name", "module_path_or_cls", "class_name"),
    f"{_BASE}.__init__": ("self", "config", "vllm_config", "device", "model"),
    **{f"{_BASE}.{name}": parameters for name, parameters in _METHODS.items()},
}


def register() -> None:
    """Registers the backend, or says why not and leaves vLLM as it is."""
    found = [find((name,), parameters) for name, parameters in _KNOWN.items()]
    wrong = [why for name, why in found if name is None]
    more = getattr(resolve(_BASE), "__abstractmethods__", frozenset()) - _METHODS.keys()
    wrong += [f"{_BASE} wants {name}" for name in sorted(more)]
    if wrong:
        _log.warning("driftless: this vLLM is not known, it has no backend `driftless`: %s", "; ".join(wrong))
        return
    resolve(_FACTORY).register_engine("driftless", f"{__package__}._engine", "DriftlessWeightTransferEngine")
