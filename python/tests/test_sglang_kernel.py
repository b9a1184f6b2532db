"""The kernel that patches weights on a CUDA device, as far as it goes without one."""

import runpy
from pathlib import Path

import pytest
import torch

KERNEL = Path(__file__).parents[2] / "bridge/src/live/device"


def test_the_compiled_kernel_is_that_of_the_source():
    found = list(Path(torch.__file__).parents[1].glob("nvidia/cu13/lib/libnvrtc.so.13"))
    if not found:
        pytest.skip("this torch brings no runtime compiler of CUDA 13")
    assert runpy.run_path(str(KERNEL / "ptx.py"))["compile"](str(found[0])) == (KERNEL / "patch.ptx").read_text()
