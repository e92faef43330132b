"""A thousand made-up replies of twenty forms, through lm-evaluation-harness' filters, math-verify and our graders.

    pip install lm-eval math-verify          # in an environment of its own, with nanoskyrl beside them
    python benchmarks/readers.py

Each form has 50 replies whose rightness is known, because they are made of a gold and a wrong answer. Printed is how
many each of the three marks as they are. The harness's filters are its tasks' own: gsm8k's strict-match (flexible-extract
behind the slash) and mmlu_pro's custom-extract, with the exact match of those tasks; math-verify reads the whole reply.
"""

import logging
import random
import re
from collections.abc import Callable
from fractions import Fraction

import math_verify
from lm_eval.filters.extraction import RegexFilter

from nanoskyrl.envs.graders.kinds import grade

PER_FORM = 50
STRICT = {"regex_pattern": r"#### (\-?[0-9\.\,]+)"}
FLEXIBLE = {"regex_pattern": r"(-?[$0-9.,]{2,})|(-?[0-9]+)", "group_select": -1}
LETTER = {"regex_pattern": r"answer is \(?([ABCDEFGHIJ])\)?"}
IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")

Draw = Callable[[random.Random], tuple[str, str]]


def integer(rng):
    number = rng.randrange(10, 9000)
    return str(number), str(number + rng.randrange(1, 9))


def fraction(rng):
    value = Fraction(rng.randrange(1, 50), rng.choice((3, 7, 9, 11)))
    top, bottom = value.numerator, value.denominator
    return f"\\frac{{{top}}}{{{bottom}}}", f"\\frac{{{top + bottom}}}{{{bottom}}}"


def root(rng):
    number = rng.choice((2, 3, 5, 7, 11, 13))
    return f"\\sqrt{{{number}}}", f"{number**0.5:.8f}"


def hexadecimal(rng):
    number = rng.randrange(16, 1 << 16)
    return hex(number), hex(number ^ (1 << rng.randrange(12)))


def date(rng):
    year, month, day = rng.randrange(1990, 2030), rng.randrange(1, 12), rng.randrange(1, 28)
    return f"{year}-{month:02d}-{day:02d}", f"{year}-{month + 1:02d}-{day - 1:02d}"


def ordered(rng):
    numbers = rng.sample(range(1, 60), 3)
    return ", ".join(map(str, numbers)), ", ".join(map(str, reversed(numbers)))


def letter(rng):
    return tuple(rng.sample("BCDEFGH", 2))


FORMS: list[tuple[str, str, Draw, Callable[[str, str], str], bool]] = [
    ("`#### 18`", "number", integer, lambda gold, other: f"So.\n#### {gold}", True),
    ("`#### **18**`", "number", integer, lambda gold, other: f"So.\n#### **{gold}**", True),
    ("`#### \\boxed{18}`", "number", integer, lambda gold, other: f"#### \\boxed{{{gold}}}", True),
    ("`#### 1{,}234`", "number", integer, lambda gold, other: "#### " + f"{int(gold):,}".replace(",", "{,}"), True),
    ("`#### 18 eggs in 3 days`", "number", integer, lambda gold, other: f"#### {gold} eggs in 3 days", True),
    ("`#### 18 of 20`", "number", integer, lambda gold, other: f"#### {gold} of {other}", False),
    ("`Answer: 18`", "number", integer, lambda gold, other: f"I add them.\nAnswer: {gold}", True),
    ("`the answer is 18.` and more words", "number", integer, lambda gold, other: f"The answer is {gold}. I took 3 steps.", True),
    ("`#### 18` in reasoning, then `#### 19`", "number", integer, lambda gold, other: f"<think>#### {gold}</think>\n#### {other}", False),
    ("prose with numbers, and no answer", "number", integer, lambda gold, other: f"There may be {other} or {gold}", False),
    ("`\\boxed{\\frac{1}{3}}`", "math", fraction, lambda gold, other: f"\\boxed{{{gold}}}", True),
    ("box in reasoning, then another box", "math", fraction, lambda gold, other: f"<think>\\boxed{{{gold}}}</think> \\boxed{{{other}}}", False),
    ("box in reasoning, then `The answer is ...`", "math", fraction, lambda gold, other: f"<think>\\boxed{{{gold}}}</think> The answer is ${other}$.", False),
    ("a decimal for a root", "math", root, lambda gold, other: f"\\boxed{{{other}}}", False),
    ("another hexadecimal number", "math", hexadecimal, lambda gold, other: f"\\boxed{{{other}}}", False),
    ("another date", "math", date, lambda gold, other: f"\\boxed{{{other}}}", False),
    ("a list in another order", "math", ordered, lambda gold, other: f"\\boxed{{{other}}}", False),
    ("`\\boxed{C. Paris}`", "mcq", letter, lambda gold, other: f"\\boxed{{{gold}. Paris}}", True),
    ("`The answer is (C), since A is not.`", "mcq", letter, lambda gold, other: f"The answer is ({gold}), since {other} is not.", True),
    ("`the answer is D` in reasoning, then `Answer: C`", "mcq", letter, lambda gold, other: f"<think>the answer is {other}</think>\nAnswer: {gold}", True),
]  # fmt: skip


def filtered(reply: str, settings: dict) -> str:
    return RegexFilter(**settings).apply([[reply]], [{}])[0][0]


def matches(found: str, gold: str) -> bool:
    for pattern in IGNORED:
        found, gold = re.sub(pattern, "", found), re.sub(pattern, "", gold)
    return found.strip().lower() == gold.strip().lower()


def by_math_verify(reply: str, gold: str) -> bool:
    return math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(reply))


def main() -> None:
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    print("| Form | Right? | lm-evaluation-harness | math-verify | ours |\n| --- | --- | --- | --- | --- |")
    for name, kind, draw, write, right in FORMS:
        rng, marks = random.Random(name), [0, 0, 0, 0]
        for _ in range(PER_FORM):
            gold, other = draw(rng)
            reply = write(gold, other)
            settings = (LETTER, LETTER) if kind == "mcq" else (STRICT, FLEXIBLE)
            said = [matches(filtered(reply, each), gold) for each in settings]
            said += [by_math_verify(reply, gold), grade(kind, gold, reply).correct]
            marks = [count + (one is right) for count, one in zip(marks, said, strict=True)]
        harness = f"{marks[0]}" if kind == "mcq" else f"{marks[0]} / {marks[1]}"
        print(f"| {name} | {'right' if right else 'wrong'} | {harness} | {marks[2]} | {marks[3]} |")


if __name__ == "__main__":
    main()
