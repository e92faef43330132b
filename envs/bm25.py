"""Finding texts by their words: BM25 over a list of texts that is held in memory."""

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.children import temporary_directory
from nanoskyrl.stages.core.digests import digest_json

LEAST_CACHED = 2000
_IMPORTING = threading.Lock()


class Index:
    """The words of some texts, ready to be searched."""

    def __init__(self, texts: Sequence[str], folder: Path | None = None) -> None:
        """Read the texts, of which there must be at least one, or what `save` put into a folder of them."""
        self._count = len(texts)
        self._retriever = _bm25s().BM25() if folder is None else _bm25s().BM25.load(str(folder))
        if folder is None:
            self._retriever.index(_words(texts, return_ids=True), show_progress=False)

    def save(self, folder: Path) -> None:
        """Write the index into a folder."""
        self._retriever.save(str(folder))

    def find(self, query: str, most: int) -> list[int]:
        """Return places of the texts that share a word with the query, the best first; none where it has no word."""
        words = _words([query], return_ids=False)
        if not words[0]:
            return []
        found, scores = self._retriever.retrieve(
            words, k=min(most, self._count), show_progress=False, backend_selection="numpy"
        )
        return [int(i) for i, score in zip(found[0], scores[0], strict=True) if score > 0]


def cached_index(name: str, texts: Sequence[str], folder: Path | None = None) -> Index:
    """Return the index of texts: from the cache if these very texts were indexed before, else built and put there.

    Args:
        name: What the texts are, for whoever looks into the cache.
        texts: What is searched.
        folder: The cache; by default `nanoskyrl/search` in $XDG_CACHE_HOME or ~/.cache. Fewer than
            LEAST_CACHED texts are not kept: to index them takes less time than to read the index.
    """
    if len(texts) < LEAST_CACHED:
        return Index(texts)
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = folder or Path(cache_home) / "nanoskyrl" / "search"
    place = folder / f"{name}-{digest_json(list(texts))[:16]}"
    if place.is_dir():
        return Index(texts, place)
    index = Index(texts)
    with contextlib.suppress(OSError):  # a cache that cannot be written is only slower
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_directory("new-", folder) as temporary:
            index.save(temporary / "index")
            os.replace(temporary / "index", place)
    return index


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
