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
DECAYS = ("constant", "linear", "cosine")
KINDS = ("k1", "k2", "k3", "low_var_kl")
LEVELS = ("token", "sequence", "geometric")
MODES = ("clip", "mask")
DTYPES = (None, "bfloat16", "float32")
# The loop has done them when it sends an advantage.
OF_THE_LOOP = ("grpo_std_normalization", "normalize_advantages")


@dataclass(frozen=True)
class Options:
    """The options that change what is learned, or how; by default as ``driftless train`` has them. ``docs/algorithms.md``
    says what they mean."""

    dtype: str | None = None
    lr: float = 1e-6
    min_lr: float = 0.0
    lr_warmup_iters: int = 0
    lr_decay_style: str = "constant"
    lr_decay_iters: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    clip_grad: float = 1.0
    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None
    use_rollout_logprobs: bool = False
    tis: dict | None = None
    rs: dict | None = None
    opsm_delta: float | None = None
    kl_loss: dict | None = None
    use_unbiased_kl: bool = False
    calculate_per_token_loss: bool = False
    entropy_coef: float = 0.0
    advantage_estimator: str = "grpo"
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    max_tokens_per_gpu: int = 16384
    recompute: bool = False
    log_probs_chunk_size: int | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, hello: dict[str, Any]) -> Options:
        """Those of a ``hello``.

        Raises:
            Refused: an option that is not known and is not off, or a value that cannot be.
        """
        given = dict(hello.get("options") or {})
        for name in OF_THE_LOOP:
            given.pop(name, None)
        known = {field.name: field for field in fields(cls)}
        given["temperature"] = hello.get("temperature", 1.0)
        for name, value in given.items():
            if name not in known and value not in (None, False, 0):
                raise Refused(f"hello: options: `{name}` is {value!r}, which this learner does not do")
        given = {name: value for name, value in given.items() if name in known}
        for name, value in given.items():
            if not _fits(known[name].type, value):
                raise Refused(f"hello: options: `{name}`: expected {known[name].type}, found {value!r}")
        options = cls(**given)
        for name, allowed in (("advantage_estimator", tuple(SURROGATES)), ("lr_decay_style", DECAYS), ("dtype", DTYPES)):
            _one_of(name, getattr(options, name), allowed)
        for name, value in (("tis", options.tis), ("rs", options.rs)):
            if value is not None:
                _numbers(name, value, ("low", "high"))
                _one_of(f"{name}.level", value.get("level"), LEVELS)
        if options.tis is not None:
            _one_of("tis.mode", options.tis.get("mode"), MODES)
        if options.rs is not None and options.rs.get("veto") is not None:
            _numbers("rs", options.rs, ("veto",))
        if options.kl_loss is not None:
            _numbers("kl_loss", options.kl_loss, ("coef",))
            _one_of("kl_loss.kind", options.kl_loss.get("kind"), KINDS)
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
        coarse = any(value is not None and value["level"] != "token" for value in (self.tis, self.rs))
        vetoes = self.rs is not None and self.rs.get("veto") is not None
        return self.surrogate == "sequence" or self.opsm_delta is not None or coarse or vetoes

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
    return isinstance(value, {"str": str, "bool": bool, "dict": dict}[kind])


def _one_of(name: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        raise Refused(f"hello: options: `{name}`: expected one of {', '.join(map(str, allowed))}, found {value!r}")


def _numbers(name: str, value: dict, names: tuple[str, ...]) -> None:
    for part in names:
        if not _fits("float", value.get(part)):
            raise Refused(f"hello: options: `{name}.{part}`: expected a number, found {value.get(part)!r}")
