import os
import re
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise, product

import pytest

from nanoskyrl.envs.worlds.text_math.problems import FAMILIES, GENERATORS, generate, generators, is_test
from nanoskyrl.stages.core.errors import SettingsError

LEVELS = (1, 2, 3)
each_generator_and_level = pytest.mark.parametrize(
    ("kind", "level"), [(kind, level) for kind in GENERATORS for level in LEVELS]
)


# Each of these works the answer out from the words of the question alone.


def solve_binary(question):
    left, sign, right = re.fullmatch(r"What is (\d+) ([+*-]) (\d+)\?", question).groups()
    return str({"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign])


def solve_expression(question):
    text = question.removeprefix("What is ").removesuffix("?")
    assert re.fullmatch(r"[\d+*() -]+", text)
    return str(eval(text))


def solve_shopping(question):
    *story, asked = re.findall(r"[^.?]+[.?]", question)
    name, count, thing = re.fullmatch(r"(\w+) has (\d+) (\w+)\.", story[0].strip()).groups()
    assert asked.strip() == f"How many {thing} does {name} have now?"
    count = int(count)
    for sentence in story[1:]:
        if bought := re.fullmatch(rf"{name} buys (\d+) packs of (\d+) {thing}\.", sentence.strip()):
            count += int(bought[1]) * int(bought[2])
        elif lost := re.fullmatch(rf"{name} gives away (\d+) of them\.", sentence.strip()):
            count -= int(lost[1])
            assert count > 0
        else:
            assert sentence.strip() == f"Then the number of {thing} doubles."
            count += count
    return str(count)


def solve_travel(question):
    legs = re.findall(r"(\d+) hours at (\d+) km per hour", question)
    told = ", then ".join(f"{hours} hours at {speed} km per hour" for hours, speed in legs)
    assert question == f"A train travels {told}. How many km is that in all?"
    return str(sum(int(hours) * int(speed) for hours, speed in legs))


def solve_sharing(question):
    first, more, people = map(int, re.findall(r"\d+", question))
    each, left_over = divmod(first + more, people)
    assert left_over == 0
    assert more > 0
    return str(each)


def solve_ordering(question):
    taller, shorter = zip(*re.findall(r"(\w+) is taller than (\w+)\.", question), strict=True)
    ends = {"tallest": set(taller) - set(shorter), "shortest": set(shorter) - set(taller)}
    (answer,) = ends[re.search(r"Who is the (\w+)\?", question)[1]]
    return answer


def solve_truth(question):
    facts, formula = re.fullmatch(r"(.*)\. Is (.*) true or false\?", question).groups()
    values = {letter: word == "true" for letter, word in re.findall(r"([A-G]) is (true|false)", facts)}
    assert re.fullmatch(r"(?:[A-G() ]|and|or|not)+", formula)
    return str(eval(formula, values)).lower()


def solve_parity(question):
    lit = False
    for presses in re.findall(r"(\d+) times", question):
        for _ in range(int(presses)):
            lit = not lit
    return "on" if lit else "off"


def solve_division(question):
    if exact := re.fullmatch(r"What is (\d+) / (\d+)\?", question):
        quotient, rest = divmod(int(exact[1]), int(exact[2]))
        assert rest == 0
        return str(quotient)
    number, divisor = re.fullmatch(r"What is the remainder when (\d+) is divided by (\d+)\?", question).groups()
    return str(int(number) - int(number) // int(divisor) * int(divisor))


def solve_percentage(question):
    price = Fraction(re.match(r"A price of (\d+)", question)[1])
    for word, share in re.findall(r"(rises|falls) by (\d+)%", question):
        price *= Fraction(100 + int(share) * (1 if word == "rises" else -1), 100)
    assert price.denominator == 1
    return str(price)


def solve_ages(question):
    known = {name: int(age) for name, age in re.findall(r"(\w+) is (\d+) years old\.", question)}
    told = re.findall(r"(\w+) is (?:(\d+) years (older|younger) than|(twice) as old as) (\w+)\.", question)
    while told:
        for fact in told:
            name, years, word, twice, other = fact
            if other in known:
                known[name] = 2 * known[other] if twice else known[other] + int(years) * (1 if word == "older" else -1)
        told = [fact for fact in told if fact[0] not in known]
    assert min(known.values()) > 0
    return str(known[re.search(r"How old is (\w+)\?", question)[1]])


def solve_sequence(question):
    numbers = list(map(int, re.findall(r"\d+", question)))
    steps = [b - a for a, b in pairwise(numbers)]
    growth = [b - a for a, b in pairwise(steps)]
    (jerk,) = {b - a for a, b in pairwise(growth)}
    return str(numbers[-1] + steps[-1] + growth[-1] + jerk)


def solve_liars(question):
    told = re.findall(r"(\w+) says that (\w+) always (tells the truth|lies)\.", question)
    first, word = re.match(r"(\w+) always (tells the truth|lies)\.", question).groups()
    names = sorted({first, *(name for one, other, _ in told for name in (one, other))})
    asked = re.search(r"Does (\w+) tell the truth", question)[1]
    answers = set()
    for honest in product((True, False), repeat=len(names)):  # every world in which all that is said fits
        world = dict(zip(names, honest, strict=True))
        fits = all(world[one] == (world[other] == (says != "lies")) for one, other, says in told)
        if fits and world[first] == (word != "lies"):
            answers.add(world[asked])
    (answer,) = answers
    return "yes" if answer else "no"


def solve_counting(question):
    chess, choir, word = re.fullmatch(
        r"In the chess club: (.*)\. In the choir: (.*)\. How many people are in (.*)\?", question
    ).groups()
    chess, choir = ({name for name in names.split(", ") if name != "nobody"} for names in (chess, choir))
    per_person = [(name in chess) + (name in choir) for name in chess | choir]
    wanted = {"both clubs": (2,), "at least one club": (1, 2), "exactly one club": (1,)}[word]
    return str(sum(clubs in wanted for clubs in per_person))


SOLVERS = {
    "division": solve_division, "percentage": solve_percentage, "ages": solve_ages, "sequence": solve_sequence,
    "liars": solve_liars, "counting": solve_counting,
    "addition": solve_binary, "subtraction": solve_binary, "multiplication": solve_binary,
    "expression": solve_expression, "shopping": solve_shopping, "travel": solve_travel, "sharing": solve_sharing,
    "ordering": solve_ordering, "truth": solve_truth, "parity": solve_parity,
}  # fmt: skip


@each_generator_and_level
def test_every_answer_follows_from_its_question(kind, level):
    for split in ("train", "test"):
        problems = generate(kind, level, split, 150)
        assert len(problems) >= 10
        for problem in problems:
            assert problem.kind == kind
            assert problem.answer == SOLVERS[kind](problem.question), problem.question


@each_generator_and_level
def test_train_and_test_share_no_question_and_repeat_none(kind, level):
    train = [problem.question for problem in generate(kind, level, "train", 1000)]
    test = [problem.question for problem in generate(kind, level, "test", 300)]
    assert len({*train, *test}) == len(train) + len(test)
    assert all(is_test(question) for question in test)
    assert not any(is_test(question) for question in train)


@each_generator_and_level
def test_the_same_problems_come_in_the_same_order(kind, level):
    problems = generate(kind, level, "train", 60)
    assert generate(kind, level, "train", 60) == problems
    assert generate(kind, level, "train", 20) == problems[:20]


def test_problems_do_not_depend_on_the_process():
    code = "from nanoskyrl.envs.worlds.text_math.problems import generate; print(generate('logic', 2, 'test', 30))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_takes_turns_among_its_generators(family):
    names = [maker.__name__ for maker in FAMILIES[family]]
    assert [problem.kind for problem in generate(family, 2, "train", 12)] == (names * 12)[:12]


def test_addition_at_level_1_holds_out_at_least_500_tasks():
    assert len(generate("addition", 1, "test", 1024)) >= 500


def test_addition_at_level_1_adds_two_numbers_below_100_and_uses_nearly_all_pairs():
    train, test = (generate("addition", 1, split, 10_000) for split in ("train", "test"))
    pairs = {tuple(map(int, re.findall(r"\d+", problem.question))) for problem in train + test}
    assert pairs <= {(a, b) for a in range(100) for b in range(100)}
    assert len(pairs) > 9500


@pytest.mark.parametrize("level", LEVELS)
def test_levels_make_numbers_longer_and_stories_too(level):
    def words(kind, pattern):
        return [len(re.findall(pattern, problem.question)) for problem in generate(kind, level, "train", 50)]

    numbers = [int(n) for p in generate("addition", level, "train", 300) for n in re.findall(r"\d+", p.question)]
    assert 10**level < max(numbers) < 10 ** (level + 1)
    assert set(words("expression", r" [+*-] ")) == {level + 1}
    assert set(words("travel", r"hours at")) == {level + 1}
    assert set(words("ordering", r"is taller than")) == {level + 1}
    assert set(words("truth", r" (?:and|or) (?!false)")) == {level + 1}
    assert set(words("parity", r"times")) == {level + 1}


def test_about_one_question_in_five_is_held_out():
    held_out = sum(is_test(f"What is {a} + {b}?") for a in range(100) for b in range(100))
    assert 1800 < held_out < 2200


def test_an_unknown_family_is_refused_with_the_names_there_are():
    with pytest.raises(SettingsError, match="`algebra`") as caught:
        generators("algebra")
    assert "multi_step" in caught.value.hint
    assert "ordering" in caught.value.hint
