"""Errors that a user can mend, and the exit code each one ends the command with.

Everything else that is raised is a bug and keeps its traceback.
"""

import contextlib
import difflib
import math
import operator
from collections.abc import Iterable, Iterator

from nanoskyrl.stages.core.safe_text import struck

EXIT_OK = 0
EXIT_FAILED = 1
"""Could not write, the engine failed, or a proof did not hold; for `verify` and `diff`, a difference."""
EXIT_USAGE = 2
"""Usage, settings, or input that is missing, unfinished, unscored, corrupt or from a newer schema."""
EXIT_SHORT = 3
"""Done, but with less than was asked for."""
EXIT_INTERRUPTED = 130


class NanoskyrlError(Exception):
    """One line that says what is wrong and where, and one that says what to do."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(struck(message))
        self.hint = None if hint is None else struck(hint)


class SettingsError(NanoskyrlError):
    """A flag, a key or a value that cannot be used."""


class InputError(NanoskyrlError):
    """An input that is missing, unfinished, of the wrong stage, corrupt or too new."""


class OutputError(NanoskyrlError):
    """An output that exists with other contents, is being written, or cannot be written."""

    exit_code = EXIT_FAILED


class ConflictError(OutputError):
    """The output is finished, or begun, under other settings, inputs or code."""

    exit_code = EXIT_USAGE


class EngineError(NanoskyrlError):
    """Generation could not start or go on."""

    exit_code = EXIT_FAILED


class ShortError(EngineError):
    """Generation ended with less than was asked for; what there is, is kept, and the same command goes on."""

    exit_code = EXIT_SHORT


class SandboxError(NanoskyrlError):
    """No sandbox works here, or the one asked for does not: nothing was learnt about the program."""

    exit_code = EXIT_FAILED


class ProofError(NanoskyrlError):
    """Something that had to be shown equal, or different, was not."""

    exit_code = EXIT_FAILED


class Notice(UserWarning):
    """Something that a user should know and that stops nothing; a command prints it as `note: ...`."""


def check_words(table: str, settings: object, **allowed: Iterable[object]) -> None:
    """Refuse settings that are none of the words allowed; each word of a tuple counts.

    Args:
        table: The table that they stand in, for the message.
        settings: A settings dataclass.
        allowed: The words, by the setting's name.

    Raises:
        SettingsError: names the first that is another word.
    """
    for name, words in allowed.items():
        given, words = getattr(settings, name), list(words)
        for value in given if isinstance(given, tuple) else (given,):
            if value not in words:
                raise SettingsError(
                    f"`{table}.{name}` must be {', '.join(map(str, words))}, not {value!r}", hint="Choose one of them"
                )


def check_numbers(
    table: str,
    settings: object,
    *names: str,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    hint: str = "Give a number within these bounds",
) -> None:
    """Refuse settings that lie outside a range; None is no number, and each number of a tuple counts.

    Args:
        table: The table that they stand in, for the message.
        settings: A settings dataclass.
        names: The settings that share the range.
        least: The smallest number allowed.
        above: What all numbers must be above.
        most: The largest number allowed.
        below: What all numbers must be below; infinity asks for a finite number.
        hint: What is usual, or what a special number means.

    Raises:
        SettingsError: names the first outside the range, or that is not a number (NaN).
    """
    limits = [
        ("finite" if limit == math.inf else f"{words} {limit}", holds, limit)
        for words, holds, limit in (
            ("at least", operator.ge, least),
            ("above", operator.gt, above),
            ("at most", operator.le, most),
            ("below", operator.lt, below),
        )
        if limit is not None
    ]
    for name in names:
        value = getattr(settings, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not all(holds(number, limit) for _, holds, limit in limits):
                wanted = " and ".join(words for words, _, _ in limits)
                raise SettingsError(f"`{table}.{name}` must be {wanted}, not {number}", hint=hint)


@contextlib.contextmanager
def told_as(kind: type[NanoskyrlError], message: str, *wrong: type[Exception], hint: str) -> Iterator[None]:
    """Tell what goes wrong inside as an error that a user can mend: the message, and the reason behind a colon.

    Args:
        kind: The error to raise.
        message: What could not be done.
        wrong: Exceptions that stand for it; others are left as they are.
        hint: What to do.
    """
    try:
        yield
    except wrong as error:
        raise kind(f"{message}: {error}", hint=hint) from error


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return "Did you mean `x`?" for the closest known word, or None."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean `{close[0]}`?" if close else None
