"""Makes the `.ptx` files of this crate from the `.cu` files beside them, with the runtime compiler of CUDA 13.0 (on
PyPI: nvidia-cuda-nvrtc 13.0).

    python bridge/ptx.py /path/to/libnvrtc.so.13
"""

import ctypes
import re
import sys
from pathlib import Path

SOURCES = [Path(__file__).parent / "src" / name for name in ("live/device/patch.cu", "push/device/gather.cu")]


def compile(library: str, source: Path) -> str:
    """The text of a source's `.ptx`."""
    # It looks for its other half by name.
    for half in Path(library).parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(half), ctypes.RTLD_GLOBAL)
    nvrtc, program, size = ctypes.CDLL(library), ctypes.c_void_p(), ctypes.c_size_t()

    def call(name: str, *arguments) -> None:
        if getattr(nvrtc, name)(*arguments) and name != "nvrtcCompileProgram":
            raise RuntimeError(name)

    call("nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
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
    body = re.sub(r"\.version \d+\.\d+", ".version 7.0", body).strip()
    return f"// Made from {source.name} by `python bridge/ptx.py libnvrtc.so.13` (CUDA 13.0); not to be edited.\n{body}\n"


if __name__ == "__main__":
    for source in SOURCES:
        source.with_suffix(".ptx").write_text(compile(sys.argv[1], source))
