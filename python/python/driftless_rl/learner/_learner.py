"""What answers the calls of the loop."""

from __future__ import annotations

import math
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import Publisher, RolloutReader
from . import _checkpoint
from ._batch import Batch, LogProbs, Sample, micro_batches, pack, read, steps, token_weights
from ._layout import Layout
from ._loss import WATCHED, policy_loss
from ._model import Model
from ._optimizer import AdamW
from ._options import Options
from ._ranks import Ranks, Refused
from ._serve import PROTOCOL

# What is averaged over the steps on a rollout.
FIGURES = ("loss", *WATCHED, "grad_norm")


class Learner:
    """A policy that is trained, from ``hello`` on. On every rank, each call does the same."""

    def __init__(self, hello: dict[str, Any], ranks: Ranks, attention: str | None, settings: dict[str, Any]) -> None:
        self._hello, self._ranks, self._settings = hello, ranks, settings
        self._publisher: Publisher | None = None
        self._progress = ranks.together(lambda: self._open(attention))

    def _open(self, attention: str | None) -> Any:
        hello, ranks = self._hello, self._ranks
        self._options = options = Options.of(hello)
        torch.manual_seed(int(hello.get("seed") or 0))
        self._log = RolloutReader(hello["log"])
        self._layout = Layout(hello["hf_checkpoint"])
        rounded = self._layout.dtype
        computes = getattr(torch, options.dtype) if options.dtype else rounded
        if (computes, rounded) == (torch.bfloat16, torch.float32):
            raise Refused("hello: options: `dtype`: expected float32, since the checkpoint has float32, found bfloat16")
        self._model = Model(hello["hf_checkpoint"], options, computes, ranks, attention)
        self._layout.check(self._model.module)
        self._optimizer = AdamW(self._model.module, self._layout.dtypes(self._model.module), ranks)
        self._reference = None
        if options.use_kl_loss:
            directory = options.ref_load or hello["hf_checkpoint"]
            self._reference = Model(directory, options, computes, ranks, attention)
            self._reference.module.requires_grad_(False)
            if self._reference.vocabulary != self._model.vocabulary:
                found = f"expected {self._model.vocabulary} tokens, found {self._reference.vocabulary}"
                raise Refused(f"hello: options: `ref_load`: {directory}: {found}")
            # Both are given the same batches.
            for model, other in ((self._model, self._reference), (self._reference, self._model)):
                if other.padded:
                    model.pad()
        return _checkpoint.load(Path(hello["save"]), self._optimizer)

    def hello(self) -> dict[str, Any]:
        """The reply to the first call."""
        ranks, kind = self._ranks, self._model.module.config.model_type
        way = f"FSDP2 on {ranks.size} ranks" if ranks.sharded else "one process"
        rows = "padded" if self._model.padded else "packed"
        name = f"transformers {kind}, {way}, {ranks.device.type}, {rows}"
        return {"protocol": PROTOCOL, "name": name, "progress": self._progress}

    def answer(self, call: dict[str, Any]) -> dict[str, Any]:
        """The reply to a call, without its number."""
        name = call.get("call")
        if name == "step":
            return self._step(call)
        if name == "log_probs":
            return self._log_probs(call)
        if name == "publish":
            return self._publish(call)
        if name == "save":
            keep = int(self._hello.get("keep") or 1)
            _checkpoint.save(Path(self._hello["save"]), self._optimizer, call.get("progress"), keep, self._ranks)
            return {}
        if name == "save_hf":
            if not isinstance(call.get("dir"), str):
                raise Refused(f"save_hf: expected `dir`, a string, found {call.get('dir')!r}")
            self._layout.write(self._model.module, self._ranks, Path(call["dir"]))
            return {}
        raise Refused(f"call: expected step, log_probs, publish, save or save_hf, found {name!r}")

    def _batches(self, samples: list[Sample], weights: list[float]) -> list[tuple[Batch, bool]]:
        """This rank's micro-batches of those that are trained on. Every rank has as many: one that has too few repeats
        the smallest, without weight, and False."""
        options, ranks, padded = self._options, self._ranks, self._model.padded
        chosen = [index for index, sample in enumerate(samples) if sample.trained.any()]
        lengths = [len(samples[index]) for index in chosen]
        limits = {"ranks": ranks.size, "padded": padded, "max_samples": options.micro_batch_size}
        orders = micro_batches(lengths, options.max_tokens_per_gpu, **limits)
        orders = [[chosen[index] for index in order] for order in orders]
        found = []
        for turn in range(0, len(orders), ranks.size):
            own = turn + ranks.rank < len(orders)
            order = orders[turn + ranks.rank] if own else orders[-1]
            given = weights if own else [0.0] * len(samples)
            found.append((pack(samples, given, order, padded=padded, device=ranks.device), own))
        return found

    def _step(self, call: dict[str, Any]) -> dict[str, Any]:
        """The optimiser steps on a rollout. Log-probs of the old policy are those before the first of several."""
        options = self._options
        samples = self._ranks.together(lambda: read(self._log, call.get("samples"), self._model.vocabulary))
        planned, told = [], LogProbs(samples)
        for order in steps([sample.rollout_id for sample in samples], options.global_batch_size):
            some = [samples[index] for index in order]
            planned.append((order, self._batches(some, token_weights(some, options.calculate_per_token_loss))))
        if len(planned) > 1 and not options.use_rollout_logprobs:
            with torch.no_grad():
                look = lambda batch: replace(batch, old_log_probs=self._model.log_probs(batch)[0])
                planned = [(order, [(look(batch), own) for batch, own in batches]) for order, batches in planned]
        sums, apart, lr = torch.zeros(len(FIGURES), dtype=torch.float64), torch.zeros(2, dtype=torch.float64), 0.0
        for number, (order, batches) in enumerate(planned, 1):
            figures, apart_now, lr_now, problem = self._optimise(order, batches, told)
            if problem is not None:
                return {"not_finite": problem if len(planned) == 1 else f"step {number} of {len(planned)}: {problem}"}
            sums, apart, lr = sums + figures / len(planned), torch.maximum(apart, apart_now), max(lr, lr_now)
        p99, furthest = apart.tolist()
        stats = {**dict(zip(FIGURES, sums.tolist(), strict=True)), "lr": lr}
        stats |= {"log_prob_diff_p99": p99, "log_prob_diff_max": furthest}
        reply = {"stats": {name: value for name, value in stats.items() if math.isfinite(value)}}
        # An earlier loop does not read a line that is so long.
        return {**reply, "trained_log_probs": told.text(self._ranks)} if call.get("trained_log_probs") else reply

    def _optimise(
        self, order: list[int], batches: list[tuple[Batch, bool]], told: LogProbs
    ) -> tuple[torch.Tensor, torch.Tensor, float, str | None]:
        """One optimiser step on the samples that ``order`` numbers: its ``FIGURES``, which difference 99 % are below and the
        largest (of the rank where it is largest), the learning rate, and what was not finite. ``told`` gets the log-probs."""
        options, ranks, optimizer = self._options, self._ranks, self._optimizer
        sums = torch.zeros(1 + len(WATCHED), dtype=torch.float64)
        apart: list[torch.Tensor] = []
        optimizer.clear()
        for batch, own in batches:
            reference = None
            if self._reference is not None:
                with torch.no_grad():
                    reference, _ = self._reference.log_probs(batch)
            new, entropy = self._model.log_probs(batch, entropy_gradient=options.entropy_coef != 0.0)
            terms = policy_loss(new, entropy, batch, options, reference)
            terms.loss.backward()
            optimizer.add()
            if own:
                sums += torch.cat([terms.loss.detach().reshape(1), terms.sums]).cpu()
                apart.append(terms.apart.cpu())
                told.put([order[index] for index in batch.order], terms.compared)
        sums, norm, lr = ranks.sum(sums), optimizer.grad_norm(), options.lr_at(optimizer.steps)
        for what, value in (("loss", sums[0].item()), ("gradient norm", norm)):
            if not math.isfinite(value):
                return sums, torch.zeros(2), lr, f"{what} is {'NaN' if math.isnan(value) else 'infinite'}"
        optimizer.step(options, lr, norm)
        ordered = torch.cat(apart or [torch.zeros(1)]).double().sort().values
        apart = ranks.max(ordered[[math.ceil(0.99 * len(ordered)) - 1, -1]])
        return torch.cat([sums, torch.tensor([norm], dtype=torch.float64)]), apart, lr, None

    @torch.no_grad()
    def _log_probs(self, call: dict[str, Any]) -> dict[str, Any]:
        # Of all response tokens, those that are not trained on included.
        samples = self._ranks.together(lambda: read(self._log, call.get("samples"), self._model.vocabulary, whole=True))
        told = LogProbs(samples)
        for batch, own in self._batches(samples, [1.0] * len(samples)):
            new, _ = self._model.log_probs(batch)
            if own:
                told.put(batch.order, new)
        return {"log_probs": told.rows(self._ranks)}

    def _publish(self, call: dict[str, Any]) -> dict[str, Any]:
        hello, ranks = self._hello, self._ranks
        if not isinstance(call.get("step"), int):
            raise Refused(f"publish: expected `step`, a whole number, found {call.get('step')!r}")
        settings, arguments = dict(self._settings), {}
        baseline = hello["baseline_dir"]
        if ranks.sharded:
            settings |= {"rank": ranks.rank, "ranks": ranks.size, "join_deadline": ranks.deadline / 2}
            # One directory a rank: what a rank has depends on how many there are.
            baseline = f"{baseline}-rank-{ranks.rank}-of-{ranks.size}"
            arguments["attempt"] = ranks.tell(uuid.uuid4().hex)
        parts = self._layout.parts(self._model.module, ranks)

        def publish() -> int:
            if self._publisher is None:
                given = {"model": hello["model"], "baseline_dir": baseline, "hf_checkpoint": hello["hf_checkpoint"]}
                given |= {name: hello.get(name) for name in ("anchor_every", "anchor_share")}
                self._publisher = Publisher(hello["store"], hello["run"], resume=True, **given, **settings)
            self._publisher.publish(parts, step=call["step"], **arguments)
            return self._publisher.version

        return {"version": ranks.together(publish)}
