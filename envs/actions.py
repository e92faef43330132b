"""What a policy's text says: its tool calls and its final answer.

The text is in our own protocol: calls are JSON in `<tool_call>` tags. What a policy wrote in the markup of its own
template was put into these tags before (`tool_formats/`). Nothing here raises, whatever the text.
"""

import re
from collections.abc import Iterable, Iterator

from nanoskyrl.envs.tool_formats.base import (
    TOOL_CALL as TOOL_CALL,
    TOOL_CALL_END as TOOL_CALL_END,
    FoundCall,
    ParsedCall as ParsedCall,
    json_object as json_object,
)
from nanoskyrl.envs.tool_formats.hermes import read

ANSWER, ANSWER_END = "<answer>", "</answer>"
_ANSWER = re.compile(f"{ANSWER}((?:(?!</?answer>).)*){ANSWER_END}", re.DOTALL)


def tool_calls(text: str) -> list[ParsedCall]:
    """Return every call in the text, in order, the malformed ones with their error."""
    return [piece.call for piece in read(text) if isinstance(piece, FoundCall)]


def said(text: str) -> Iterator[str]:
    """Return the text from left to right without calls, reasoning and code fences, piece by piece."""
    return (piece for piece in read(text) if isinstance(piece, str))


def final_answer(text: str) -> str | None:
    """Return the last answer in tags, stripped, or None if there is none.

    Reasoning, code fences and the insides of tool calls do not answer. A missing closing
    tag is no answer: the text may have been cut.
    """
    answers = [found[1] for piece in said(text) for found in _ANSWER.finditer(piece)]
    return answers[-1].strip() if answers else None


def words_of(text: str) -> str:
    """Return a text without its calls, reasoning and code fences, which are talked about and not said."""
    return "\n".join(said(text))


def restore_stop(text: str, stop_strings: Iterable[str]) -> str:
    """Return text with the closing tag back that an endpoint cut off, because it was a stop string.

    Only a tag that is open at the end is closed: endpoints do not say whether a stop string ended the text.
    """
    for stop in stop_strings:
        opening = stop.replace("</", "<", 1)
        if stop.startswith("</") and text.rfind(opening) > text.rfind(stop):
            return text + stop
    return text
