"""Whether two short answers in words are the same, where there is no judge: spelling aside, nothing is forgiven."""

import re

from nanoskyrl.envs.graders.answers import same_answer

_DRESS = re.compile(r"\\(?:text|mathrm|mathbf|boxed)\{([^{}]*)\}")
_ARTICLE = re.compile(r"^(?:the|an?)\s+", re.IGNORECASE)


def same_words(found: str, wanted: str) -> bool:
    """Say whether an answer is the wanted one but for spelling, markup and a leading article."""
    return same_answer(_plain(found), _plain(wanted))


def _plain(text: str) -> str:
    text = _DRESS.sub(r"\1", text).strip().strip("*_`\"' ")
    while len(text) > 1 and text[0] == "$" == text[-1]:
        text = text[1:-1].strip()
    return _ARTICLE.sub("", text.rstrip(". "))
