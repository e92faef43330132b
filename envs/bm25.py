"""Finding texts by their words: BM25 over a list of texts that is held in memory."""

import importlib
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

_IMPORTING = threading.Lock()


class Index:
    """The words of some texts, ready to be searched."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Read the texts; there must be at least one."""
        self._count = len(texts)
        self._retriever = _bm25s().BM25()
        self._retriever.index(_words(texts, return_ids=True), show_progress=False)

    def find(self, query: str, most: int) -> list[int]:
        """Return places of the texts that share a word with the query, the best first; none where it has no word."""
        words = _words([query], return_ids=False)
        if not words[0]:
            return []
        found, scores = self._retriever.retrieve(
            words, k=min(most, self._count), show_progress=False, backend_selection="numpy"
        )
        return [int(i) for i, score in zip(found[0], scores[0], strict=True) if score > 0]


def has_words(query: str) -> bool:
    """Say whether a query has anything to look for."""
    return bool(_words([query], return_ids=False)[0])


def _words(texts: Sequence[str], *, return_ids: bool) -> Any:
    return _bm25s().tokenize(list(texts), stopwords="en", show_progress=False, return_ids=return_ids)


@cache
def _bm25s() -> Any:
    """Return bm25s, imported without JAX: it would try JAX out at once, and that takes most of a GPU's memory."""
    with _IMPORTING:  # several environments may search for the first time at once
        if "bm25s" not in sys.modules:
            hidden = sys.modules.get("jax")
            sys.modules["jax"] = None  # type: ignore[assignment]
            try:
                importlib.import_module("bm25s")
            finally:
                sys.modules.pop("jax", None)
                if hidden is not None:
                    sys.modules["jax"] = hidden
        return sys.modules["bm25s"]
