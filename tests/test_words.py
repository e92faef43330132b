"""Pages, docstrings, comments and messages use the words of the field, which search finds."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import ROOT

FOLDERS = ("stages", "envs", "algos", "eval", "nanoskyrl_cli", "benchmarks", "examples", "docs", "tests")
INSTEAD = {
    r"foret(?:ell|old)\w*": "predict",
    r"mend(?:s|ed|ing)?": "fix",
    r"go(?:es|ing|ne)? on|went on": "resume, continue",
    r"cannot be meant": "invalid",
    r"alike": "equal, the same",
    r"(?:is|are|was|be|been|being|were|not) told|told (?:apart|once|as|in|with|to|of|what|that|it)": "logged, reported",
    r"st(?:and|ands|ood) in": "stored in, is in",
    r"without a word": "silently",
    r"speaks? of": "refers to, uses",
    r"usual number": "a hint that says what to do, or none",
}
"""What search does not find, and what is written instead."""
WORDS = re.compile(rf"\b(?:{'|'.join(INSTEAD)})\b", re.IGNORECASE)
ALLOWED = {
    "tests/test_words.py": "the list",
    "tests/stages/test_rendering.py": "a message of a conversation",
}


def pages() -> Iterator[Path]:
    """Return every page and module of ours."""
    yield from ROOT.glob("*.md")
    for folder in FOLDERS:
        yield from (path for kind in ("*.md", "*.py") for path in (ROOT / folder).rglob(kind))


def prose(path: Path) -> str:
    """Return a page, or what a module says in strings and comments; lines that were broken are joined."""
    text = path.read_text()
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        text = " ".join(one.string for one in tokens if one.type in (tokenize.STRING, tokenize.COMMENT))
    return re.sub(r"\s+(?:#\s+)?", " ", text)


def test_no_word_of_a_dialect():
    found = {
        str(path.relative_to(ROOT)): words
        for path in pages()
        if (words := WORDS.findall(prose(path))) and str(path.relative_to(ROOT)) not in ALLOWED
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    ["what the model foretells", "Mend the line", "the loop went on", "settings stand in run.toml", "it is told once"],
)
def test_the_list_finds_what_it_is_for(text):
    assert WORDS.search(text)


@pytest.mark.parametrize("text", ["a recommended value", "an outstanding index", "good on tests", "retold", "Alikely"])
def test_the_list_leaves_other_words(text):
    assert not WORDS.search(text)
