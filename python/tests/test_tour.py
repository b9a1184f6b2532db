"""The tour's first chapter, as a newcomer goes through it: the commands of the page, in an empty environment, beside a stock
SGLang that runs.

``DRIFTLESS_WHEELS`` names the directory of the wheel, ``DRIFTLESS_AGENTS_TOKENIZER`` SmolLM2. The engine's address, and where its
plugin meets the follower, are the test's; so is the engine's start, which the page has in blocks of their own (``sh``).
"""

import os
import re
import shlex
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
from sglang_engine import STAND_INS, Sglang

WHEELS, MODEL = os.environ.get("DRIFTLESS_WHEELS"), os.environ.get("DRIFTLESS_AGENTS_TOKENIZER")
pytestmark = pytest.mark.skipif(not (STAND_INS and WHEELS and MODEL), reason="SGLang, the wheel or SmolLM2 is not told")
ROOT = Path(__file__).parents[2]
ENGINE = "http://127.0.0.1:30000"
# What differs from run to run: ids of runs, numbers.
VARIES = re.compile(r"(?:\b[0-9a-f]{12}\b|\d+(?:\.\d+)?)")


def chapter(title: str) -> str:
    return (ROOT / "docs/tour.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def steps(text: str) -> list[tuple[str, list[str]]]:
    """Commands of a chapter, which are indented, and the lines that the page shows of what they print."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("    "):
            found.append((textwrap.dedent(block), []))
        elif block.startswith("```\n"):
            found[-1][1].extend(block.splitlines()[1:-1])
    return found


def as_shown(line: str) -> re.Pattern[str]:
    """What a line of the page stands for: the same words, with any numbers."""
    return re.compile(VARIES.pattern.join(map(re.escape, VARIES.split(line))))


def clone(root: Path) -> Path:
    """A clone, as far as the chapter needs one."""
    for path, there in {"models/SmolLM2-135M-Instruct": MODEL, "target/wheels": WHEELS, "python": ROOT / "python"}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).symlink_to(Path(there).absolute())
    return root


def script(told: list[tuple[str, list[str]]], url: str) -> str:
    """All commands in one shell, with a line before what each block prints."""
    blocks = (f"echo '@ {number}'\n{code}" for number, (code, _) in enumerate(told))
    return "set -euo pipefail\n" + "\n".join(blocks).replace(ENGINE, url)


def test_tour_patches_an_engine_from_an_empty_environment(forks, tmp_path, capsys):
    text = chapter("Patch a running engine")
    launch = next(line for line in text.splitlines() if "sglang.launch_server" in line)
    assert shlex.split(launch)[3:] == ["--model-path", "models/SmolLM2-135M-Instruct", "--device", "cpu", "--port", "30000"]
    told = steps(text)
    server = Sglang(tmp_path, Path(MODEL), forks=forks, reads_text=True)
    # Nothing but what the commands bring, and nothing of an index.
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    environment |= {"PIP_NO_INDEX": "1", "XDG_CACHE_HOME": str(tmp_path / "cache"), "DRIFTLESS_PLUGIN_DIR": str(server.plugins)}
    try:
        command, begun = ["bash", "-c", script(told, server.url)], time.monotonic()
        done = subprocess.run(command, cwd=clone(tmp_path / "clone"), env=environment, capture_output=True, text=True, timeout=540)
        seconds = time.monotonic() - begun
        assert done.returncode == 0, done.stdout + done.stderr
        assert server.patched() == 1
    finally:
        server.end()
    printed = re.split(r"^@ \d+\n", done.stdout.replace(server.url, ENGINE), flags=re.MULTILINE)[1:]
    for (code, shown), lines in zip(told, printed, strict=True):
        for line in shown:
            assert any(as_shown(line).fullmatch(found) for found in lines.splitlines()), (code, line, lines, done.stderr)
    with capsys.disabled():
        print(f"\nthe tour: {seconds:.0f} s from an empty environment to a patched engine's text")
