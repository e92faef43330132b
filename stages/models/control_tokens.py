"""Control tokens in other people's words are words: `<|im_end|>` that a user writes ends no turn.

Before a template is rendered, each control token in users' words, tools' results and schemas becomes one private
character; what the template writes itself stays. Afterwards the text is encoded in pieces, and those characters as
the plain text that they stand for.
"""

import re
from collections.abc import Callable
from typing import Any

_FIRST_MARK = 0xF0000
"""Of the private characters; Unicode gives them no meaning."""
_PIPED = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


class ControlTokens:
    """The control tokens of a tokenizer: its special ones, and added ones that look like `<|user|>`."""

    def __init__(self, tokenizer: Any) -> None:
        """Read the tokenizer's added tokens."""
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
        texts = {token.content for token in added.values() if token.special or _PIPED.fullmatch(token.content)}
        texts |= set(tokenizer.all_special_tokens)
        self._texts = sorted((text for text in texts if text.strip()), key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._marks = {text: chr(_FIRST_MARK + place) for place, text in enumerate(self._texts)}
        self._back = {mark: text for text, mark in self._marks.items()}
        last = chr(_FIRST_MARK + max(len(self._texts), 1) - 1)
        self._any_mark = re.compile(f"([{chr(_FIRST_MARK)}-{last}])")

    def mark(self, value: Any) -> Any:
        """Return a value with the control tokens in all of its texts marked, those of keys too."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._marks[found[0]], self._any_mark.sub("", value))
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list | tuple) else value

    def unmark(self, text: str) -> str:
        """Return rendered text as it reads."""
        return self._any_mark.sub(lambda found: self._back[found[0]], text)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of rendered text, what is marked in it as plain text where the tokenizer can."""
        pieces = self._any_mark.split(text)
        ids = self._ids(pieces[0])
        for place, piece in enumerate(pieces[1:], 1):
            if place % 2:
                ids += _inside(self._plain_ids, self._back[piece])
            elif piece:
                ids += _inside(self._ids, piece)
        return ids

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _plain_ids(self, text: str) -> list[int]:
        """Encode text past the tokens that were added to the vocabulary."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        words = backend.normalizer.normalize_str(text) if backend.normalizer is not None else text
        split = backend.pre_tokenizer.pre_tokenize_str(words) if backend.pre_tokenizer is not None else [(words,)]
        return [token.id for part in split for token in backend.model.tokenize(part[0])]


def _inside(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Return the tokens of text that does not begin a sequence, where SentencePiece would put a space before it."""
    for before in ("\n", "|", "a"):  # what does not join with the text's beginning
        first, ids = encode(before), encode(before + text)
        if ids[: len(first)] == first:
            return ids[len(first) :]
    return encode(text)
