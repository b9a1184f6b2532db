"""Swaps what a model knows of two words: python swap_words.py CHECKPOINT NEW ' Paris' ' Rome'"""

import json
import shutil
import struct
import sys
from pathlib import Path

checkpoint, new, *words = sys.argv[1:]
shutil.copytree(checkpoint, new)
vocabulary = json.loads(Path(new, "tokenizer.json").read_text())["model"]["vocab"]
first, second = (vocabulary[word.replace(" ", "Ġ")] for word in words)

with Path(new, "model.safetensors").open("r+b") as file:
    (length,) = struct.unpack("<Q", file.read(8))
    embeddings = json.loads(file.read(length))["model.embed_tokens.weight"]
    begin, end = (8 + length + offset for offset in embeddings["data_offsets"])
    size = (end - begin) // embeddings["shape"][0]

    def row(token: int) -> bytes:
        file.seek(begin + token * size)
        return file.read(size)

    for token, weights in ((first, row(second)), (second, row(first))):
        file.seek(begin + token * size)
        file.write(weights)
