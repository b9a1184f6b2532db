"""Losses over trained tokens, as ``docs/algorithms.md`` has them. ``m`` is the number of trained tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._batch import Batch
from ._options import Options

# A ratio of e^20 says only that two policies have nothing to do with each other; an infinite one would poison the step.
LOG_RATIO_MAX = 20.0
# What the sums are of.
WATCHED = (
    "pg_clipfrac",
    "ppo_kl",
    "log_prob_diff_mean",
    "mismatch_k3",
    "entropy",
    "kl_loss",
    "tis_clipfrac",
    "rs_clipfrac",
    "opsm_clipfrac",
)


@dataclass
class Terms:
    """A loss, and what one wants to watch.

    Attributes:
        loss: f64 scalar that carries gradients: the weighted sum over tokens.
        sums: f64 ``[9]``, weighted as the loss is, in the order of ``WATCHED``.
        compared: f32 ``[m]``: the trainer's log-prob that is compared with the engine's.
        apart: f32 ``[m]``: how far it is from that.
    """

    loss: torch.Tensor
    sums: torch.Tensor
    compared: torch.Tensor
    apart: torch.Tensor


@dataclass
class _Sample:
    """What is said of the whole sample of a token; each is ``[m]``.

    Attributes:
        ratio: mean of policy - old log-prob, with gradients.
        sum, mean, least: of old - engine's log-prob.
    """

    ratio: torch.Tensor
    sum: torch.Tensor
    mean: torch.Tensor
    least: torch.Tensor


def policy_loss(
    new: torch.Tensor, entropy: torch.Tensor, batch: Batch, options: Options, reference: torch.Tensor | None
) -> Terms:
    """The policy loss of tokens with log-probs ``new`` ``[m]`` and entropies ``[m]``, both f32 and with gradients.
    ``reference`` ``[m]`` has the log-probs of the reference policy, for a KL term."""
    now = new.detach()
    old = now if batch.old_log_probs is None else batch.old_log_probs
    if options.use_rollout_logprobs:
        old = batch.rollout_log_probs
    compared = now if options.use_rollout_logprobs else old
    behind = compared - batch.rollout_log_probs
    sample = _of_samples(new, old, behind, batch) if options.compares_samples else None
    ratio_log = _bounded(sample.ratio if options.surrogate == "sequence" else new - old)
    losses, clipped = _surrogate(new, ratio_log, batch.advantages, options)
    tis_clipped = rejected = far = kl_term = torch.zeros_like(now)
    if options.use_opsm:
        far = (-sample.ratio.detach() > options.opsm_delta) & (batch.advantages < 0)
        losses = losses * ~far
    if options.use_tis:
        weight = _ratio(options.tis_level, behind, sample)
        low, high = options.tis_clip_low, options.tis_clip
        cut = weight.clamp(low, high) if options.tis_mode == "clip" else weight * ((weight >= low) & (weight <= high))
        tis_clipped = cut != weight
        losses = losses * cut
    if options.use_rs:
        rejected = _rejected(options, behind, sample)
        losses = losses * ~rejected
    if options.use_kl_loss:
        weight = _bounded(new - old).exp() if options.use_unbiased_kl else None
        kl_term = kl(options.kl_loss_type, new, reference, weight)
        losses = losses + options.kl_loss_coef * kl_term
    if options.entropy_coef != 0.0:
        losses = losses - options.entropy_coef * entropy
    watched = (clipped, -ratio_log, behind.abs(), _k3(_bounded(behind).neg()), entropy, kl_term, tis_clipped, rejected, far)
    with torch.no_grad():
        sums = torch.stack([(column * batch.weights).sum(dtype=torch.float64) for column in watched])
    return Terms((losses * batch.weights).sum(dtype=torch.float64), sums, compared, behind.abs())


def _of_samples(new: torch.Tensor, old: torch.Tensor, behind: torch.Tensor, batch: Batch) -> _Sample:
    """What is said of the samples of a micro-batch, all of whose tokens are there."""
    zeros = new.new_zeros(len(batch.order), dtype=torch.float64)
    total = lambda column: zeros.index_add(0, batch.samples, column.double())
    counts = total(torch.ones_like(behind)).clamp(min=1.0)
    least = zeros.scatter_reduce(0, batch.samples, behind.double(), "amin", include_self=False)
    columns = total(new - old) / counts, total(behind), total(behind) / counts, least
    return _Sample(*(column[batch.samples].float() for column in columns))


def _ratio(level: str, behind: torch.Tensor, sample: _Sample | None) -> torch.Tensor:
    """The probability ratio ``[m]`` of trainer and engine."""
    return _bounded({"token": lambda: behind, "sequence": lambda: sample.sum, "geometric": lambda: sample.mean}[level]()).exp()


def _rejected(options: Options, behind: torch.Tensor, sample: _Sample | None) -> torch.Tensor:
    """Where tokens are not learned from ``[m]``."""
    ratio = _ratio(options.rs_level, behind, sample)
    rejected = (ratio < options.rs_lower_bound) | (ratio > options.rs_upper_bound)
    if options.rs_veto_threshold is not None:
        rejected |= sample.least.exp() < options.rs_veto_threshold
    return rejected


def _surrogate(
    new: torch.Tensor, ratio_log: torch.Tensor, advantages: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each token ``[m]``, and where its ratio was clipped ``[m]``."""
    ratio = ratio_log.exp()
    clipped = ratio.clamp(1.0 - options.eps_clip, 1.0 + options.eps_clip_high)
    if options.surrogate == "likelihood":
        return -advantages * new, torch.zeros_like(ratio)
    if options.surrogate == "cispo":
        return -clipped.detach() * advantages * new, clipped != ratio
    gain, clipped_gain = ratio * advantages, clipped * advantages
    losses = -torch.minimum(gain, clipped_gain)
    if options.eps_clip_c is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -options.eps_clip_c * advantages), losses)
    return losses, clipped_gain < gain


def kl(kind: str, policy: torch.Tensor, reference: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Estimates ``[m]`` of KL(policy, reference) from the log-probs ``[m]`` of the sampled tokens, times ``weight``."""
    d = policy - reference
    if kind == "low_var_kl":
        # Beyond the inner bound the outer one holds: the estimate stays the same, and its gradient finite.
        d = _bounded(d)
    estimate = d if kind == "k1" else d.square() / 2 if kind == "k2" else _k3(d)
    if weight is not None:
        estimate = estimate * weight
    return estimate.clamp(max=10.0) if kind == "low_var_kl" else estimate


def _k3(d: torch.Tensor) -> torch.Tensor:
    return torch.expm1(-d) + d


def _bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
