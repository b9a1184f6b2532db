"""Pairs of answers with the verdict of math-verify, which the reward `math` is compared with.

    python pairs.py > pairs.jsonl          makes them
    python pairs.py --check pairs.jsonl    finds out whether the installed math-verify still says so
"""

import json
import random
import sys
from fractions import Fraction

from math_verify import parse, verify


def verdict(label, answer):
    return bool(verify(parse(f"\\boxed{{{label}}}"), parse(f"\\boxed{{{answer}}}")))


def numbers(draw):
    """A rational number and ways to write it, then ways to miss it."""
    value = Fraction(draw.randint(-60, 60), draw.choice([1, 1, 2, 3, 4, 5, 8, 10, 20, 25]))
    up, down = value.numerator, value.denominator
    same = [f"\\frac{{{up}}}{{{down}}}", f"\\dfrac{{{up}}}{{{down}}}", f"{up}/{down}", f"$\\tfrac{{{up}}}{{{down}}}$"]
    if down in (1, 2, 4, 5, 8, 10, 20, 25):
        text = format(float(value), "g")
        same += [text, f"x = {text}", f"{text}\\text{{ cm}}", f"${text}$", f" {text} ", f"{text}^\\circ"]
    else:
        same += [f"{float(value):.8f}"]
    if up < 0:
        same += [f"-\\frac{{{-up}}}{{{down}}}", f"\\frac{{{-up}}}{{-{down}}}"]
    if abs(up) > down > 1 and up > 0:
        same.append(f"{up // down}\\frac{{{up % down}}}{{{down}}}")
    near = value + draw.choice([-1, 1]) * draw.choice([Fraction(1), Fraction(1, 100), Fraction(1, 10), Fraction(1, 2)])
    other = [f"\\frac{{{near.numerator}}}{{{near.denominator}}}", f"{float(near):.6g}", str(-value) if value else "1"]
    return same, other


def large(draw):
    value = draw.randint(1000, 10**draw.randint(4, 9))
    same = [str(value), f"{value:,}", f"{value}.0", f"{value:,}\\text{{ dollars}}", f"\\${value:,}"]
    return same, [str(value + 1), str(value * 10), str(value)[1:] or "0"]


def roots(draw):
    square, factor = draw.choice([2, 3, 5, 6, 7]), draw.randint(2, 6)
    same = [f"{factor}\\sqrt{{{square}}}", f"\\sqrt{{{square * factor * factor}}}", f"\\sqrt{{{square}}} \\cdot {factor}", f"{factor} \\times \\sqrt{{{square}}}"]
    return same, [f"\\sqrt{{{square * factor}}}", f"{factor + 1}\\sqrt{{{square}}}", f"{factor}\\sqrt{{{square + 1}}}"]


def powers(draw):
    base, power = draw.randint(2, 9), draw.randint(2, 5)
    same = [f"{base}^{power}", f"{base}^{{{power}}}", str(base**power)]
    if base == 2:
        same.append(f"4^{{{power}/2}}")
    return same, [f"{power}^{{{base + 7}}}", str(base**power + 1), f"{base}^{{{power + 1}}}"]


def circles(draw):
    factor = draw.randint(2, 20)
    same = [f"{factor}\\pi", f"\\pi \\cdot {factor}", f"{factor} \\pi", f"\\frac{{{2 * factor}\\pi}}{{2}}"]
    return same, [f"{factor + 1}\\pi", str(factor), f"{factor}\\pi^2"]


def polynomials(draw):
    a, b = draw.randint(1, 6), draw.randint(1, 6)
    same = [f"x^2 + {a + b}x + {a * b}", f"(x + {a})(x + {b})", f"(x + {b})(x + {a})", f"{a * b} + {a + b}x + x^{{2}}", f"y = x^2 + {a + b}x + {a * b}"]
    return same, [f"x^2 + {a + b}x + {a * b + 1}", f"(x + {a})(x - {b})", f"x^2 + {a + b + 1}x + {a * b}"]


def fractions_of_letters(draw):
    a = draw.randint(2, 9)
    same = [f"\\frac{{x}}{{{a}}}", f"x/{a}", f"\\frac{{2x}}{{{2 * a}}}", f"\\frac{{1}}{{{a}}}x"]
    return same, [f"\\frac{{x}}{{{a + 1}}}", f"\\frac{{{a}}}{{x}}", f"\\frac{{y}}{{{a}}}"]


def tuples(draw):
    a, b, c = draw.sample(range(-9, 10), 3)
    same = [f"({a}, {b}, {c})", f"\\left({a}, {b}, {c}\\right)", f"({a},{b},{c})", f"\\left( {a}, \\frac{{{2 * b}}}{{2}}, {c} \\right)"]
    return same, [f"({b}, {a}, {c})", f"({a}, {b})", f"({a}, {b}, {c + 1})"]


def sets(draw):
    a, b, c = draw.sample(range(-9, 10), 3)
    same = [f"\\{{{a}, {b}, {c}\\}}", f"\\{{{c}, {a}, {b}\\}}", f"\\left\\{{{b}, {a}, {c}\\right\\}}"]
    return same, [f"\\{{{a}, {b}\\}}", f"\\{{{a}, {b}, {c + 20}\\}}"]


def lists(draw):
    a, b = draw.sample(range(1, 30), 2)
    same = [f"{a}, {b}", f"{b}, {a}", f"x = {a}, x = {b}"]
    return same, [f"{a}, {b + 40}", f"{a + 40}, {b}", f"{a}, {b}, {a + b}"]


def intervals(draw):
    a = draw.randint(-9, 5)
    b = a + draw.randint(1, 9)
    opened, closed = draw.choice("(["), draw.choice(")]")
    same = [f"{opened}{a}, {b}{closed}", f"\\left{opened}{a},{b}\\right{closed}"]
    return same, [f"{'[' if opened == '(' else '('}{a}, {b}{closed}", f"{opened}{a}, {b + 1}{closed}"]


def unions(draw):
    a = draw.randint(-5, 0)
    b = draw.randint(1, 6)
    same = [f"(-\\infty, {a}) \\cup ({b}, \\infty)", f"({b}, \\infty) \\cup (-\\infty, {a})", f"\\left(-\\infty,{a}\\right)\\cup\\left({b},\\infty\\right)"]
    return same, [f"(-\\infty, {a}] \\cup ({b}, \\infty)", f"(-\\infty, {a}) \\cup ({b + 1}, \\infty)", f"({b}, \\infty)"]


def percents(draw):
    value = draw.randint(1, 99)
    return [f"{value}\\%", f"{value}%", str(value), format(value / 100, "g")], [f"{value + 1}\\%", str(value + 1)]


def choices(draw):
    letter, other = draw.sample("ABCDFGH", 2)
    return [letter, f"\\text{{{letter}}}", f"({letter})", f"\\text{{({letter})}}", f"\\textbf{{{letter}}}"], [other, f"({other})"]


def words(draw):
    word, other = draw.sample(["Monday", "Tuesday", "blue", "even", "odd", "Paris", "circle", "north"], 2)
    return [f"\\text{{{word}}}", f"\\text{{ {word} }}", f"\\mathrm{{{word}}}"], [f"\\text{{{other}}}"]


def functions(draw):
    n = draw.randint(2, 6)
    return draw.choice(
        [
            ([f"{n}!", str([1, 1, 2, 6, 24, 120, 720][n])], [str(n), f"{n + 1}!"]),
            ([f"\\binom{{{n + 3}}}{{2}}", str((n + 3) * (n + 2) // 2)], [f"\\binom{{{n + 3}}}{{1}}"]),
            ([f"\\log_2 {2**n}", str(n), f"\\log_{{2}}{{{2**n}}}"], [f"\\log_3 {2**n}", str(n + 1)]),
            ([f"\\ln e^{{{n}}}", str(n)], [str(n + 1)]),
            ([f"|{-n}|", str(n), f"\\left|{-n}\\right|"], [f"-{n}"]),
            (["\\sin\\frac{\\pi}{6}", "\\frac{1}{2}", "0.5", "\\cos\\frac{\\pi}{3}"], ["\\cos\\frac{\\pi}{6}"]),
            ([f"\\sqrt[3]{{{n**3}}}", str(n)], [f"\\sqrt{{{n**3}}}"]),
        ]
    )


KINDS = [numbers, numbers, numbers, large, roots, powers, circles, polynomials, fractions_of_letters, tuples, sets, lists, intervals, unions, percents, choices, words, functions]


def pairs(count):
    draw = random.Random(19)
    made = {}
    while len(made) < count:
        same, other = KINDS[len(made) % len(KINDS)](draw)
        label = draw.choice(same)
        answer = draw.choice(same if draw.random() < 0.55 else other)
        if label != answer:
            made.setdefault((label, answer))
        else:
            made.setdefault((label, draw.choice(other)))
    return list(made)


def main():
    if sys.argv[1:2] == ["--check"]:
        with open(sys.argv[2]) as file:
            rows = [json.loads(line) for line in file]
        other = [row for row in rows if verdict(row["label"], row["answer"]) != row["equal"]]
        print(f"{len(rows)} pairs, {len(other)} with another verdict: {other[:5]}")
        sys.exit(bool(other))
    for label, answer in pairs(1200):
        print(json.dumps({"label": label, "answer": answer, "equal": verdict(label, answer)}))


if __name__ == "__main__":
    main()
