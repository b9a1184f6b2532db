"""Writes the golden directories of tests/slime: a base checkpoint, and for each form two versions on top of it.

Made from docs/format/slime.md and nothing else. Needs numpy, zstandard, xxhash, blake3:

    python make.py OUTPUT_DIR
"""

import json
import pathlib
import struct
import sys
import zlib

import blake3
import numpy as np
import xxhash
import zstandard

TENSORS = {  # name: dtype, shape
    "lm_head.weight": ("BF16", [48, 16]),
    "model.embed.weight": ("BF16", [48, 16]),
    "model.ids": ("I64", [3]),
    "model.norm.weight": ("F32", [7]),
    "model.scale": ("F8_E4M3", [33]),
}
SIZES = {"BF16": 2, "I64": 8, "F32": 4, "F8_E4M3": 1}
FORMS = [("xor", "xxh3-128"), ("xor", "adler32"), ("overwrite", "blake3")]


def digest(algorithm, data):
    if algorithm == "xxh3-128":
        return xxhash.xxh3_128(data).hexdigest()
    if algorithm == "blake3":
        return blake3.blake3(data).hexdigest()
    return f"{zlib.adler32(data):08x}"


def payload(encoding, old, new):
    old, new = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    if encoding == "xor":
        return (old ^ new).tobytes()
    positions = np.flatnonzero(old != new).astype("<u4")
    return struct.pack("<I", positions.size) + positions.tobytes() + new[positions].tobytes()


def safetensors(entries, metadata):
    """entries: name -> (dtype, shape, bytes)"""
    header, data = {"__metadata__": metadata}, b""
    for name, (dtype, shape, content) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def checkpoint(path, weights):
    path.mkdir(parents=True)
    entries = {name: (*TENSORS[name], weights[name]) for name in TENSORS}
    (path / "model.safetensors").write_bytes(safetensors(entries, {"format": "pt"}))
    (path / "config.json").write_text('{"hidden_size": 16}\n')


def delta(path, number, form, old, new):
    encoding, algorithm = form
    path.mkdir(parents=True)
    changed = [name for name in TENSORS if old[name] != new[name]]
    ranks = [names for names in (changed[::2], changed[1::2]) if names]
    weight_map = {}
    for rank, names in enumerate(ranks):
        file = f"model-{rank:05d}-of-{len(ranks):05d}.safetensors"
        frames = {n: zstandard.ZstdCompressor(level=1).compress(payload(encoding, old[n], new[n])) for n in names}
        entries = {name: ("U8", [len(frame)], frame) for name, frame in frames.items()}
        checksums = {name: digest(algorithm, new[name]) for name in names}
        (path / file).write_bytes(safetensors(entries, checksums))
        weight_map |= {name: file for name in names}
    metadata = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": algorithm,
    }
    index = {"metadata": metadata, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def main(out):
    rng = np.random.default_rng(7)
    sizes = {name: SIZES[dtype] * int(np.prod(shape)) for name, (dtype, shape) in TENSORS.items()}
    base = {name: rng.integers(0, 256, size, np.uint8).tobytes() for name, size in sizes.items()}
    versions = [base]
    for names in (list(TENSORS), ["model.embed.weight", "model.norm.weight"]):
        new = dict(versions[-1])
        for name in names:
            content = np.frombuffer(new[name], np.uint8).copy()
            content[rng.integers(0, content.size, max(1, content.size // 40))] ^= 3
            new[name] = content.tobytes()
        versions.append(new)
    checkpoint(out / "base", base)
    checkpoint(out / "version-2", versions[2])
    for form in FORMS:
        for number in (1, 2):
            delta(out / "-".join(form) / f"weight_v{number:06d}", number, form, versions[number - 1], versions[number])


main(pathlib.Path(sys.argv[1]))
