"""The one command a policy gives a text world, as `go to desk 1` or `click[buy now]`.

It stands in `<action>` tags, or in `<answer>` tags as RAGEN has it; reasoning and code
fences do not act. Without tags the last line counts, so that a plain reply works too.
"""

from nanoskyrl.envs.actions import ANSWER, ANSWER_END, final_answer
from nanoskyrl.stages.trajectory import ToolCall

ACTION, ACTION_END = "<action>", "</action>"
MAX_LENGTH = 500
"""Longer commands are malformed: no world has them, and they would be shown back."""


def command_of(text: str) -> str:
    """Return the command in a policy's text with single spaces, or "" if there is none."""
    tagged = final_answer(text.replace(ACTION, ANSWER).replace(ACTION_END, ANSWER_END))
    if tagged is None:
        spoken = text.rpartition("</think>")[2]
        tagged = next((line for line in reversed(spoken.splitlines()) if line.strip()), "")
    return " ".join(tagged.split())


def record(kind: str, command: str, result: str, error: str | None) -> ToolCall:
    """Return one command as the trajectory table keeps it, so that kinds of mistakes can be counted.

    Args:
        kind: The verb, such as `go to`; of a command that could not be read, nothing.
        command: The whole command; only its beginning is kept.
        result: What the world answered.
        error: `malformed` or `not_admissible`; None where the command did something.
    """
    args = {"command": command[:MAX_LENGTH]}
    return ToolCall(tool=kind or None, args=args, result=result, ok=error is None, error=error)
