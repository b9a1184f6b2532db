"""The learner's losses, batches and settings, each computed a second time with loops in float64."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from driftless_rl.learner._batch import Batch, Sample, micro_batches, read, steps, token_weights
from driftless_rl.learner._loss import WATCHED, policy_loss
from driftless_rl.learner._options import Options
from driftless_rl.learner._ranks import Refused
from learner_loop import options, told

TIS = {"use_tis": True, "tis_clip_low": 0.5, "tis_clip": 1.2, "tis_level": "token", "tis_mode": "clip"}
RS = {"use_rs": True, "rs_lower_bound": 0.6, "rs_upper_bound": 1.4, "rs_level": "token"}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.2}
CASES = {
    "grpo": {},
    "grpo-clip-higher": {"eps_clip_high": 0.4},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.05},
    "cispo": {"advantage_estimator": "cispo"},
    "reinforce++": {"advantage_estimator": "reinforce_plus_plus"},
    "rejection": {"advantage_estimator": "rejection_sampling"},
    "eps-clip-c": {"eps_clip_c": 1.3},
    "tis": TIS,
    "tis-gspo": {"advantage_estimator": "gspo", **TIS},
    "tis-cispo": {"advantage_estimator": "cispo", **TIS},
    "icepop": TIS | {"tis_mode": "mask"},
    "mis-sequence": TIS | {"tis_mode": "mask", "tis_level": "sequence"},
    "tis-geometric": TIS | {"tis_level": "geometric"},
    "rs": RS,
    "rs-geometric-veto": RS | {"rs_level": "geometric", "rs_veto_threshold": 0.5},
    "opsm": {"use_opsm": True, "opsm_delta": 0.05},
    "entropy": {"entropy_coef": 0.3},
    **{kind: KL | {"kl_loss_type": kind} for kind in ("k1", "k2", "k3", "low_var_kl")},
    "unbiased-k3": KL | {"kl_loss_type": "k3", "use_unbiased_kl": True},
}
SAMPLES = [0, 0, 0, 1, 1, 2, 2, 2, 2]
ROLLOUT = [-1.0, -2.0, -0.4, -3.0, -0.7, -1.1, -2.2, -0.3, -9.0]
# Ratios on both sides of every bound, one beyond the bound of log-ratios' estimates.
NEW = [-0.9, -2.5, -0.35, -2.2, -0.75, -1.9, -1.8, -0.8, -5.0]
# The trainer's policy before the first of several steps.
OLD = [-1.1, -2.2, -0.3, -2.7, -0.2, -1.0, -2.5, -1.1, -8.0]
REFERENCE = [-1.2, -2.1, -0.5, -2.6, -0.6, -1.0, -2.9, -0.2, -10.0]
ENTROPY = [1.0, 0.5, 2.0, 1.5, 0.7, 0.3, 1.1, 0.2, 0.9]
ADVANTAGES = [1.5, 1.5, 1.5, -1.0, -1.0, 0.7, 0.7, 0.7, 0.7]
WEIGHTS = [0.1, 0.1, 0.1, 0.2, 0.2, 0.075, 0.075, 0.075, 0.075]


def expected(new, fixed, entropy, old, given):
    """Loss and sums in float64. What the formulas take without gradient is computed from ``fixed``; ``old`` is None
    where the policy itself is the old one."""
    name, total, sums = given.get("advantage_estimator", "grpo"), 0.0, dict.fromkeys(WATCHED, 0.0)
    engines = given.get("use_rollout_logprobs", False)
    old = ROLLOUT if engines else fixed if old is None else old
    apart = [a - b for a, b in zip(fixed if engines else old, ROLLOUT)]
    for t, sample in enumerate(SAMPLES):
        own = [u for u in range(len(SAMPLES)) if SAMPLES[u] == sample]
        mean = lambda values: sum(values[u] for u in own) / len(own)
        moved = [new[u] - old[u] for u in range(len(SAMPLES))]
        log_ratio = mean(moved) if name == "gspo" else moved[t]
        at = {"token": apart[t], "sequence": sum(apart[u] for u in own), "geometric": mean(apart)}
        ratio, a = math.exp(log_ratio), ADVANTAGES[t]
        low, high = 1 - given.get("eps_clip", 0.2), 1 + given.get("eps_clip_high", 0.2)
        clipped = min(max(ratio, low), high)
        loss, cut = -min(ratio * a, clipped * a), clipped * a < ratio * a
        if name == "cispo":
            held = min(max(math.exp(fixed[t] - old[t]), low), high)
            loss, cut = -held * a * new[t], clipped != ratio
        if name == "rejection_sampling":
            loss, cut = -a * new[t], False
        if "eps_clip_c" in given and a < 0:
            loss = min(loss, -given["eps_clip_c"] * a)
        if "use_opsm" in given:
            far = a < 0 and mean([o - f for o, f in zip(old, fixed)]) > given["opsm_delta"]
            loss *= not far
            sums["opsm_clipfrac"] += WEIGHTS[t] * far
        if "use_tis" in given:
            weight = math.exp(at[given["tis_level"]])
            inside = given["tis_clip_low"] <= weight <= given["tis_clip"]
            cut_weight = min(max(weight, given["tis_clip_low"]), given["tis_clip"])
            loss *= cut_weight if given["tis_mode"] == "clip" else weight * inside
            sums["tis_clipfrac"] += WEIGHTS[t] * (not inside)
        if "use_rs" in given:
            weight, veto = math.exp(at[given["rs_level"]]), given.get("rs_veto_threshold")
            kept = given["rs_lower_bound"] <= weight <= given["rs_upper_bound"]
            kept = kept and (veto is None or min(math.exp(apart[u]) for u in own) >= veto)
            loss *= kept
            sums["rs_clipfrac"] += WEIGHTS[t] * (not kept)
        if "use_kl_loss" in given:
            d = new[t] - REFERENCE[t]
            k3 = math.exp(-d) - 1 + d
            factor = math.exp(moved[t]) if given.get("use_unbiased_kl") else 1.0
            estimate = factor * {"k1": d, "k2": d * d / 2, "k3": k3, "low_var_kl": min(k3, 10.0)}[given["kl_loss_type"]]
            loss += given["kl_loss_coef"] * estimate
            sums["kl_loss"] += WEIGHTS[t] * estimate
        loss -= given.get("entropy_coef", 0.0) * entropy[t]
        total += WEIGHTS[t] * loss
        d = apart[t]
        sums["pg_clipfrac"] += WEIGHTS[t] * cut
        sums["ppo_kl"] -= WEIGHTS[t] * log_ratio
        sums["log_prob_diff_mean"] += WEIGHTS[t] * abs(d)
        sums["mismatch_k3"] += WEIGHTS[t] * (math.exp(d) - 1 - d)
        sums["entropy"] += WEIGHTS[t] * entropy[t]
    return total, sums, max(map(abs, apart))


def differences(values, loss):
    """The gradient of ``loss`` by central differences."""
    at = lambda i, by: loss([value + by * (i == j) for j, value in enumerate(values)])
    return [(at(i, 1e-6) - at(i, -1e-6)) / 2e-6 for i in range(len(values))]


@pytest.mark.parametrize("old", ["policy", "before", "engine"])
@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_losses_and_gradients_are_those_of_loops_in_float64(given, old):
    f32 = lambda values: torch.tensor(values, dtype=torch.float32)
    none = torch.empty(0)
    before = OLD if old == "before" else None
    given = given | ({"use_rollout_logprobs": True} if old == "engine" else {})
    columns = f32(WEIGHTS), f32(ROLLOUT), f32(ADVANTAGES), None if before is None else f32(before)
    batch = Batch([0, 1, 2], none, none, None, (none, 0), none, none, torch.tensor(SAMPLES), *columns)
    new, entropy = f32(NEW).requires_grad_(), f32(ENTROPY).requires_grad_()
    terms = policy_loss(new, entropy, batch, options(**given), f32(REFERENCE))
    total, sums, furthest = expected(NEW, NEW, ENTROPY, before, given)
    assert terms.loss.item() == pytest.approx(total, abs=1e-5)
    assert dict(zip(WATCHED, terms.sums.tolist())) == pytest.approx(sums, abs=1e-5)
    assert terms.apart.max().item() == pytest.approx(furthest, abs=1e-5)
    terms.loss.backward()
    wanted = differences(NEW, lambda values: expected(values, NEW, ENTROPY, before, given)[0])
    assert new.grad.tolist() == pytest.approx(wanted, abs=1e-5)
    of_entropy = [0.0] * len(ENTROPY) if entropy.grad is None else entropy.grad.tolist()
    assert of_entropy == pytest.approx([-given.get("entropy_coef", 0.0) * weight for weight in WEIGHTS], abs=1e-6)


def test_ratios_without_bound_are_cut_before_they_are_infinite():
    batch = Batch([0], *[torch.empty(0)] * 6, torch.zeros(1).long(), torch.ones(1), torch.tensor([-200.0]), -torch.ones(1))
    new = torch.tensor([-0.1], requires_grad=True)
    terms = policy_loss(new, torch.zeros(1), batch, options(use_rollout_logprobs=True), None)
    assert terms.loss.item() == pytest.approx(math.exp(20.0), rel=1e-5)


def sample(trained, rollout_id):
    return Sample(None, np.array(trained, bool), rollout_id, 1.0)


def test_weights_are_the_means_they_are_named_after():
    samples = [sample([1, 1], 0), sample([1, 0, 1, 1], 1), sample([1, 1], 1)]
    assert token_weights(samples, True) == [1 / 7] * 3
    assert token_weights(samples, False) == [1 / 4, 1 / 10, 1 / 10]


def test_micro_batches_hold_every_sample_once_within_the_limit():
    lengths = [3, 9, 4, 4, 2]
    assert micro_batches(lengths, 8, ranks=1, padded=False) == [[1], [2, 3], [0, 4]]
    assert micro_batches(lengths, 8, ranks=1, padded=True) == [[1], [2, 3], [0, 4]]
    assert micro_batches([5, 6, 2], 8, ranks=1, padded=False) == [[1, 2], [0]]
    assert micro_batches([5, 6, 2], 8, ranks=1, padded=True) == [[1], [0], [2]]
    # Small ones go to both ranks.
    assert micro_batches([4, 4], 100, ranks=2, padded=False) == [[0], [1]]
    assert micro_batches([], 8, ranks=2, padded=False) == []


def test_steps_hold_whole_rollouts_in_their_order():
    assert steps([7, 3, 9, 5], 2) == [[0, 1], [2, 3]]
    assert steps([7, 7, 3, 9, 3], 2) == [[0, 1, 2, 4], [3]]
    assert steps([1, 2], None) == [[0, 1]]
    assert steps([0, 1, 3, 5, 6], 4) == [[0, 1, 2], [3, 4]]
    assert steps([], 2) == []


def test_learning_rates_warm_up_and_decay_by_hand():
    given = {"lr": 1.0, "min_lr": 0.2, "lr_warmup_iters": 4, "lr_decay_iters": 12}
    rates = lambda style: [options(**given, lr_decay_style=style).lr_at(step) for step in (0, 1, 4, 6, 8, 12, 13)]
    assert rates("constant") == pytest.approx([0.0, 0.25, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert rates("linear") == pytest.approx([0.0, 0.25, 1.0, 0.8, 0.6, 0.2, 0.2])
    assert rates("cosine") == pytest.approx([0.0, 0.25, 1.0, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2, 0.2])


@pytest.mark.parametrize(
    "given, words",
    [
        ({"ppo_epochs": 4}, "`ppo_epochs` is 4"),
        ({"advantage_estimator": "gae"}, "expected one of grpo"),
        ({"kl_loss_type": "k9"}, "`kl_loss_type`"),
        ({"tis_clip": None}, "`tis_clip`"),
        ({"tis_level": "word"}, "`tis_level`"),
        ({"tis_mode": None}, "`tis_mode`"),
        ({"rs_veto_threshold": -1}, "`rs_veto_threshold`"),
        ({"advantage_estimator": "ppo"}, "`advantage_estimator`"),
        ({"kl_coef": 0.1}, "`kl_coef` is 0.1"),
        ({"use_opd": True}, "`use_opd` is True"),
        ({"gamma": 0.9}, "`gamma` is 0.9"),
        ({"ref_update_interval": 3}, "`ref_update_interval` is 3"),
        ({"dtype": "float16"}, "`dtype`"),
        ({"lr": "fast"}, "`lr`: expected float, found 'fast'"),
        ({"lr": -1.0}, "`lr`"),
        ({"max_tokens_per_gpu": 2.5}, "`max_tokens_per_gpu`"),
        ({"eps_clip_c": math.inf}, "`eps_clip_c`"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_would_change_the_result_are_refused(given, words):
    with pytest.raises(Refused) as raised:
        options(**given)
    assert words in str(raised.value)


def test_options_of_the_loop_and_those_at_their_defaults_are_taken():
    hello = told(normalize_advantages=True, lr=1) | {"temperature": 0.5}
    hello["options"]["ppo_epochs"] = 4
    found = Options.of(hello)
    assert (found.lr, found.temperature) == (1, 0.5)


def test_options_that_are_not_sent_are_refused_by_name():
    hello = told() | {"temperature": 1.0}
    del hello["options"]["eps_clip"]
    with pytest.raises(Refused, match="`eps_clip`: expected float, found nothing"):
        Options.of(hello)


def test_tokens_that_are_too_old_are_not_trained_on():
    columns = {"tokens": np.arange(6), "log_probs": np.zeros(4), "loss_mask": np.array([1, 1, 0, 1], np.uint8)}
    log = SimpleNamespace(wait=lambda position, timeout: 1, get=lambda position: SimpleNamespace(prompt_len=2, **columns))
    given = {"position": 0, "rollout_id": 0, "advantage": 1.0}
    assert read(log, [given], 64)[0].trained.tolist() == [True, True, False, True]
    assert read(log, [given | {"stale": 1}], 64)[0].trained.tolist() == [False, True, False, True]
    assert read(log, [given | {"stale": 9}], 64)[0].trained.tolist() == [False] * 4
    with pytest.raises(Refused, match="expected `stale`, 0 or more, found -1"):
        read(log, [given | {"stale": -1}], 64)


def test_log_probs_that_are_not_finite_are_refused():
    columns = {"tokens": np.array([1, 2]), "log_probs": np.array([math.nan]), "loss_mask": np.ones(1, np.uint8)}
    log = SimpleNamespace(wait=lambda position, timeout: 1, get=lambda position: SimpleNamespace(prompt_len=1, **columns))
    with pytest.raises(Refused, match="position 0: expected finite log-probs"):
        read(log, [{"position": 0, "rollout_id": 0, "advantage": 1.0}], 64)
