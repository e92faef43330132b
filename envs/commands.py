"""The one action a policy gives a world that reads text, as `go to desk 1` or `click[buy now]`.

It is in `<action>` tags, or in `<answer>` tags as RAGEN has it; the last one counts,
and reasoning does not act. Without tags the whole reply, or its last line, is the action.
"""

import re

from nanoskyrl.stages.core.trajectory import ToolCall

ACTION, ACTION_END = "<action>", "</action>"
_TAGGED = re.compile(r"<(action|answer)>((?:(?!</?(?:action|answer)>).)*)</\1>", re.DOTALL)
MAX_LENGTH = 500
"""Characters of a command that are kept in its record."""


def action_of(text: str) -> str:
    """Return the action in a policy's text, in as many lines as it has, or "" if there is none."""
    spoken = text.rpartition("</think>")[2].partition("<think>")[0]
    tagged = [found[2] for found in _TAGGED.finditer(spoken)]
    return (tagged[-1] if tagged else spoken).strip()


def command_of(text: str) -> str:
    """Return the action as one line with single spaces; of a reply in several lines without tags, the last."""
    spoken = action_of(text)
    if not _TAGGED.search(text):
        spoken = spoken.rpartition("\n")[2]
    return " ".join(spoken.split())


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
