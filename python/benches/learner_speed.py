"""Tokens a second that ``driftless_rl.learner`` trains, at Qwen3-0.6B shapes on one GPU.

    python benches/learner_speed.py ATTENTION MAX_TOKENS LENGTHS [recompute]

Run it in ``python``, with the wheel, torch and transformers in Python's environment. ATTENTION is ``default`` or
a name for ``--attn-implementation``, MAX_TOKENS that of ``--max-tokens-per-gpu``, LENGTHS ``mixed`` (12 samples of 200
to 4,096 tokens), ``long`` (4 of 4,096) or ``short`` (128 of 128). A step reads the samples from a log, goes forward and
back, and updates the weights; the median of five after two is printed.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import driftless_rl
import numpy as np
import torch
from driftless_rl.learner._learner import Learner
from driftless_rl.learner._ranks import Ranks
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from learner_loop import told  # noqa: E402

CONFIG = Qwen3Config(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
LENGTHS = {
    "mixed": [4096, 3000, 2400, 1800, 1400, 1100, 800, 600, 400, 300, 250, 200],
    "long": [4096] * 4,
    "short": [128] * 128,
}
PROMPT, WARM, STEPS = 16, 2, 5


def prepare(root: Path, lengths: list[int]) -> dict:
    """A checkpoint, a run and a log; the call that a learner begins with."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        Qwen3ForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(root / "hf")
    torch.cuda.empty_cache()
    settings = {"hf_checkpoint": str(root / "hf"), "baseline_dir": str(root / "baseline")}
    store = (root / "store").as_uri()
    with driftless_rl.Publisher(store, "run", **settings) as publisher:
        publisher.publish_reference(root / "hf")
        run_id = publisher.run_id
    random = np.random.default_rng(1)
    with driftless_rl.RolloutLog(root / "log", run_id) as log:
        for at, length in enumerate(lengths):
            response = length - PROMPT
            log.append(
                sample_id=at,
                group_id=at,
                rollout_id=0,
                tokens=random.integers(0, CONFIG.vocab_size, length),
                prompt_len=PROMPT,
                log_probs=random.normal(-12, 0.1, response).astype(np.float32),
                loss_mask=np.ones(response, np.uint8),
            )
    ids = {"protocol": 3, "store": store, "run": "run", "run_id": run_id, "model": "policy"}
    return {**ids, **settings, "save": str(root / "save"), "keep": 1, "log": str(root / "log"), "seed": 1, "temperature": 1.0}


def main(attention: str, max_tokens: str, kind: str, *more: str) -> None:
    lengths = LENGTHS[kind]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        granularity = "full" if "recompute" in more else "none"
        options = {"lr": 1e-6, "max_tokens_per_gpu": int(max_tokens), "recompute_granularity": granularity}
        hello = prepare(Path(directory), lengths) | told(**options)
        ranks = Ranks(0, 1, torch.device("cuda"), 300.0)
        learner = Learner(hello, ranks, None if attention == "default" else attention, {})
        samples = [{"position": at, "rollout_id": at, "advantage": (-1.0) ** at} for at in range(len(lengths))]
        times = []
        for step in range(WARM + STEPS):
            start = time.monotonic()
            learner.answer({"call": "step", "rollout_id": step, "samples": samples})
            torch.cuda.synchronize()
            times.append(time.monotonic() - start)
    seconds = statistics.median(times[WARM:])
    figures = {"tokens": sum(lengths), "tokens_per_s": round(sum(lengths) / seconds)}
    figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    print(json.dumps({"attention": attention, "max_tokens": int(max_tokens), "lengths": kind, **options, **figures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
