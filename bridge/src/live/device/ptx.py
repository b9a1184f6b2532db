"""Makes `patch.ptx` of `patch.cu`, with the runtime compiler of CUDA 13.0 (on PyPI: nvidia-cuda-nvrtc 13.0).

    python ptx.py /path/to/libnvrtc.so.13
"""

import ctypes
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent


def compile(library: str) -> str:
    """The text of `patch.ptx`."""
    # It looks for its other half by name.
    for half in Path(library).parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(half), ctypes.RTLD_GLOBAL)
    nvrtc, program, size = ctypes.CDLL(library), ctypes.c_void_p(), ctypes.c_size_t()

    def call(name: str, *arguments) -> None:
        if getattr(nvrtc, name)(*arguments) and name != "nvrtcCompileProgram":
            raise RuntimeError(name)

    source = (HERE / "patch.cu").read_bytes()
    call("nvrtcCreateProgram", ctypes.byref(program), source, b"patch.cu", 0, None, None)
    options = (ctypes.c_char_p * 1)(b"--gpu-architecture=compute_75")
    call("nvrtcCompileProgram", program, 1, options)
    call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    call("nvrtcGetProgramLog", program, log)
    if log.value:
        raise RuntimeError(log.value.decode())
    call("nvrtcGetPTXSize", program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    call("nvrtcGetPTX", program, text)
    # What it uses, older drivers know; the comments name the compiler's build.
    body = "\n".join(line for line in text.value.decode().splitlines() if not line.startswith("//"))
    return re.sub(r"\.version \d+\.\d+", ".version 7.0", body).strip() + "\n"


if __name__ == "__main__":
    (HERE / "patch.ptx").write_text(compile(sys.argv[1]))
