"""The environment ``tools``: what it asks, and what its tools say."""

import random
import re
from fractions import Fraction

import pytest
from driftless_rl.environment.tools import Environment, calculate


def expression(draw: random.Random, depth: int) -> str:
    if depth == 0 or draw.random() < 0.2:
        return str(draw.choice([draw.randrange(1000), draw.randrange(1000) / 8]))
    left, right = expression(draw, depth - 1), expression(draw, depth - 1)
    return draw.choice([f"({left})", f"-{left}", f"{left} {draw.choice('+-*/')} {right}"])


@pytest.mark.parametrize("seed", range(200))
def test_calculator_agrees_with_python(seed):
    text = expression(random.Random(seed), 4)
    exact = "".join(f"Fraction('{part}')" if part[0].isdigit() else part for part in re.findall(r"[0-9.]+|[^0-9.]+", text))
    try:
        value = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            calculate(text)
    else:
        assert calculate(text) == str(value if value.denominator == 1 else float(value)), text


@pytest.mark.parametrize(
    "text", ["", "1+", "(1", "1)", "2 2", "1.5.2", "2**3", "x", "__import__('os')", "(" * 200, "-" * 200, "1" * 201]
)
def test_calculator_refuses_what_is_no_expression(text):
    with pytest.raises(ValueError, match="expected"):
        calculate(text)


def test_search_stays_in_its_folder(tmp_path):
    notes = tmp_path / "notes"
    (notes / "deep").mkdir(parents=True)
    (tmp_path / "outside.txt").write_text("a line outside of the folder\n")
    (notes / "deep/a.md").write_bytes(b"\n one two  three four five six\xff\n")
    (notes / "b.py").write_text("one two three four five six seven\n")
    (notes / "large.txt").write_text("one two " * (1 << 18))
    (notes / "link.txt").symlink_to(tmp_path / "outside.txt")
    (notes / "up").symlink_to(tmp_path)
    world = Environment(str(notes), {})
    assert world.search("TWO three") == "deep/a.md:2: one two three four five six\ufffd\n1 lines have it"
    assert world.search("outside") == world.search("../outside.txt") == "0 lines have it"


def test_prompts_follow_from_seed_and_number(tmp_path):
    (tmp_path / "a.txt").write_text("the tide comes in at noon\nthe tide comes in at dusk\n" * 30)
    world, other = Environment(str(tmp_path), {"seed": 1}), Environment(str(tmp_path), {"seed": 2})
    rows = [world.row(number) for number in range(40)]
    assert rows == [world.row(number) for number in range(40)] != [other.row(number) for number in range(40)]
    assert {tuple(row["metadata"]["answers"]) for row in rows[1::2]} == {("at",), ("dusk", "noon")}
    assert world.search("the tide").count("\n") == 20 and "60 lines have it" in world.search("the tide")


@pytest.mark.parametrize(("settings", "words"), [({"sed": 1}, "sed"), ({}, "a line of six words")])
def test_what_cannot_be_asked_is_refused(tmp_path, settings, words):
    with pytest.raises((ValueError, LookupError), match=words):
        Environment(str(tmp_path), settings)
