"""Reads a pickled bucket from standard input and prints what it says, as JSON.

With SGLang installed its own unpickler reads it, and its own FlattenedTensorMetadata and torch's types take part; only the function that would
open CUDA memory is replaced by one that keeps its arguments. Otherwise stand-ins take the place of both.
"""

import json
import pickle
import sys


def stand_ins():
    class Named:
        def __init__(self, name):
            self.name = name

        def __call__(self, *args):
            if self.name == "torch.Size":
                return list(args[0])
            if self.name == "torch.ByteTensor":
                return {"tensor": list(args[0])}
            return list(args)

    class Metadata:
        pass

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            if module == "builtins":
                return super().find_class(module, name)
            return Metadata if name == "FlattenedTensorMetadata" else Named(f"{module}.{name}")

    return Reader, lambda value: value.name if isinstance(value, Named) else None


def sglang():
    import torch
    from sglang.srt.utils import patch_torch
    from sglang.srt.utils.common import SafeUnpickler

    patch_torch._rebuild_cuda_tensor_modified = lambda *args: list(args)

    def show(value):
        if isinstance(value, torch.dtype):
            return str(value)
        if isinstance(value, torch.Tensor):
            return {"tensor": value.tolist()}
        if isinstance(value, type):
            return f"{value.__module__}.{value.__name__}"
        return None

    return SafeUnpickler, show


def plain(value, show):
    if isinstance(value, bytes):
        return {"bytes": list(value)}
    if isinstance(value, (list, tuple)):
        return [plain(item, show) for item in value]
    if value is None or isinstance(value, (bool, int, str, dict)):
        return value
    return show(value)


try:
    reader, show = sglang()
except ImportError:
    reader, show = stand_ins()
bucket = reader(sys.stdin.buffer).load()
assert list(bucket) == ["flattened_tensor", "metadata"], list(bucket)
metadata = [{key: plain(value, show) for key, value in vars(item).items()} for item in bucket["metadata"]]
print(json.dumps({"flattened_tensor": plain(bucket["flattened_tensor"], show), "metadata": metadata}))
