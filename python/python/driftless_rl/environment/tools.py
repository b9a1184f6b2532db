"""A calculator and a search over a folder of texts: ``--environment tools:FOLDER``.

Even prompts are arithmetic with numbers of six digits. Odd ones ask for a word of the folder's texts. The policy gives no
path and no code: the calculator has a parser of its own, and the search reads what was read at the start.
"""

from __future__ import annotations

import os
import random
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from driftless_rl.hook import Turn, run_tools

ASK = "Use the tools. Write the answer alone between <answer> and </answer>."
SUFFIXES = (".md", ".txt")
FILE_MAX, FILES_MAX, TEXT_MAX = 1 << 20, 10_000, 16 << 20
EXPRESSION_MAX, LINES_MAX = 200, 20


def calculate(expression: str) -> str:
    """Works out an expression of numbers, + - * / and brackets, such as (12.5 - 4) * 3."""
    if len(expression) > EXPRESSION_MAX:
        raise ValueError(f"expected at most {EXPRESSION_MAX} characters, found {len(expression)}")
    left = re.findall(r"[0-9]+(?:\.[0-9]+)?|\S", expression)[::-1]

    def sum_of() -> Fraction:
        value = product()
        while left and left[-1] in "+-":
            value += product() if left.pop() == "+" else -product()
        return value

    def product() -> Fraction:
        value = factor()
        while left and left[-1] in "*/":
            is_times, by = left.pop() == "*", factor()
            if by == 0 and not is_times:
                raise ValueError("division by zero")
            value = value * by if is_times else value / by
        return value

    def factor() -> Fraction:
        token = left.pop() if left else "the end"
        if token == "-":
            return -factor()
        if token == "(":
            value = sum_of()
            if not left or left.pop() != ")":
                raise ValueError("expected a closing bracket")
            return value
        if not token[0].isdecimal():
            raise ValueError(f"expected a number, found {token}")
        return Fraction(token)

    value = sum_of()
    if left:
        raise ValueError(f"expected an operator, found {left[-1]}")
    return str(value if value.denominator == 1 else float(value))


def _read(folder: Path) -> list[tuple[str, str]]:
    """Where each line of the texts is, and what it says. Links and large files are left out."""
    lines, files, size = [], 0, 0
    for at, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(at, name) for name in sorted(names)):
            if path.suffix not in SUFFIXES or path.is_symlink() or not path.is_file() or path.stat().st_size > FILE_MAX:
                continue
            text = path.read_text("utf-8", "replace")
            files, size = files + 1, size + len(text)
            if files > FILES_MAX or size > TEXT_MAX:
                raise ValueError(f"tools:{folder}: expected at most {FILES_MAX} files and {TEXT_MAX} characters, found more")
            said = [" ".join(line.split()) for line in text.splitlines()]
            lines += [(f"{path.relative_to(folder)}:{number}", line) for number, line in enumerate(said, 1) if line]
    return lines


def _bare(text: str) -> str:
    return re.sub(r"^\W+|\W+$|,(?=[0-9]{3})", "", text.strip()).casefold() or text


class Environment:
    """What ``--environment`` plays."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        if unknown := settings.keys() - {"seed"}:
            raise ValueError(f"tools:{name}: expected no setting but `seed`, found {sorted(unknown)}")
        self.seed, self.lines = settings.get("seed", 0), _read(Path(name))
        self.long = [line for _, line in self.lines if line.count(" ") >= 5]
        if not self.long:
            raise LookupError(f"tools:{name}: expected a folder of texts with a line of six words, found none")

    def search(self, text: str) -> str:
        """Finds the lines of the files that have this text, with their places."""
        if not text.strip():
            raise ValueError("expected a text to look for, found none")
        found = [f"{place}: {line}" for place, line in self.lines if text.casefold() in line.casefold()]
        return "\n".join([*found[:LINES_MAX], f"{len(found)} lines have it"])

    def row(self, number: int) -> dict[str, Any]:
        draw = random.Random(f"{self.seed} {number}")
        if number % 2 == 0:
            a, b, c = (draw.randrange(100_000, 1_000_000) for _ in range(3))
            return {"input": f"What is {a} * {b} - {c}? {ASK}", "metadata": {"answers": [str(a * b - c)]}}
        words = draw.choice(self.long).split()
        at = draw.randrange(len(words) - 4)
        run = " ".join(words[at : at + 4])
        # Another line may go on in another way.
        follows = re.compile(rf"(?<!\S){re.escape(run)} (\S+)")
        ways = {way for line in self.long if run in line for way in follows.findall(line)}
        return {"input": f"Which word follows “{run}” in the files? {ASK}", "metadata": {"answers": sorted(ways)}}

    async def answer(self, turn: Turn) -> dict[str, Any]:
        said = await run_tools(turn, [calculate, self.search])
        answers = re.findall(r"<answer>(.*?)</answer>", said[-1].get("content") or "", re.DOTALL)
        right = bool(answers) and _bare(answers[-1]) in map(_bare, turn.metadata["answers"])
        return {"reward": float(right), "tool_calls": sum(message["role"] == "tool" for message in said)}
