import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from nanoskyrl.envs.actions import ParsedCall
from nanoskyrl.envs.tools import TOOLS, carry_out, offer
from nanoskyrl.envs.worlds.tool_use.search import passages
from nanoskyrl.stages.core.errors import SettingsError

CALCULATOR, SEARCH = offer(("calculator", "search")).values()


def work_out(expression):
    """Return the record of a calculation."""
    return CALCULATOR.call({"expression": expression})


# Calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1+1", "2"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("7 - 10", "-3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("1 / 4 + 0.75", "1"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("2 ** 3 ** 2", "512"),
        ("-2 ** 2", "-4"),
        ("9 ** 0.5", "3"),
        ("99999 * 99999", "9999800001"),
        ("123456789 * 987654321", "121932631112635269"),
        ("--5", "5"),
        (" \t1+1\n", "2"),
        ("1_000 * 2", "2000"),
        ("9" + "*9" * 99, str(9**100)),
        ("(" * 90 + "1" + ")" * 90, "1"),
        ("-" * 150 + "1", "1"),
    ],
)
def test_the_calculator_is_right(expression, result):
    found = work_out(expression)
    assert (found.ok, found.result, found.error) == (True, result, None)


@given(st.integers(-(10**9), 10**9), st.sampled_from("+-*"), st.integers(-(10**9), 10**9))
def test_the_calculator_agrees_with_python_on_integers(left, sign, right):
    assert CALCULATOR.call({"expression": f"({left}) {sign} ({right})"}).result == str(eval(f"({left}){sign}({right})"))


@pytest.mark.parametrize("expression", ["1/0", "1//0", "1%0", "0**-1", "1/(2-2)", "1.5/0.0"])
def test_division_by_zero_is_said(expression):
    found = work_out(expression)
    assert (found.ok, found.error, found.result) == (False, "tool_error", "division by zero")


def test_powers_past_all_digits_are_too_large_and_nobody_waits_for_them():
    # In a process of its own: Python cannot be interrupted in the middle of a power of integers.
    expressions = ["9**9**9", "9**9**9**9", "2**" * 40 + "2", "10**5000", "(10**400)**(10**400)", "(-9)**9999999999"]
    expressions.append("(10**400)" + "*(10**400)" * 9)
    code = (
        "import json, sys; from nanoskyrl.envs.tools import offer; tool = offer(('calculator',))['calculator'];"
        "calls = [tool.call({'expression': expression}) for expression in json.loads(sys.argv[1])];"
        "print(json.dumps([(call.ok, call.error, call.result) for call in calls]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(expressions)], capture_output=True, check=True, timeout=120
    )
    assert json.loads(done.stdout) == [[False, "tool_error", "the result is too large"]] * len(expressions)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "   ",
        "+",
        "1 +",
        "1 2",
        "2^3",
        "5!",
        "1, 2",
        "1 +\n2",
        "\0",
        "\ud800",
        "\uff11+\uff11",
        # Names and calls.
        "x",
        "pi",
        "abs(-1)",
        "rand()",
        "int('5')",
        "__import__('os')",
        "open('/etc/passwd')",
        "(lambda: 1)()",
        # Attributes.
        "().__class__",
        "(1).__class__",
        "'a'.upper()",
        "'{0.__class__}'.format(1)",
        "(1).real",
        "(255).bit_length()",
        "'a'.ljust(10**8).count('a')",
        # What is no number.
        "'a'",
        "'a' * 3",
        "'%999999999d' % 5",
        "f'{1}'",
        "[1, 2]",
        "[1, 2][0]",
        "{1}",
        "None",
        "...",
        "1j",
        "(-8) ** 0.5",
        "1e400",
        "1e308 * 10",
        "1e400 - 1e400",
        # Truth values and comparisons.
        "True",
        "1 < 2",
        "1 == 1",
        "1 is 1",
        "not 1",
        "True + 1",
        "-True",
        "1 and 2",
        "0 or 5",
        "1 if 2 else 3",
        # What is no expression.
        "1; 2",
        "x = 5",
        "import os",
        "for i in 1: 2",
        # What is too long or too deep.
        "1" * 201,
        "1" + "+1" * 100,
        "(" * 150 + "1",
        "(" * 10**6,
        "1" * 10**6,
    ],
    ids=lambda text: repr(text[:30]),
)
@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*(attempted|multiple expressions)", "ignore::SyntaxWarning")
def test_what_is_no_arithmetic_is_refused_in_words(expression):
    found = work_out(expression)
    assert (found.ok, found.error) == (False, "tool_error")
    assert found.result


@given(st.lists(st.sampled_from([*"0123456789.+-*/%()e ", "**", "//"]), max_size=40).map("".join))
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_no_expression_raises(expression):
    found = CALCULATOR.call({"expression": expression})
    assert found.ok == (found.error is None)
    assert found.result


# Search


def test_every_question_of_the_corpus_finds_its_passage():
    asked = [passage for passage in passages() if "question" in passage]
    assert len(asked) > 50
    for passage in asked:
        found = SEARCH.call({"query": passage["question"]})
        assert found.ok
        assert f"{passage['title']}: {passage['text']}" in found.result.split("\n"), passage["question"]
        assert passage["answer"] in passage["text"]


def test_no_two_questions_of_the_corpus_are_alike():
    questions = [passage["question"] for passage in passages() if "question" in passage]
    assert len(set(questions)) == len(questions)


def test_a_search_gives_three_passages_at_most():
    assert len(SEARCH.call({"query": "country capital"}).result.split("\n")) == 3


@pytest.mark.parametrize("query", ["zzyzx", "\u65e5\u672c", "x" * 10**6])
def test_words_that_no_passage_has_find_nothing(query):
    found = SEARCH.call({"query": query})
    assert (found.ok, found.result) == (True, "nothing found")


@pytest.mark.parametrize("query", ["", "   ", "the of a", "?!", "\0"])
def test_a_query_without_words_is_refused(query):
    found = SEARCH.call({"query": query})
    assert (found.ok, found.error) == (False, "tool_error")
    assert "no words" in found.result


@given(st.text(st.characters(), max_size=40))
def test_no_query_raises(query):
    assert SEARCH.call({"query": query}).result


# The registry


@pytest.mark.parametrize("name", TOOLS)
def test_a_schema_has_name_description_and_parameters(name):
    schema = offer((name,))[name].schema
    assert schema["type"] == "function"
    function = schema["function"]
    assert function.keys() == {"name", "description", "parameters"}
    assert function["name"] == name
    assert function["description"].endswith(".")
    parameters = function["parameters"]
    assert parameters["type"] == "object"
    assert parameters["required"] == list(parameters["properties"])
    for value in parameters["properties"].values():
        assert value == {"type": "string"}


def test_a_call_keeps_the_arguments_it_was_made_with():
    found = CALCULATOR.call({"expression": "1+1"})
    assert (found.tool, found.args) == ("calculator", {"expression": "1+1"})


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, ["expression", "missing"]),
        ({"expression": 1}, ["expression", "string"]),
        ({"expression": True}, ["expression", "string"]),
        ({"expression": "1", "x": 1}, ["x", "unexpected"]),
        ({"self": 1, "expression": "1"}, ["self", "unexpected"]),
        ({"args": [], "kwargs": {}, "expression": "1"}, ["args", "unexpected"]),
        ({"\ud800": 1}, ["string"]),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_in_words(args, words):
    found = CALCULATOR.call(args)
    assert (found.ok, found.error, found.args) == (False, "bad_arguments", args)
    for word in words:
        assert word in found.result


def test_an_unknown_tool_is_refused_with_the_names_there_are():
    found = carry_out(ParsedCall("abacus", {}), offer(("search",)))
    assert (found.ok, found.error) == (False, "unknown_tool")
    assert "abacus" in found.result
    assert "search" in found.result
    assert "calculator" not in found.result


def test_a_call_that_could_not_be_read_keeps_its_error():
    found = carry_out(ParsedCall(None, None, "malformed", "the call is not valid JSON"), offer(("search",)))
    assert (found.ok, found.error, found.result) == (False, "malformed", "the call is not valid JSON")


def test_tools_are_offered_in_the_order_asked_for():
    assert list(offer(("search", "calculator"))) == ["search", "calculator"]
    assert offer(()) == {}


def test_a_misspelt_tool_gets_a_suggestion():
    with pytest.raises(SettingsError, match="unknown tool `serch`") as caught:
        offer(("serch",))
    assert caught.value.hint == "Did you mean `search`?"


def test_search_does_not_wake_jax(tmp_path):
    # JAX takes most of a GPU's memory when it is first used, and the search tool's library would use it.
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')")
    code = "from nanoskyrl.envs.worlds.tool_use.search import search; print(search('Paris'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_many_threads_can_search_for_the_first_time_at_once():
    code = """
import threading
from nanoskyrl.envs.worlds.tool_use.search import search
found, begin = [], threading.Barrier(8)
def work():
    begin.wait()
    found.append(search('Paris'))
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 8 and len(set(found)) == 1, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
