"""vLLM's server with linear layers that keep their weights, as they do on a GPU: its CPU build packs them away.

Processes that it spawns run this file too, up to the last lines.
"""

import runpy

import vllm._custom_ops as ops
from vllm.model_executor.layers import utils

# vLLM asks both before it packs a layer, and multiplies with PyTorch where both are false. The second one is true of
# small layers on a processor with AMX.
ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda *_: False

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
