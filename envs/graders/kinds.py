"""Every way of telling a right answer from a wrong one, by kind.

A grader takes what is right and what was written, and returns a verdict. `reading.py` finds the answer,
`equality.py` compares. A grader never raises for what was written, and what it cannot judge it does not call wrong:
`correct` is None.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from nanoskyrl.envs.actions import ParsedCall, tool_calls
from nanoskyrl.envs.base import VerifierTimeout
from nanoskyrl.envs.graders import equality
from nanoskyrl.envs.graders.answers import same_answer
from nanoskyrl.envs.graders.equality import (
    POOL as POOL,
    RIGHT,
    WRONG,
    Verdict,
    compare,
    members_of,
    number_in,
    same_members,
)
from nanoskyrl.envs.graders.golds import golds_of
from nanoskyrl.envs.graders.reading import (
    FORMS,
    REASONING,
    TAGS,
    Marks,
    Stated,
    choice_in,
    chosen,
    last_box,
    stated,
    without_reasoning,
)
from nanoskyrl.stages.core.errors import InputError, SettingsError, did_you_mean, told_as
from nanoskyrl.stages.core.trajectory import ToolCall, Trajectory

SECONDS = 10.0
"""For one answer that needs a library."""

ANSWERED = "answered"
"""Part of a score that says whether there was an answer to be judged at all, 1 or 0."""
NO_ANSWER = "no_answer"
"""The kind of mistake of a turn that ends an attempt and holds no answer."""
NONE = Verdict(False, "no answer")
UNANSWERED = ToolCall(tool=None, result="no answer was found", ok=False, error=NO_ANSWER)
"""Recorded in place of a call, so that such turns can be counted beside calls that failed."""


def grade(kind: str, gold: Any, pred: str | None, *, seconds: float = SECONDS, marks: Marks = REASONING) -> Verdict:
    """Return the verdict on an answer.

    Args:
        kind: One of KINDS.
        gold: What is right: text for most kinds, or a list or an object of texts that each are; a letter or an index
            for mcq, members for set and tuple, calls for tool_call, tests for code.
        pred: What was written, reasoning and all; None is no answer, and wrong.
        seconds: What a library may take for this answer.
        marks: What opens and closes reasoning, which is never judged.

    Raises:
        SettingsError: there is no such kind.
        InputError: the gold is not what this kind takes.
        SandboxError: code is to be graded, and no sandbox works here.
    """
    if not isinstance(kind, str):
        raise SettingsError(f"the kind of a grader is a name, not {kind!r}", hint=f"Choose from {', '.join(KINDS)}")
    if kind not in KINDS:
        raise SettingsError(
            f"unknown grader `{kind}`", hint=did_you_mean(kind, KINDS) or f"Choose from {', '.join(KINDS)}"
        )
    if gold is None:
        raise InputError(
            "the gold answer is null", hint="Leave out rows without one: nothing can be compared with them"
        )
    if pred is None:
        return NONE
    pred = without_reasoning(pred, marks)
    if kind in WHOLE_GOLDS or not isinstance(gold, list | dict):
        return KINDS[kind](gold, pred, seconds)
    with told_as(InputError, "the gold answer", ValueError, hint="Give a text, a list of texts, or a known object"):
        golds = golds_of(gold)
    deadline = time.monotonic() + seconds
    return _any(KINDS[kind](one, pred, max(0.0, deadline - time.monotonic())) for one in golds)


def _any(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the first verdict that is right, else the first that is none, else the first."""
    seen: list[Verdict] = []
    for verdict in verdicts:
        if verdict.correct:
            return verdict
        seen.append(verdict)
    return next((verdict for verdict in seen if verdict.correct is None), seen[0])


def judged(verdict: Verdict) -> bool:
    """Return whether the answer is right.

    Raises:
        VerifierTimeout: the grader was killed.
        RuntimeError: the grader died.
    """
    if verdict.correct is None and verdict.why == "timeout":
        raise VerifierTimeout("the grader did not come to a verdict in time, and was killed")
    if verdict.correct is None:
        raise RuntimeError("the grader died; it may have wanted too much memory")
    return verdict.correct


def answer_verdict(trajectory: Trajectory, marks: Marks = REASONING) -> tuple[bool, bool]:
    """Return whether the last turn answers, and whether rightly.

    Generated tasks are compared by spelling; those of a data set name their grader in the metadata.

    Raises:
        VerifierTimeout, RuntimeError: there is no verdict.
    """
    action = trajectory.last_action
    gold = trajectory.metadata["ground_truth"]
    kind = trajectory.metadata.get("grader")
    answer = answer_in(action, kind, marks)
    if kind is None:
        return answer is not None, same_answer(answer, str(gold))
    return answer is not None, judged(grade(kind, gold, action, marks=marks))


def answer_in(action: str, kind: str | None, marks: Marks = REASONING) -> str | None:
    """Return the answer that a grader of this kind looks at, or None if there is none."""
    return _answer(action, FORMS if kind == "stated_answer" else (TAGS,), marks)


@lru_cache(maxsize=64)  # attempts at one prompt are often one text
def _answer(action: str, forms: Sequence[str], marks: Marks) -> str | None:
    found = stated(action, forms, marks=marks)
    return None if found is None else found.text


def unanswered(action: str, kind: str | None, marks: Marks = REASONING) -> list[ToolCall]:
    """Return the record of a last turn that does not answer; of one that does, nothing."""
    return [UNANSWERED] if answer_in(action, kind, marks) is None else []


def _looked_at(verdict: Verdict, answer: Stated) -> Verdict:
    return replace(verdict, taken=answer.text, form=answer.form)


def _stated(gold: Any, pred: str, seconds: float, *, forms: Sequence[str] = FORMS, whole: bool = False) -> Verdict:
    """Compare the answer that is stated in one of these forms, or else, if so wanted, the whole text."""
    answer = stated(pred, forms, whole=whole, marks=())
    if answer is None:
        return NONE
    gold = str(gold)
    return _looked_at(compare(last_box(gold) or gold, answer.text, seconds=seconds), answer)


def _listed(gold: Any, pred: str, seconds: float, *, ordered: bool) -> Verdict:
    """Compare members in their order, or in any: then each wanted one must be found, and nothing else."""
    answer = stated(pred, whole=True, marks=())
    if answer is None:
        return NONE
    deadline = time.monotonic() + seconds
    wanted = members_of(gold if isinstance(gold, list) else last_box(str(gold)) or str(gold))
    verdict = same_members(wanted, members_of(answer.text), lambda: deadline - time.monotonic(), ordered=ordered)
    return _looked_at(replace(verdict, kind=equality.LIST if ordered else equality.SET), answer)


def _number(gold: Any, pred: str, seconds: float) -> Verdict:
    """Compare numbers as GSM8K does: the number that is stated, whatever it counts."""
    said = stated(str(gold), whole=True)
    wanted = number_in(said.text) if said else None
    if wanted is None:
        raise InputError(f"the gold answer {str(gold)[:60]!r} is no number", hint="Grade it as math or final_answer")
    answer = stated(pred, whole=True, marks=())
    found = number_in(answer.text) if answer else None
    if answer is None:
        return Verdict(False, "no number")
    if found is None and "=" in answer.text:
        return _looked_at(compare(str(wanted), answer.text, seconds=seconds), answer)
    verdict = Verdict(False, "no number") if found is None else RIGHT if found == wanted else WRONG
    return _looked_at(replace(verdict, kind=equality.NUMBER), answer)


def _mcq(gold: Any, pred: str, seconds: float) -> Verdict:
    """Compare letters; an index counts from 0, and is A. Only a letter that is stated as the answer counts."""
    wanted = letter_of_gold(gold)
    found = chosen(pred, marks=())
    if found is None:
        return Verdict(False, "no letter", kind=equality.CHOICE)
    right = found.text == wanted
    return _looked_at(Verdict(right, "right" if right else f"{found.text}, not {wanted}", kind=equality.CHOICE), found)


def letter_of_gold(gold: Any) -> str:
    """Return the letter of a gold: a letter, with the option's text or without, or an index that counts from 0.

    Raises:
        InputError: it is neither.
    """
    if isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < 26:
        return chr(ord("A") + gold)
    letter = choice_in(gold.strip().upper() if len(gold.strip()) == 1 else gold) if isinstance(gold, str) else None
    if not letter:
        raise InputError(f"the gold answer {gold!r} is no letter", hint="Give a letter, or an index that counts from 0")
    return letter


def _tool_call(gold: Any, pred: str, seconds: float, *, any_order: bool = False) -> Verdict:
    """Compare all calls of a turn with the wanted ones, in order or in any; 1 and 1.0 are equal, 1 and "1" are not."""
    wanted = [_as_call(call) for call in (gold if isinstance(gold, list) else [gold])]
    found = tool_calls(pred)
    if not found:
        return Verdict(False, "no call") if wanted else RIGHT
    for call in found:
        if call.error is not None:
            return Verdict(False, f"{call.error}: {call.detail}")
    if len(found) != len(wanted):
        return Verdict(False, f"{len(found)} calls, not {len(wanted)}")
    left = [(call.tool, call.args) for call in found]
    for name, args in wanted:
        named = [call for call in left if call[0] == name] if any_order else left[:1]
        call = next((call for call in named if _canonical(call[1]) == _canonical(args)), named[0] if named else None)
        if call is None or call[0] != name:
            return Verdict(False, f"a call of {left[0][0]}, not {name}")
        if _canonical(call[1]) != _canonical(args):
            return Verdict(False, f"other arguments for {name}")
        left.remove(call)
    return RIGHT


def _as_call(call: Any) -> tuple[str, dict[str, Any]]:
    parsed = tool_calls(f"<tool_call>{call if isinstance(call, str) else json.dumps(call)}</tool_call>")
    if len(parsed) != 1 or parsed[0].error is not None:
        raise InputError(f"the gold call {call!r} is none", hint='Write {"name": ..., "arguments": {...}}')
    first: ParsedCall = parsed[0]
    return first.tool or "", first.args or {}


def _canonical(value: Any) -> Any:
    """Return a value in which 1 and 1.0 are equal, and True and 1 are not."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return (type(value).__name__ if isinstance(value, bool | str | None) else "number", value)


def _code(gold: Any, pred: str, seconds: float) -> Verdict:
    """Run a program against tests. One that does not end is wrong: it is the program that hangs, not the grader."""
    from nanoskyrl.envs.graders.grade_code import passes, tests_of
    from nanoskyrl.envs.graders.program_tests import parsed_tests

    if not isinstance(gold, dict) or not ("tests" in gold or {"inputs", "outputs"} <= gold.keys()):
        raise InputError("the gold of a program has no tests", hint="Give `tests`, or `inputs` and `outputs`")
    tests = gold.get("tests", "-")
    texts = [tests] if isinstance(tests, str) else tests if isinstance(tests, list) else [None]
    pairs = [gold.get(name, []) for name in ("inputs", "outputs")]
    whole = all(isinstance(text, str) and text.strip() for text in texts) and texts
    if not whole or not all(isinstance(each, list) for each in pairs) or len(pairs[0]) != len(pairs[1]):
        raise InputError(
            "the tests of a program are texts, and its inputs and outputs lists of one length",
            hint="See docs/graders.md",
        )
    if "tests" not in gold and not (pairs[0] and all(isinstance(text, str) for each in pairs for text in each)):
        raise InputError("the inputs and outputs of a program are texts, one at the least", hint="See docs/graders.md")
    if "tests" in gold:
        with told_as(InputError, "the gold of a program", ValueError, hint="See docs/graders.md"):
            parsed_tests(tests_of(gold))
    correct, why = passes(gold, pred)
    return Verdict(correct, why)


Grader = Callable[[Any, str, float], Verdict]
KINDS: dict[str, Grader] = {
    "math": partial(_stated, whole=True),
    "set": partial(_listed, ordered=False),
    "tuple": partial(_listed, ordered=True),
    "mcq": _mcq,
    "number": _number,
    "code": _code,
    "tool_call": _tool_call,
    "tool_call_set": partial(_tool_call, any_order=True),  # as BFCL does with parallel ones
    "final_answer": partial(_stated, forms=(TAGS,)),
    "stated_answer": _stated,  # in whatever form a data set's own prompt asks for it
}
WHOLE_GOLDS = ("set", "tuple", "tool_call", "tool_call_set", "code")
"""Kinds whose gold is a list or an object itself, and no choice of several."""
