"""What the loop says about loss and optimiser: ``options`` of ``hello``."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from ._ranks import Refused

# Which ratio is clipped, by the flag that also names the advantages. These have come from the loop.
SURROGATES = {
    "grpo": "token",
    "reinforce_plus_plus": "token",
    "reinforce_plus_plus_baseline": "token",
    "gspo": "sequence",
    "cispo": "cispo",
    "rejection_sampling": "likelihood",
}
LEVELS = ("token", "sequence", "geometric")
ONE_OF = {
    "advantage_estimator": tuple(SURROGATES),
    "dtype": (None, "bfloat16", "float32"),
    "kl_loss_type": ("k1", "k2", "k3", "low_var_kl"),
    "lr_decay_style": ("constant", "linear", "cosine"),
    "recompute_granularity": ("full", "none"),
    "rs_level": LEVELS,
    "tis_level": LEVELS,
    "tis_mode": ("clip", "mask"),
}
# The loop has done the first two when it sends an advantage; of the others no figure depends.
IGNORED = {"disable_grpo_std_normalization", "normalize_advantages", "balance_data", "optimizer_cpu_offload"}


@dataclass(frozen=True)
class Options:
    """The options of ``driftless train`` that this learner does; ``docs/algorithms.md`` says what they mean. The loop
    sends each of them with its value, and names those that are not at their defaults."""

    advantage_estimator: str
    eps_clip: float
    eps_clip_high: float
    eps_clip_c: float | None
    calculate_per_token_loss: bool
    dtype: str | None
    lr: float
    lr_warmup_iters: int
    lr_decay_style: str
    lr_decay_iters: int
    min_lr: float
    entropy_coef: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    clip_grad: float
    global_batch_size: int | None
    micro_batch_size: int | None
    max_tokens_per_gpu: int
    recompute_granularity: str
    log_probs_chunk_size: int | None
    use_rollout_logprobs: bool
    use_tis: bool
    tis_clip: float
    tis_clip_low: float
    tis_level: str
    tis_mode: str
    use_rs: bool
    rs_upper_bound: float
    rs_lower_bound: float
    rs_level: str
    rs_veto_threshold: float | None
    use_opsm: bool
    opsm_delta: float
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: str
    use_unbiased_kl: bool
    ref_load: str | None
    temperature: float

    @classmethod
    def of(cls, hello: dict[str, Any]) -> Options:
        """Those of a ``hello``.

        Raises:
            Refused: an option that is not at its default and that this learner does not do, or a value that cannot be.
        """
        given, changed = hello.get("options"), hello.get("changed")
        if not isinstance(given, dict) or not isinstance(changed, list):
            raise Refused("hello: expected `options`, an object, and `changed`, a list of names")
        given = given | {"temperature": hello.get("temperature")}
        known = {field.name: field for field in fields(cls)}
        for name in changed:
            if name not in known and name not in IGNORED:
                raise Refused(f"hello: options: `{name}` is {given.get(name)!r}, which this learner does not do")
        for name, field in known.items():
            if name not in given or not _fits(field.type, given[name]):
                found = repr(given[name]) if name in given else "nothing"
                raise Refused(f"hello: options: `{name}`: expected {field.type}, found {found}")
        options = cls(**{name: given[name] for name in known})
        for name, allowed in ONE_OF.items():
            if given[name] not in allowed:
                found = f"expected one of {', '.join(map(str, allowed))}, found {given[name]!r}"
                raise Refused(f"hello: options: `{name}`: {found}")
        if not options.temperature > 0:
            raise Refused(f"hello: `temperature`: expected above 0, found {options.temperature}")
        return options

    @property
    def surrogate(self) -> str:
        """``token``, ``sequence``, ``cispo`` or ``likelihood``."""
        return SURROGATES[self.advantage_estimator]

    @property
    def compares_samples(self) -> bool:
        """Whether the loss needs to know something of whole samples."""
        coarse = (self.use_tis and self.tis_level != "token") or (self.use_rs and self.rs_level != "token")
        vetoes = self.use_rs and self.rs_veto_threshold is not None
        return self.surrogate == "sequence" or self.use_opsm or coarse or vetoes

    def lr_at(self, steps: int) -> float:
        """The learning rate of the step that follows ``steps`` others: warm-up and decay as Megatron has them."""
        if self.lr_warmup_iters > 0 and steps <= self.lr_warmup_iters:
            return self.lr * steps / self.lr_warmup_iters
        if self.lr_decay_style == "constant":
            return self.lr
        if steps > self.lr_decay_iters:
            return self.min_lr
        done = (steps - self.lr_warmup_iters) / max(self.lr_decay_iters - self.lr_warmup_iters, 1)
        rest = 1.0 - done if self.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return self.min_lr + rest * (self.lr - self.min_lr)


def _fits(kind: str, value: Any) -> bool:
    """Whether a value of JSON is of the type of a field, which is text under ``from __future__ import annotations``."""
    kind, _, optional = kind.partition(" | ")
    if value is None:
        return optional == "None"
    if kind in ("float", "int"):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return (whole or (kind == "float" and isinstance(value, float) and math.isfinite(value))) and value >= 0
    return isinstance(value, {"str": str, "bool": bool}[kind])
