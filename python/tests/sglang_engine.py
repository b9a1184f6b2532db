"""An unmodified SGLang on the CPU as a process, and what it is asked.

``DRIFTLESS_SGLANG_PYTHONPATH`` names what goes first on the servers' ``PYTHONPATH``: a stand-in for kernels of GPUs.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from servers import MOVED, Forks, Server, until

STAND_INS = os.environ.get("DRIFTLESS_SGLANG_PYTHONPATH")
# What its processes are told that generate on the CPU.
ON_CPU = {"PYTHONPATH": STAND_INS or "", "SGLANG_USE_CPU_ENGINE": "1"}


class Sglang(Server):
    """SGLang with a checkpoint, and what it says."""

    def __init__(
        self,
        root: Path,
        checkpoint: Path,
        ranks: int = 1,
        forks: Forks | None = None,
        further: Sequence[str] = (),
        reads_text: bool = False,
    ) -> None:
        command = ["-m", "sglang.launch_server"] if forks is None else []
        command += ["--device", "cpu", "--disable-overlap-schedule", *([] if reads_text else ["--skip-tokenizer-init"])]
        options = ["--sleep-on-idle", "--max-total-tokens", "8192", "--model-path", str(checkpoint), "--tp-size", str(ranks)]
        # It is healthy once it has generated a token for itself: that request fails a load beside it.
        environment = dict(ON_CPU)
        if ranks > 1:
            # Otherwise it wants a NUMA node for each, and a GPU for NCCL if there is one.
            environment["SGLANG_NCCL_SO_PATH"] = "/nonexistent/libnccl.so"
            cores = sorted(os.sched_getaffinity(0))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        self._forks, self._further = forks, environment
        super().__init__(root, [*command, *options, *further], environment)

    def _begin(self, log):
        if self._forks is None:
            return super()._begin(log)
        return self._forks.fork(self._arguments, self._further | self._own, self.log)

    def label(self) -> str:
        return self.call("/model_info")["weight_version"]

    def sums(self) -> list[dict]:
        """Checksums of every tensor of every rank."""
        return [rank["checksums"] for rank in self.call("/weights_checker", {"action": "checksum"})["ranks"]]

    def state(self) -> tuple:
        """Checksums, and what the weights generate."""
        sums = self.sums()
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        # A follower's probe of one token may be under way.
        until("flush", MOVED, self._flushes)
        tokens = self.call("/generate", {"input_ids": [1, 2, 3, 4], "sampling_params": sampling})["output_ids"]
        return sums, tokens

    def log_probs(self) -> list[tuple[int, float]]:
        """Tokens with log-probabilities: those of a prompt and those that the weights generate behind it, from an empty cache."""
        until("flush", MOVED, self._flushes)
        asked = {"input_ids": list(range(3, 40)), "return_logprob": True, "logprob_start_len": 0}
        asked["sampling_params"] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        said = self.call("/generate", asked)["meta_info"]
        parts = said["input_token_logprobs"][1:] + said["output_token_logprobs"]
        assert len(parts) == 36 + 8
        return [(token, value) for value, token, *_ in parts]

    def _flushes(self) -> bool:
        try:
            self.call("/flush_cache", {})
        except AssertionError:
            return False
        return True

    def load(self, checkpoint: Path, label: str) -> None:
        """A load as SGLang does it without a plugin: nothing is prepared for a label that the weights have."""
        # Beside a request that has just been answered, a flush of its own would be refused.
        until("flush", MOVED, self._flushes)
        request = {"model_path": str(checkpoint), "weight_version": label, "flush_cache": False}
        self.call("/update_weights_from_disk", request)

    def compare(self, checkpoint: Path, label: str, sample: int | None = None) -> dict:
        """What the plugin says of the weights and a checkpoint. SGLang says that nothing was updated."""
        manifest = {"driftless": "compare", "sample": sample}
        request = {"model_path": str(checkpoint), "weight_version": label, "flush_cache": False, "manifest": manifest}
        with pytest.raises(AssertionError) as raised:
            self.call("/update_weights_from_disk", request)
        _, status, said = raised.value.args[0]
        assert status == 400
        said = json.loads(json.loads(said)["message"].removeprefix("driftless: "))
        assert said["compared"] == label and said["unreached"] == {"count": 0, "first": []}
        return said["differing"]

    def patched(self) -> int:
        return self.log.read_text().count('driftless: {"patched":')

    def versioned(self) -> int:
        """Patches behind which no request finds what older weights left in the cache."""
        return self.log.read_text().count('"cache":"versioned"')

    def paused(self) -> int:
        return self.log.read_text().count("POST /pause_generation")

    @contextlib.contextmanager
    def generating(self):
        """A request runs all the while."""
        sampling = {"temperature": 0, "max_new_tokens": 7000, "ignore_eos": True}
        with ThreadPoolExecutor(1) as thread:
            body = {"input_ids": [1, 2, 3, 4], "sampling_params": sampling}
            request = thread.submit(self.call, "/generate", body)
            until("running request", MOVED, lambda: self.call("/v1/loads")["loads"][0]["num_running_reqs"] > 0)
            yield
            assert not request.done(), "nothing waited for its end"
            self.call("/abort_request", {"rid": "", "abort_all": True})
            assert request.result()["meta_info"]["finish_reason"]["type"] == "abort"
