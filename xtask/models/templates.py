"""Chat templates of checkpoints, out of the sources of llama-cpp-python on PyPI: templates.py OUT."""

import hashlib
import io
import sys
import tarfile
import urllib.request
from pathlib import Path

NAME = "llama_cpp_python-0.3.36.tar.gz"
PLACE = "ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3"
URL = f"https://files.pythonhosted.org/packages/{PLACE}/{NAME}"
DIGEST = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"


def main(out):
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    print(f"templates: {NAME} from PyPI (77 MB)")
    with urllib.request.urlopen(URL, timeout=60) as answer:
        source = answer.read()
    found = hashlib.sha256(source).hexdigest()
    if found != DIGEST:
        sys.exit(f"{URL}: expected the digest {DIGEST}, found {found}")
    with tarfile.open(fileobj=io.BytesIO(source)) as files:
        for file in files:
            path = Path(file.name)
            if path.suffix == ".jinja" and path.parts[-3:-1] == ("models", "templates"):
                (out / path.name).write_bytes(files.extractfile(file).read())


if __name__ == "__main__":
    main(sys.argv[1])
