"""Errors that a user can fix, and the exit code each one ends the command with.

Everything else that is raised is a bug and keeps its traceback.
"""

import contextlib
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
    """Generation could not start or continue."""

    exit_code = EXIT_FAILED


class ShortError(EngineError):
    """Generation ended with less than was asked for; what there is, is kept, and the same command resumes."""

    exit_code = EXIT_SHORT


class CollapseError(NanoskyrlError):
    """A run that was to stop where its policy collapses."""

    exit_code = EXIT_FAILED


class SandboxError(NanoskyrlError):
    """No sandbox works here, or the one asked for does not: nothing was learnt about the program."""

    exit_code = EXIT_FAILED


class ProofError(NanoskyrlError):
    """Something that had to be shown equal, or different, was not."""

    exit_code = EXIT_FAILED


class Notice(UserWarning):
    """Something that a user should know and that stops nothing; a command prints it as `note: ...`."""


@contextlib.contextmanager
def told_as(kind: type[NanoskyrlError], message: str, *wrong: type[Exception], hint: str) -> Iterator[None]:
    """Tell what goes wrong inside as an error that a user can fix: the message, and the reason behind a colon.

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


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether memory was missing: the machine's, by Python or torch, or a GPU's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return "Did you mean `x`?" for the closest known word, or None; two letters exchanged are one mistake."""
    from rapidfuzz import process
    from rapidfuzz.distance import OSA, Indel

    words = list(known)
    for scorer in (OSA.normalized_similarity, Indel.normalized_similarity):
        if found := process.extractOne(word, words, scorer=scorer, processor=str.lower, score_cutoff=0.6):
            return f"Did you mean `{found[0]}`?"
    return None
