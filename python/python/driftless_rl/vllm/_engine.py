"""The backend's engine, which vLLM makes in each worker beside the model. vLLM must be there."""

import time
from dataclasses import dataclass
from pathlib import Path

from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.v1.worker.worker_base import WorkerBase

from .. import _patchable
from .._errors import EngineError
from .._native import patch_refused, plugin_dir

# A name below vLLM's, so that it is logged as vLLM's own lines are.
_log = init_logger("vllm.driftless")


@dataclass
class Loaded(WeightTransferInitInfo):
    """What a follower says once the engine has loaded.

    Attributes:
        port: where the server listens, as the follower reaches it.
        label: the version that was loaded; a fence's label counts as its version's.
    """

    port: int
    label: str


@dataclass
class Wanted(WeightTransferUpdateInfo):
    """What a follower asks for: the version ``label``, whose delta the worker has prepared."""

    label: str


class DriftlessWeightTransferEngine(WeightTransferEngine[Loaded, Wanted]):
    """Patches the model's weights from prepared deltas. Weights do not travel through vLLM's calls, only labels do."""

    init_info_cls = Loaded
    update_info_cls = Wanted
    supports_draft_weight_update = False

    def __init__(self, config, vllm_config, device, model) -> None:
        super().__init__(config, vllm_config, device, model)
        self._live: _patchable.Patchable | None = None
        self._port: int | None = None

    def init_transfer_engine(self, init_info: Loaded) -> None:
        """Notes which version is live. The first call learns the map, and begins to prepare deltas."""
        if init_info.port != self._port:
            self._live = self._learn(init_info.port)
            self._port = init_info.port
        if self._live is not None:
            self._live.loaded(init_info.label)

    def _learn(self, port: int) -> _patchable.Patchable | None:
        """The live model; None for one that is not patched, of which followers are told."""
        parallel = self.parallel_config
        place = (plugin_dir(), (port, parallel.rank, parallel.world_size))
        try:
            self._check()
            with set_current_vllm_config(self.vllm_config):
                live = _patchable.live_model(self.model, Path(self.model_config.model), *place)
            live.announce_compare()
            return live
        except Exception as error:  # whatever a model's loader does: the engine goes on as without the backend
            _log.warning("driftless: this model is not patched, its weights are loaded from disk: %s", error)
            _patchable.refuse(*place, str(error))
            return None

    def _check(self) -> None:
        """Refuses engines whose workers are not patched, whatever their model."""
        parallel = self.parallel_config
        workers = parallel.world_size * parallel.data_parallel_size
        if workers != 1:
            # vLLM reads no further replies to a call once one worker has raised, and takes them for the next call's.
            raise ValueError(f"it has {workers} workers, and vLLM is patched with one")
        if self.model_config.enable_sleep_mode:
            raise ValueError("its weights may be released (--enable-sleep-mode)")

    def start_weight_update(self) -> None:
        """Nothing: weights are written in place."""

    def receive_weights(self, update_info: Wanted) -> None:
        """Writes the prepared delta that leads to the label.

        Raises:
            EngineError: it is not prepared, or its base is not live. The weights are what they were.
        """
        began, label = time.perf_counter(), update_info.label
        try:
            done = self._live.patch(label) if self._live is not None else None
            if done is None:
                raise EngineError("no delta from the live version to it is prepared here")
        except Exception as error:
            raise EngineError(patch_refused(label, f"{type(error).__name__}: {error}")) from error
        _log.info("%s", done.reply(time.perf_counter() - began, None))

    def compare(self, label: str, directory: Path, sample: int | None) -> str:
        """What a follower is answered that asks for a comparison of the weights with a checkpoint."""
        try:
            if self._live is None:
                raise EngineError("where its weights lie is not known")
            reply = self._live.compare(label, directory, sample)
        except Exception as error:
            reply = patch_refused(label, f"{type(error).__name__}: {error}")
        _log.info("%s", reply)
        return reply

    def finish_weight_update(self) -> None:
        """Nothing: vLLM takes the label behind it."""

    def shutdown(self) -> None:
        """Prepares nothing more, until a follower says again what is live."""
        self._live = self._port = None


def _compare(worker, label: str, directory: str, sample: int | None = None) -> str:
    """What a worker does when the server is asked for ``driftless_compare`` by ``/collective_rpc``."""
    return worker.weight_transfer_engine.compare(label, Path(directory), sample)


# vLLM finds calls of workers by their names.
WorkerBase.driftless_compare = _compare
