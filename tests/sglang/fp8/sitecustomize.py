"""A stand-in for SGLang's fp8 kernels, which want an Intel CPU with AMX or a GPU; Python imports it at its start.

SGLang loads, updates and hashes fp8 weights by its own code. Only the product is another: f32, of what the weights
stand for, with activations that are not quantised.
"""

import importlib.abc
import importlib.util
import sys

FP8 = "sglang.srt.layers.quantization.fp8"


def replace_kernels(fp8):
    import torch

    def apply(self, layer, x, bias=None):
        rows, columns = layer.weight.shape
        scales = layer.weight_scale_inv.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return torch.nn.functional.linear(x.float(), layer.weight.float() * scales, bias).to(x.dtype)

    fp8.dispatch_w8a8_block_fp8_linear = lambda **options: None
    fp8.Fp8LinearMethod.process_weights_after_loading = lambda self, layer: None
    fp8.Fp8LinearMethod.apply = apply


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != FP8:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            replace_kernels(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
