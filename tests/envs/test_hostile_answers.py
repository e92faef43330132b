"""Answers, rows and programs that an attacker found a way with."""

import pytest

from nanoskyrl.envs.graders import grade_math
from nanoskyrl.envs.graders.kinds import grade
from nanoskyrl.envs.graders.reading import peeled
from nanoskyrl.envs.sandbox.base import FULL_PYTHON, Limits, available, run_python
from nanoskyrl.eval.benchmarks.checkout import lay_out
from nanoskyrl.eval.benchmarks.patches import applies, read_predictions
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.gpus import gpus_of


@pytest.mark.parametrize("text", ["$" + " " * 20000 + "x", "5" + " " * 20000 + "%x", "\\(" + "\n" * 20000 + "\\)"])
@pytest.mark.timeout(60)  # hours, when it was cubic
def test_an_answer_full_of_spaces_comes_back(text):
    assert len(grade_math.split_percent(grade_math.normalize(text))[0]) < 6


@pytest.mark.parametrize(
    ("text", "inner"),
    [("$x$", "x"), ("$$ x $$", "x"), ("\\( x \\)", "x"), ("\\[x\\]", "x"), ("$", "$"), ("$9$ $7$", "$9$ $7$")],
)
def test_delimiters_go_in_pairs(text, inner):
    assert peeled(text) == inner


@pytest.mark.parametrize("kind", ["math", "number", "mcq", "final_answer", "set", "tuple", "code"])
def test_a_null_gold_is_refused_and_not_read_as_a_word(kind):
    with pytest.raises(InputError, match="null"):
        grade(kind, None, "None")


@pytest.mark.parametrize(
    "gold",
    [
        {"tests": None}, {"tests": ""}, {"tests": []}, {"tests": [1]}, {"inputs": [], "outputs": []},
        {"inputs": ["1"], "outputs": []}, {"inputs": [1], "outputs": ["1"]}, {"inputs": "1", "outputs": "1"},
    ],
)  # fmt: skip
def test_a_program_without_tests_is_not_passed(gold):
    with pytest.raises(InputError, match="program"):
        grade("code", gold, "print(1)")


@pytest.mark.parametrize("gold", [10**10, -70, 26, True, 1.5, "AB"])
def test_a_gold_that_is_no_letter_is_refused(gold):
    with pytest.raises(InputError, match="no letter"):
        grade("mcq", gold, "A")


@pytest.mark.parametrize("kind", [["math"], {}, None, 3])
def test_a_kind_that_is_no_name_is_refused(kind):
    with pytest.raises(SettingsError, match="is a name"):
        grade(kind, "1", "1")


@pytest.mark.parametrize(
    ("kind", "pred", "right"), [("set", "b, a", True), ("tuple", "a, b", True), ("tuple", "b, a", False)]
)
def test_a_gold_may_be_a_list_of_texts(kind, pred, right):
    assert grade(kind, ["a", "b"], pred).correct is right


@pytest.mark.parametrize("commit", ["--output=victim", "HEAD", "", "abc", "--index-output=victim"])
def test_a_commit_is_no_option_of_git(tmp_path, commit, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "victim").write_text("kept")
    for use in (lambda: applies("", tmp_path, commit), lambda: lay_out(tmp_path, commit, tmp_path)):
        with pytest.raises(InputError, match="is no commit"):
            use()
    assert (tmp_path / "victim").read_text() == "kept"


def test_predictions_that_are_not_text_are_refused(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8"):
        read_predictions(tmp_path / "p.jsonl")


@pytest.mark.parametrize("text", ["0-99999999999", "5000", "٣"])
def test_gpus_are_counted_in_digits_and_hosts_have_few(text):
    with pytest.raises(SettingsError):
        gpus_of("loop.gpus_train", text)


@pytest.mark.skipif(available()[FULL_PYTHON] is not None, reason=f"{FULL_PYTHON}: {available()[FULL_PYTHON]}")
@pytest.mark.parametrize("opened", ["open('p').read()", "open('p', 'w').write('x')"])
@pytest.mark.timeout(60)
def test_a_program_that_waits_for_a_fifo_meets_its_limit(opened):
    ran = run_python(f"import os\nos.mkfifo('p')\n{opened}", limits=Limits(seconds=0.3), backend=FULL_PYTHON)
    assert ran.reason == "timeout"
