"""One optimiser step of Qwen3 shapes by transformers and torch, as people run it: what `learner.rs` is compared with.

Usage: peer.py SHAPES LENGTHS [--steps N] [--recompute]     SHAPES 0.6b, 1.7b or 4b; LENGTHS 2x4096 or mixed:16384

bf16 weights, f32 masters, fused AdamW, SDPA, the loss of transformers over all tokens. Sequences come in any order, as rollouts do, and are
padded on the right, as many to a micro-batch as make at most 8,192 tokens with their padding. Prints tokens/s without padding, MFU, and the most memory that torch
held at once.
"""

import argparse
import random
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

PEAK = 989e12
PADDED_MAX = 8192
VOCABULARY = 151936
# hidden, intermediate, layers, heads
SHAPES = {"0.6b": (1024, 3072, 28, 16), "1.7b": (2048, 6144, 28, 16), "4b": (2560, 9728, 36, 32)}


def lengths_of(text: str) -> list[int]:
    """The lengths that `learner.rs` makes of the same text."""
    if not text.startswith("mixed:"):
        count, length = text.split("x")
        return [int(length)] * int(count)
    total, lengths, state = int(text.removeprefix("mixed:")), [], 88_172_645_463_325_252
    while sum(lengths) + 200 < total:
        state ^= state << 13 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 7
        state ^= state << 17 & 0xFFFFFFFFFFFFFFFF
        length = int(200 * (4096 / 200) ** ((state >> 11) / (1 << 53)))
        lengths.append(min(length, total - sum(lengths)))
    return sorted(lengths, reverse=True)


def micro_batches(lengths: list[int]) -> list[list[int]]:
    batches: list[list[int]] = []
    for length in random.Random(0).sample(lengths, len(lengths)):
        if batches and max(batches[-1] + [length]) * (len(batches[-1]) + 1) <= PADDED_MAX:
            batches[-1].append(length)
        else:
            batches.append([length])
    return batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", choices=SHAPES)
    parser.add_argument("lengths")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--recompute", action="store_true")
    args = parser.parse_args()
    hidden, intermediate, layers, heads = SHAPES[args.shapes]
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        rope_theta=1e6,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    if args.recompute:
        model.gradient_checkpointing_enable()
    model.train()
    parameters = list(model.parameters())
    masters = [parameter.detach().float().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-5, betas=(0.9, 0.95), fused=True)
    lengths = lengths_of(args.lengths)
    tokens = sum(lengths)
    batches = []
    for batch in micro_batches(lengths):
        ids = torch.randint(VOCABULARY, (len(batch), max(batch)), device="cuda")
        mask = torch.arange(max(batch), device="cuda")[None, :] < torch.tensor(batch, device="cuda")[:, None]
        # Without padding the mask is left out, as transformers' own kernels want it.
        batches.append((ids, None if mask.all() else mask.long(), ids.masked_fill(~mask, -100)))
    times = []
    for _ in range(args.steps + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for ids, mask, labels in batches:
            output = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False, num_items_in_batch=tokens)
            output.loss.backward()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    step = sorted(times[2:])[len(times[2:]) // 2]
    elements = sum(parameter.numel() for parameter in parameters)
    operations = 6 * elements * tokens + 6 * layers * heads * 128 * sum(n * n for n in lengths)
    padded = sum(ids.numel() for ids, _, _ in batches)
    print(
        f"transformers {args.shapes} {args.lengths} ({len(lengths)} sequences, {tokens} tokens, {padded} with padding), recompute "
        f"{args.recompute}: {tokens / step:,.0f} tok/s, MFU {100 * operations / step / PEAK:.1f} %, step {1e3 * step:.1f} ms, "
        f"peak {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB",
        flush=True,
    )


main()
