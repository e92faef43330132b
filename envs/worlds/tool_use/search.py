"""The tools `search` and `wiki`: passages of a corpus by their words, and pages by their title.

A small encyclopedia ships with the package. A corpus of the user's is a JSONL or Parquet file of `title` and `text`;
its index is built once, and kept beside others in the user's cache if it took a while.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from nanoskyrl.envs.bm25 import Index, cached_index, has_words
from nanoskyrl.envs.datasets import read_rows
from nanoskyrl.envs.tools import ToolError
from nanoskyrl.stages.core.errors import InputError, did_you_mean

SEARCH_RESULTS = 3
MAX_PAGE_LENGTH = 4000
"""Characters of a page that `wiki` shows: a policy's context is short."""

Passage = Mapping[str, str]
"""`title` and `text`; in the corpus that ships, also `question` and `answer`."""


class Corpus:
    """Passages, and the two tools over them."""

    def __init__(self, passages: Sequence[Passage], index: Index | None = None) -> None:
        """Read the passages; an index that exists already is taken as it is."""
        self.passages = passages
        self._index = index or Index([f"{p['title']} {p['text']}" for p in passages])
        self._by_title = {_key(p["title"]): p for p in reversed(passages)}  # of two with one title, the first

    def search(self, query: str) -> str:
        """Search a small encyclopedia and return the passages that fit best."""
        if not has_words(query):
            raise ToolError("the query has no words to look for")
        hits = [self.passages[i] for i in self._index.find(query, SEARCH_RESULTS)]
        return "\n".join(f"{hit['title']}: {hit['text']}" for hit in hits) or "nothing found"

    def wiki(self, title: str) -> str:
        """Return the page of the encyclopedia that has this title."""
        page = self._by_title.get(_key(title))
        if page is not None:
            return f"{page['title']}: {page['text']}"[:MAX_PAGE_LENGTH]
        near = [self.passages[i]["title"] for i in self._index.find(title, SEARCH_RESULTS)]
        raise ToolError(f"there is no page {title[:60]!r}" + (f"; there is {', '.join(near)}" if near else ""))


def _key(title: str) -> str:
    return " ".join(title.casefold().split())


@cache
def passages() -> list[dict[str, str]]:
    """Return the corpus that ships with the package, as title and text."""
    text = resources.files("nanoskyrl.envs.worlds.tool_use").joinpath("data/corpus.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@cache
def shipped() -> Corpus:
    """Return the corpus that ships with the package, indexed."""
    return Corpus(passages())


def read_corpus(name: str) -> Corpus:
    """Return the corpus of a JSONL or Parquet file.

    Raises:
        InputError: the file is missing or unreadable, or a row lacks title or text.
    """
    rows = []
    for place, row in read_rows(name, "corpus", "title and text"):
        if not all(isinstance(row.get(key), str) and row[key].strip() for key in ("title", "text")):
            hint = next((did_you_mean(key, row) for key in ("title", "text") if key not in row), None)
            raise InputError(f"{place} has no title and text", hint=hint or "Give both, as text")
        rows.append({"title": row["title"], "text": row["text"]})
    if not any(has_words(f"{row['title']} {row['text']}") for row in rows):
        raise InputError(f"corpus `{name}` has no words to be found by", hint="Give pages of text")
    return Corpus(rows, cached_index(Path(name).name, [f"{row['title']} {row['text']}" for row in rows]))


def search(query: str) -> str:
    """Search a small encyclopedia and return the passages that fit best."""
    return shipped().search(query)


def wiki(title: str) -> str:
    """Return the page of the encyclopedia that has this title."""
    return shipped().wiki(title)
