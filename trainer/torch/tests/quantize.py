"""What numpy and PyTorch make of the matrices of tests/quantize.rs in fp8: quantize.py DIR.

DIR/<case> has shape.json, matrix (bf16 or f32), weight (e4m3) and scale_inv (f32), row-major and little-endian.
numpy takes the largest magnitude of each block and divides, block by block; PyTorch rounds to e4m3.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

F32 = np.float32
SHAPES = [(1, 1), (128, 128), (129, 127), (130, 257), (384, 256)]


def quantized(matrix):
    rows, columns = matrix.shape
    weight = np.empty_like(matrix, dtype=np.uint8)
    scale_inv = np.empty((-(-rows // 128), -(-columns // 128)), dtype=F32)
    for down in range(scale_inv.shape[0]):
        for across in range(scale_inv.shape[1]):
            place = np.s_[128 * down : 128 * (down + 1), 128 * across : 128 * (across + 1)]
            block = matrix[place]
            scale = max(np.abs(block).max(), F32(1e-10)) / F32(448)
            scaled = np.clip(block / scale, F32(-448), F32(448))
            weight[place] = torch.from_numpy(scaled).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            scale_inv[down, across] = scale
    return weight, scale_inv


def main(directory):
    torch.manual_seed(11)
    cases = {f"normal-{n}": torch.randn(shape) * 0.02 for n, shape in enumerate(SHAPES)}
    # Every exponent of f32, and those that e4m3 has beside its largest, with a block of zeros.
    for name, exponents in {"wide": (-149, 126), "narrow": (-20, 0)}.items():
        cases[name] = torch.randn(256, 300) * torch.exp2(torch.randint(*exponents, (256, 300)).float())
        cases[name][:128, :128] = 0.0
    cases["denormal"] = torch.full((3, 200), 1e-40)
    cases["largest"] = torch.tensor([[torch.finfo(torch.bfloat16).max, -1.0], [0.0, -0.0]])
    # Blocks whose scale is 1, so that what lies between two e4m3 lies between them exactly.
    halves = torch.cat([torch.arange(-448 * 32, 448 * 32 + 1) / 32, torch.arange(-64, 65) / 1024])
    rows = -(-halves.numel() // 127)
    halves = torch.nn.functional.pad(halves, (0, 127 * rows - halves.numel())).view(rows, 127)
    cases["ties"] = torch.cat([torch.full((rows, 1), 448.0), halves], dim=1)
    both = [(f"{name}-f32", matrix, torch.float32) for name, matrix in cases.items()]
    both += [(f"normal-{n}-bf16", cases[f"normal-{n}"], torch.bfloat16) for n in (0, 1, 3)]
    for name, matrix, dtype in both:
        matrix = matrix.to(dtype)
        to = directory / name
        to.mkdir()
        (to / "shape.json").write_text(json.dumps(list(matrix.shape)))
        (to / "matrix").write_bytes(matrix.view(torch.uint8).numpy().tobytes())
        weight, scale_inv = quantized(matrix.float().numpy())
        (to / "weight").write_bytes(weight.tobytes())
        (to / "scale_inv").write_bytes(scale_inv.tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
