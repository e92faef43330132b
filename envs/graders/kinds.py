"""Every way of telling a right answer from a wrong one, by kind.

A grader takes what is right and what was written, and returns a verdict. It never raises for what was written, and
what it cannot judge it does not call wrong: `correct` is None.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanoskyrl.envs.actions import ParsedCall, final_answer, letter_of, tool_calls
from nanoskyrl.envs.base import VerifierTimeout
from nanoskyrl.envs.graders import grade_math
from nanoskyrl.envs.graders.answers import leading_number, same_answer
from nanoskyrl.envs.graders.workers import WorkerDied, Workers, WorkerTimeout
from nanoskyrl.stages.core.errors import InputError, SettingsError, did_you_mean, told_as
from nanoskyrl.stages.core.trajectory import ToolCall, Trajectory

POOL = Workers(quiet=True)
"""For libraries that may never come back; they print what they do not understand."""
SECONDS = 10.0
"""For one comparison that needs a library."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a grader says."""

    correct: bool | None
    """None: it could not be judged, because the grader was killed or died."""
    why: str
    """`right`, or what is wrong, or `timeout` or `died` where there is no verdict."""


ANSWERED = "answered"
"""Part of a score that says whether there was an answer to be judged at all, 1 or 0."""
NO_ANSWER = "no_answer"
"""The kind of mistake of a turn that ends an attempt and holds no answer."""
RIGHT, WRONG = Verdict(True, "right"), Verdict(False, "another answer")
NONE = Verdict(False, "no answer")
UNANSWERED = ToolCall(tool=None, result="no answer was found", ok=False, error=NO_ANSWER)
"""Recorded in place of a call, so that such turns can be counted beside calls that failed."""


def grade(kind: str, gold: Any, pred: str | None, *, seconds: float = SECONDS) -> Verdict:
    """Return the verdict on an answer.

    Args:
        kind: One of KINDS.
        gold: What is right: text for most kinds, a letter or an index for mcq, calls for tool_call, tests for code.
        pred: What was written; None is no answer, and wrong.
        seconds: What a library may take.

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
    return KINDS[kind](gold, pred, seconds)


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


def answer_verdict(trajectory: Trajectory) -> tuple[bool, bool]:
    """Return whether the last turn answers, and whether rightly.

    Generated tasks are compared by spelling; those of a data set name their grader in the metadata.

    Raises:
        VerifierTimeout, RuntimeError: there is no verdict.
    """
    action = trajectory.turns[-1].action if trajectory.turns else ""
    gold = trajectory.metadata["ground_truth"]
    kind = trajectory.metadata.get("grader")
    answer = answer_in(action, kind)
    if kind is None:
        return answer is not None, same_answer(answer, str(gold))
    return answer is not None, judged(grade(kind, gold, action))


def answer_in(action: str, kind: str | None) -> str | None:
    """Return the answer that a grader of this kind looks at, or None if there is none."""
    return stated_answer(action) if kind == "stated_answer" else final_answer(action)


def unanswered(action: str, kind: str | None) -> list[ToolCall]:
    """Return the record of a last turn that does not answer; of one that does, nothing."""
    return [UNANSWERED] if answer_in(action, kind) is None else []


def _math(gold: Any, pred: str, seconds: float) -> Verdict:
    r"""Compare as mathematics; of a text with boxes the last one counts, and one that is not closed is no answer."""
    gold = str(gold)
    wanted = grade_math.last_box(gold) or gold
    found = grade_math.last_box(pred) if grade_math.has_box(pred) else pred
    if found is None or not found.strip():
        return NONE
    verdict = grade_math.decide(wanted, found)
    if verdict is None:
        try:
            verdict = POOL.call("nanoskyrl.envs.graders.grade_math:equal", wanted, found, seconds=seconds)
        except WorkerTimeout:
            return Verdict(None, "timeout")
        except (WorkerDied, MemoryError, RecursionError):
            return Verdict(None, "died")
    return RIGHT if verdict else WRONG


def _members(text: Any) -> list[str]:
    """Split at commas that stand in no bracket; outer brackets and braces do not count. A list is split already."""
    if isinstance(text, list):
        return [str(member) for member in text]
    text = grade_math.normalize(grade_math.last_box(text) or text)
    text = text.replace("\\{", "{").replace("\\}", "}")
    if grade_math.is_one_pair(text):
        text = text[1:-1]
    members, depth, start = [], 0, 0
    for i, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign in ",;" and depth == 0:
            members.append(text[start:i].strip())
            start = i + 1
    return [member for member in [*members, text[start:].strip()] if member]


def _tuple(gold: Any, pred: str, seconds: float) -> Verdict:
    """Compare members in their order."""
    wanted, found = _members(gold if isinstance(gold, list) else str(gold)), _members(pred)
    if not found:
        return NONE
    if len(wanted) != len(found):
        return Verdict(False, f"{len(found)} members, not {len(wanted)}")
    for left, right in zip(wanted, found, strict=True):
        verdict = _math(left, right, seconds)
        if not verdict.correct:
            return verdict
    return RIGHT


def _set(gold: Any, pred: str, seconds: float) -> Verdict:
    """Compare members in any order; each wanted one must be found once, and nothing else."""
    wanted = _distinct(_members(gold if isinstance(gold, list) else str(gold)), seconds)
    left = _distinct(_members(pred), seconds)
    if not left:
        return NONE
    if len(left) != len(wanted):
        return Verdict(False, f"{len(left)} members, not {len(wanted)}")
    for member in wanted:
        verdicts = [_math(member, other, seconds) for other in left]
        place = next((i for i, verdict in enumerate(verdicts) if verdict.correct), None)
        if place is None:
            return next((verdict for verdict in verdicts if verdict.correct is None), WRONG)
        del left[place]
    return RIGHT


def _distinct(members: list[str], seconds: float) -> list[str]:
    kept: list[str] = []
    for member in members:
        if not any(_math(other, member, seconds).correct for other in kept):
            kept.append(member)
    return kept


def _number(gold: Any, pred: str, seconds: float) -> Verdict:
    """Compare numbers as GSM8K does: what stands behind the last `####`, or in a box, or is the whole text."""
    wanted = leading_number(_stated(str(gold)))
    if wanted is None:
        raise InputError(f"the gold answer {str(gold)[:60]!r} is no number", hint="Grade it as math or final_answer")
    found = leading_number(_stated(pred))
    if found is None:
        return Verdict(False, "no number")
    return RIGHT if found == wanted else WRONG


def _stated(text: str) -> str:
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().partition("\n")[0]
    answer = final_answer(text)
    if answer is not None:
        return answer
    return (grade_math.last_box(text) or "") if grade_math.has_box(text) else text.strip()


def _mcq(gold: Any, pred: str, seconds: float) -> Verdict:
    """Compare letters; an index counts from 0, and is A. Only a letter that is stated as the answer counts."""
    indexed = isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < 26
    wanted = chr(ord("A") + gold) if indexed else str(gold).strip().upper()
    if len(wanted) != 1 or not "A" <= wanted <= "Z":
        raise InputError(f"the gold answer {gold!r} is no letter", hint="Give a letter, or an index that counts from 0")
    found = letter_of(grade_math.last_box(pred) or final_answer(pred) or pred)
    if found is None:
        return Verdict(False, "no letter")
    return RIGHT if found == wanted else Verdict(False, f"{found}, not {wanted}")


def _tool_call(gold: Any, pred: str, seconds: float) -> Verdict:
    """Compare all calls of a turn with the wanted ones, in order; 1 and 1.0 are equal, 1 and "1" are not."""
    wanted = [_as_call(call) for call in (gold if isinstance(gold, list) else [gold])]
    found = tool_calls(pred)
    if not found:
        return Verdict(False, "no call") if wanted else RIGHT
    for call in found:
        if call.error is not None:
            return Verdict(False, f"{call.error}: {call.detail}")
    if len(found) != len(wanted):
        return Verdict(False, f"{len(found)} calls, not {len(wanted)}")
    for call, (name, args) in zip(found, wanted, strict=True):
        if call.tool != name:
            return Verdict(False, f"a call of {call.tool}, not {name}")
        if _canonical(call.args) != _canonical(args):
            return Verdict(False, f"other arguments for {name}")
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


def _final_answer(gold: Any, pred: str, seconds: float) -> Verdict:
    """Compare the last answer in tags, by spelling, and as mathematics where the gold is some."""
    answer = final_answer(pred)
    if answer is None:
        return NONE
    return RIGHT if same_answer(answer, str(gold)) else _math(gold, answer, seconds)


def stated_answer(text: str) -> str | None:
    """Return the answer in tags, else in the last box, else behind the last `####`; None if there is none."""
    answer = final_answer(text)
    if answer is None and grade_math.has_box(text):
        answer = grade_math.last_box(text)
    if answer is None and "####" in text:
        answer = text.rsplit("####", 1)[1].strip().partition("\n")[0]
    return answer or None


def _stated_answer(gold: Any, pred: str, seconds: float) -> Verdict:
    """Compare the answer in whatever form a data set's own prompt asks for it."""
    answer = stated_answer(pred)
    if answer is None:
        return NONE
    return RIGHT if same_answer(answer, str(gold)) else _math(gold, answer, seconds)


Grader = Callable[[Any, str, float], Verdict]
KINDS: dict[str, Grader] = {
    "math": _math,
    "set": _set,
    "tuple": _tuple,
    "mcq": _mcq,
    "number": _number,
    "code": _code,
    "tool_call": _tool_call,
    "final_answer": _final_answer,
    "stated_answer": _stated_answer,
}
