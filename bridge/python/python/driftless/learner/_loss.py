"""Losses over trained tokens, as ``docs/algorithms.md`` has them. ``m`` is the number of trained tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._batch import Batch
from ._options import Options

# A ratio of e^20 says only that two policies have nothing to do with each other; an infinite one would poison the step.
LOG_RATIO_MAX = 20.0
# What the sums are of.
WATCHED = ("pg_clipfrac", "ppo_kl", "log_prob_diff_mean", "mismatch_k3", "entropy", "kl_loss", "tis_clipfrac")


@dataclass
class Terms:
    """A loss, and what one wants to watch.

    Attributes:
        loss: f64 scalar that carries gradients: the weighted sum over tokens.
        sums: f64 ``[7]``, weighted as the loss is, in the order of ``WATCHED``.
        furthest: f32 scalar: the largest |policy - engine log-prob|.
    """

    loss: torch.Tensor
    sums: torch.Tensor
    furthest: torch.Tensor


def policy_loss(
    new: torch.Tensor, entropy: torch.Tensor, batch: Batch, options: Options, reference: torch.Tensor | None
) -> Terms:
    """The policy loss of tokens with log-probs ``new`` ``[m]`` and entropies ``[m]``, both f32 and with gradients.
    ``reference`` ``[m]`` has the log-probs of the reference policy, for a KL term."""
    now = new.detach()
    behind = now - batch.old_log_probs
    ratio_log = _log_ratio(new, batch, options)
    losses, clipped = _surrogate(new, ratio_log, batch.advantages, options)
    tis_clipped = kl_term = torch.zeros_like(now)
    if options.tis is not None:
        weight = _bounded(behind).exp()
        cut = weight.clamp(options.tis["low"], options.tis["high"])
        tis_clipped = cut != weight
        losses = losses * cut
    if options.kl_loss is not None:
        kl_term = kl(options.kl_loss["kind"], new, reference)
        losses = losses + options.kl_loss["coef"] * kl_term
    if options.entropy_coef != 0.0:
        losses = losses - options.entropy_coef * entropy
    watched = (clipped, -ratio_log, behind.abs(), _k3(_bounded(-behind)), entropy, kl_term, tis_clipped)
    with torch.no_grad():
        sums = torch.stack([(column * batch.weights).sum(dtype=torch.float64) for column in watched])
    return Terms((losses * batch.weights).sum(dtype=torch.float64), sums, behind.abs().max())


def _log_ratio(new: torch.Tensor, batch: Batch, options: Options) -> torch.Tensor:
    """Policy - old log-prob ``[m]``, bounded."""
    # One optimiser step a rollout: with TIS the old policy is the one that is being differentiated.
    own = new - (new.detach() if options.tis is not None else batch.old_log_probs)
    if options.surrogate == "sequence":
        zeros, own = own.new_zeros(len(batch.order), dtype=torch.float64), own.double()
        counts = zeros.index_add(0, batch.samples, torch.ones_like(own))
        own = (zeros.index_add(0, batch.samples, own) / counts)[batch.samples].float()
    return _bounded(own)


def _surrogate(
    new: torch.Tensor, ratio_log: torch.Tensor, advantages: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each token ``[m]``, and where its ratio was clipped ``[m]``."""
    ratio = ratio_log.exp()
    clipped = ratio.clamp(1.0 - options.eps_clip, 1.0 + options.eps_clip_high)
    if options.surrogate == "cispo":
        return -clipped.detach() * advantages * new, clipped != ratio
    gain, clipped_gain = ratio * advantages, clipped * advantages
    losses = -torch.minimum(gain, clipped_gain)
    if options.eps_clip_c is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -options.eps_clip_c * advantages), losses)
    return losses, clipped_gain < gain


def kl(kind: str, policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Estimates ``[m]`` of KL(policy, reference) from the log-probs ``[m]`` of the sampled tokens."""
    d = policy - reference
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return _k3(d)
    # Beyond the inner bound the outer one holds: the estimate stays the same, and its gradient finite.
    return _k3(_bounded(d)).clamp(max=10.0)


def _k3(d: torch.Tensor) -> torch.Tensor:
    return torch.expm1(-d) + d


def _bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
