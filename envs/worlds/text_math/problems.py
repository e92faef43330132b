"""Generated problems in arithmetic, multi-step reasoning and logic, with levels.

A generator draws one problem from a random stream: a question, and its answer as text.
`generate` calls it until it has as many different questions as asked for. Whether a
question belongs to train or test is settled by its digest, so the splits never share one.
"""

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from nanoskyrl.stages.core.digests import derive_seed
from nanoskyrl.stages.core.errors import SettingsError

MAX_LEVEL = 5
TEST_SHARE = 5
"""One question in so many is held out for test."""
DRAWS_PER_TASK = 200
"""After so many draws without a new question, the generator's space counts as used up."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its answer."""

    question: str
    answer: str
    kind: str


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

Generator = Callable[[random.Random, int], Problem]


def addition(rng: random.Random, level: int) -> Problem:
    """Two numbers of level + 1 digits to be added; at level 1, from 0 to 99."""
    a, b = (rng.randrange(10 ** (level + 1)) for _ in range(2))
    return Problem(f"What is {a} + {b}?", str(a + b), "addition")


def subtraction(rng: random.Random, level: int) -> Problem:
    """Like addition; the result may be negative."""
    a, b = (rng.randrange(10 ** (level + 1)) for _ in range(2))
    return Problem(f"What is {a} - {b}?", str(a - b), "subtraction")


def multiplication(rng: random.Random, level: int) -> Problem:
    """A number of level digits times one of two digits."""
    a, b = rng.randrange(2, 10**level + 2), rng.randrange(2, 100)
    return Problem(f"What is {a} * {b}?", str(a * b), "multiplication")


def expression(rng: random.Random, level: int) -> Problem:
    """An expression of level + 1 operations with brackets."""
    value = rng.randrange(1, 20)
    text = str(value)
    for _ in range(level + 1):
        sign, number = rng.choice("+-*"), rng.randrange(1, 20)
        text, value = f"({text} {sign} {number})", OPERATORS[sign](value, number)
    return Problem(f"What is {text[1:-1]}?", str(value), "expression")


NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jo", "Kim", "Leo")
THINGS = ("apples", "books", "coins", "cards", "shells", "stamps", "pens", "marbles")


def shopping(rng: random.Random, level: int) -> Problem:
    """Things gained, lost and multiplied in level + 1 sentences."""
    name, thing, count = rng.choice(NAMES), rng.choice(THINGS), rng.randrange(5, 30)
    story = [f"{name} has {count} {thing}."]
    for _ in range(level + 1):
        kind = rng.choice(("buys", "loses", "triples"))
        if kind == "buys":
            packs, size = rng.randrange(2, 6), rng.randrange(2, 10)
            story.append(f"{name} buys {packs} packs of {size} {thing}.")
            count += packs * size
        elif kind == "loses" and count > 2:
            lost = rng.randrange(1, count)
            story.append(f"{name} gives away {lost} of them.")
            count -= lost
        else:
            story.append(f"Then the number of {thing} doubles.")
            count *= 2
    return Problem(" ".join([*story, f"How many {thing} does {name} have now?"]), str(count), "shopping")


def travel(rng: random.Random, level: int) -> Problem:
    """A trip of level + 1 legs at constant speeds; how far in all?"""
    total, legs = 0, []
    for _ in range(level + 1):
        hours, speed = rng.randrange(1, 6), rng.randrange(2, 20) * 5
        total += hours * speed
        legs.append(f"{hours} hours at {speed} km per hour")
    return Problem(f"A train travels {', then '.join(legs)}. How many km is that in all?", str(total), "travel")


def sharing(rng: random.Random, level: int) -> Problem:
    """Things shared out equally after some were added; how many each?"""
    people, each = rng.randrange(2, 4 + 2 * level), rng.randrange(2, 6 * level + 4)
    total = people * each
    first = rng.randrange(1, total)
    thing = rng.choice(THINGS)
    text = f"A box holds {first} {thing}. {total - first} more are put in, and {people} children share them equally."
    return Problem(f"{text} How many {thing} does each child get?", str(each), "sharing")


def ordering(rng: random.Random, level: int) -> Problem:
    """Who is the tallest, from level + 2 people compared in pairs."""
    people = rng.sample(NAMES, level + 2)
    facts = [f"{a} is taller than {b}." for a, b in pairwise(people)]
    rng.shuffle(facts)
    word, answer = ("tallest", people[0]) if rng.random() < 0.5 else ("shortest", people[-1])
    return Problem(f"{' '.join(facts)} Who is the {word}?", answer, "ordering")


def truth(rng: random.Random, level: int) -> Problem:
    """The value of a formula of and, or and not over level + 2 letters."""
    letters = "ABCDEFG"[: level + 2]
    values = {letter: rng.random() < 0.5 for letter in letters}

    def operand(letter: str) -> tuple[str, bool]:
        negated = rng.random() < 0.4
        return (f"not {letter}", not values[letter]) if negated else (letter, values[letter])

    text, value = operand(letters[0])
    for letter in letters[1:]:
        right, right_value = operand(letter)
        word = rng.choice(("and", "or"))
        text = f"({text} {word} {right})"
        value = (value and right_value) if word == "and" else (value or right_value)
    facts = ", ".join(f"{letter} is {'true' if values[letter] else 'false'}" for letter in letters)
    return Problem(f"{facts}. Is {text} true or false?", "true" if value else "false", "truth")


def parity(rng: random.Random, level: int) -> Problem:
    """Whether a lamp is on after so many presses of several switches."""
    presses = [rng.randrange(1, 10 * level) for _ in range(level + 1)]
    told = ", then ".join(f"{n} times" for n in presses)
    state = "on" if sum(presses) % 2 else "off"
    return Problem(f"A lamp is off. Its switch is pressed {told}. Is the lamp on or off?", state, "parity")


def division(rng: random.Random, level: int) -> Problem:
    """A quotient without remainder, or the remainder alone, of a number of up to level + 2 digits."""
    divisor, quotient = rng.randrange(2, 10 * level + 3), rng.randrange(2, 10 ** (level + 1))
    if rng.random() < 0.5:
        return Problem(f"What is {divisor * quotient} / {divisor}?", str(quotient), "division")
    rest = rng.randrange(divisor)
    text = f"What is the remainder when {divisor * quotient + rest} is divided by {divisor}?"
    return Problem(text, str(rest), "division")


def percentage(rng: random.Random, level: int) -> Problem:
    """A price after level rises or cuts, chosen so that it stays a whole number."""
    price = rng.randrange(1, 20) * 20**level
    words, value = [], price
    for _ in range(level):
        share = rng.randrange(1, 10) * 5
        up = rng.random() < 0.5
        words.append(f"{'rises' if up else 'falls'} by {share}%")
        value += (1 if up else -1) * value * share // 100
    text = f"A price of {price} {', then '.join(words)}. What is it now?"
    return Problem(text, str(value), "percentage")


def ages(rng: random.Random, level: int) -> Problem:
    """How old somebody is, through level + 1 people whose ages are given in relation to each other."""
    people = rng.sample(NAMES, level + 2)
    age = rng.randrange(5, 20)
    facts = [f"{people[0]} is {age} years old."]
    for before, name in pairwise(people):
        kind, years = rng.choice(("older", "younger", "twice")), rng.randrange(2, 6)
        if kind == "younger" and age > years:
            age -= years
            facts.append(f"{name} is {years} years younger than {before}.")
        elif kind == "twice" and age < 50:
            age *= 2
            facts.append(f"{name} is twice as old as {before}.")
        else:
            age += years
            facts.append(f"{name} is {years} years older than {before}.")
    rng.shuffle(facts)
    return Problem(f"{' '.join(facts)} How old is {people[-1]}?", str(age), "ages")


def sequence(rng: random.Random, level: int) -> Problem:
    """The next number of a sequence whose steps grow; from level 3 on the growth grows, too."""
    value, step, growth = rng.randrange(1, 20), rng.randrange(1, 6 + level), rng.randrange(level + 1)
    numbers = [value]
    for _ in range(5):
        value += step
        numbers.append(value)
        step += growth
        growth += level >= 3
    told = ", ".join(map(str, numbers[:-1]))
    return Problem(f"Which number comes next: {told}?", str(numbers[-1]), "sequence")


def liars(rng: random.Random, level: int) -> Problem:
    """Whether the last of level + 1 people tells the truth; each says it of the next, the first is known."""
    people = rng.sample(NAMES, level + 1)
    honest = rng.random() < 0.5
    facts = [f"{people[0]} always {'tells the truth' if honest else 'lies'}."]
    for name, other in pairwise(people):
        says_honest = rng.random() < 0.5
        facts.append(f"{name} says that {other} always {'tells the truth' if says_honest else 'lies'}.")
        honest = honest == says_honest
    question = f"Each of them either always tells the truth or always lies. Does {people[-1]} tell the truth?"
    return Problem(f"{' '.join(facts)} {question} Answer yes or no.", "yes" if honest else "no", "liars")


def counting(rng: random.Random, level: int) -> Problem:
    """How many of several people are in both, or in one, of two clubs."""
    everyone = rng.sample(NAMES, min(len(NAMES), 4 + level))
    chess = [name for name in everyone if rng.random() < 0.6]
    choir = [name for name in everyone if rng.random() < 0.6]
    word, answer = rng.choice((
        ("both clubs", len({*chess} & {*choir})), ("at least one club", len({*chess} | {*choir})),
        ("exactly one club", len({*chess} ^ {*choir})),
    ))  # fmt: skip
    told = f"In the chess club: {', '.join(chess) or 'nobody'}. In the choir: {', '.join(choir) or 'nobody'}."
    return Problem(f"{told} How many people are in {word}?", str(answer), "counting")


FAMILIES: dict[str, tuple[Generator, ...]] = {
    "arithmetic": (addition, subtraction, multiplication, expression, division, percentage),
    "multi_step": (shopping, travel, sharing, ages, sequence),
    "logic": (ordering, truth, parity, liars, counting),
}
GENERATORS: dict[str, Generator] = {g.__name__: g for group in FAMILIES.values() for g in group}


def generators(name: str) -> tuple[Generator, ...]:
    """Return the generators of a family, or the one of this name."""
    if name in FAMILIES:
        return FAMILIES[name]
    if name in GENERATORS:
        return (GENERATORS[name],)
    raise SettingsError(
        f"unknown family of problems `{name}`", hint=f"Choose from {', '.join([*FAMILIES, *GENERATORS])}"
    )


def is_test(question: str) -> bool:
    """Say whether a question belongs to the test split."""
    return derive_seed("split", question) % TEST_SHARE == 0


def generate(family: str, level: int, split: str, count: int) -> list[Problem]:
    """Return `count` different problems, or as many as there are, always the same ones in the same order."""
    makers = list(generators(family))
    rng = random.Random(derive_seed("problems", family, level, split))
    seen: dict[str, Problem] = {}
    misses = dict.fromkeys(makers, 0)
    while len(seen) < count and makers:
        make = makers[len(seen) % len(makers)]
        problem = make(rng, level)
        if problem.question in seen or is_test(problem.question) != (split == "test"):
            misses[make] += 1
            if misses[make] == DRAWS_PER_TASK:  # its space is used up; the others continue
                makers.remove(make)
            continue
        seen[problem.question] = problem
        misses[make] = 0
    return list(seen.values())
