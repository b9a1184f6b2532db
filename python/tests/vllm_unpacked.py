"""vLLM's server with linear layers that keep their weights, as they do on a GPU: its CPU build packs them away.

Processes that it spawns run this file too, up to the last lines.
"""

import runpy

import vllm._custom_ops as ops

# vLLM asks this before it packs a layer, and multiplies with PyTorch where it is false.
ops._supports_onednn = False

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
