"""Attention within packed samples by CUDA's flash kernel: the work is that of the samples, not that of their row.

transformers' own ways take a mask of the whole row, or a package beside torch.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ._ranks import Refused

# Its name among transformers' implementations, and that of the argument that models hand down to it.
NAME, BOUNDS = "driftless_packed", "packed_bounds"
HEAD_DIM_MAX = 256


def takes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel is there: on Ampere and what came after it."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def is_chunked(config: Any) -> bool:
    """Whether layers look at chunks of a row, as Llama 4's do. The kernel has none, and masks count them from the row's
    beginning, not from the sample's."""
    text = config.get_text_config()
    return bool(getattr(text, "attention_chunk_size", None)) or "chunked_attention" in (getattr(text, "layer_types", None) or ())


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention ``[1, n, heads, width]`` of queries, keys and values ``[1, heads, n, width]``.

    Raises:
        Refused: for what the kernel does not do; ``Model`` looks once, when it is made.
    """
    bounds = more.get(BOUNDS)
    if bounds is None:
        raise Refused(f"{type(module).__name__} does not hand `{BOUNDS}` down to its attention")
    # Caps and sinks of scores; both ways for encoders.
    odd = [name for name in ("softcap", "s_aux") if more.get(name) is not None]
    causal = more.get("is_causal")
    if odd or attention_mask is not None or not (getattr(module, "is_causal", True) if causal is None else causal):
        raise Refused(f"{type(module).__name__} wants more than causal attention: {', '.join(odd) or 'a mask'}")
    width = query.shape[-1]
    if width > HEAD_DIM_MAX or width % 8 != 0 or value.shape[-1] != width:
        raise Refused(f"{type(module).__name__} has heads of {width} and {value.shape[-1]}")
    starts, longest = bounds
    rows = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    window = -1 if sliding_window is None else sliding_window - 1
    return flash(*rows, starts, longest, scaling, window).unsqueeze(0), None


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float | None,
    window: int,
) -> torch.Tensor:
    """Causal attention over rows ``[n, heads, width]``. ``starts`` i32 ``[s + 1]`` are the first rows of s samples, and n;
    the longest sample has ``longest``. A query sees ``window`` keys before its own, or all if that is -1."""
    return torch.ops.aten._flash_attention_forward(
        query, key, value, starts, starts, longest, longest, 0.0, True, False,
        scale=scale, window_size_left=window, window_size_right=0 if window >= 0 else -1,
    )[0]  # fmt: skip


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
