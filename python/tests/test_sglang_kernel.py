"""The kernels for CUDA devices, as far as they go without one."""

import runpy
from pathlib import Path

import pytest
import torch

MAKE = runpy.run_path(str(Path(__file__).parents[2] / "bridge/ptx.py"))


@pytest.mark.parametrize("source", MAKE["SOURCES"], ids=lambda source: source.name)
def test_the_compiled_kernel_is_that_of_the_source(source):
    found = list(Path(torch.__file__).parents[1].glob("nvidia/cu13/lib/libnvrtc.so.13"))
    if not found:
        pytest.skip("this torch brings no runtime compiler of CUDA 13")
    assert MAKE["compile"](str(found[0]), source) == source.with_suffix(".ptx").read_text()
