"""Golds that are lists or objects: which texts are right answers."""

from collections.abc import Mapping
from typing import Any

KEYS = (
    "target", "value", "aliases", "normalized_value", "normalized_aliases", "answer", "answers", "text", "ground_truth",
    "gold", "name", "short_answers",
)  # fmt: skip
"""Of objects of data sets (Search-R1, TriviaQA, SQuAD): each of what stands there is right."""


def golds_of(gold: Any) -> list[str]:
    """Return every text that is a right answer, the first one first.

    Args:
        gold: A text or a number, a list of them, or an object with some of KEYS, or DROP's (number, spans, date).

    Raises:
        ValueError: there is none, or it is something else.
    """
    found = list(dict.fromkeys(_texts(gold)))
    if not found:
        raise ValueError("holds no answer")
    return found


def _texts(gold: Any) -> list[str]:
    if isinstance(gold, str):
        return [gold] if gold.strip() else []
    if isinstance(gold, bool | int | float):
        return [str(gold)]
    if isinstance(gold, list | tuple):
        return [text for one in gold for text in _texts(one)]
    if isinstance(gold, Mapping):
        if "spans" in gold:
            return _drop(gold)
        known = [gold[key] for key in KEYS if gold.get(key) is not None]
        if known:
            return [text for one in known for text in _texts(one)]
        raise ValueError(f"is an object with {', '.join(map(str, gold)) or 'nothing in it'}, none of {', '.join(KEYS)}")
    raise ValueError("is empty" if gold is None else f"is a {type(gold).__name__}")


def _drop(gold: Mapping[str, Any]) -> list[str]:
    """Return DROP's answer: a number, a date, one span, or a set of spans."""
    if str(gold.get("number") or "").strip():
        return [str(gold["number"])]
    spans = [str(span) for span in gold["spans"] or ()]
    if len(spans) > 1:
        return [f"\\{{{', '.join(spans)}\\}}"]
    date = gold.get("date") or {}
    told = " ".join(str(date[key]) for key in ("day", "month", "year") if str(date.get(key) or "").strip())
    return spans or ([told] if told else [])
