"""What processes that train together leave of their errors, for the one that started them to tell once.

All of them meet most errors at the same time, and the end of one ends the others in errors
of their own, which say nothing of the cause.
"""

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from nanoskyrl.stages.core.errors import EngineError, NanoskyrlError
from nanoskyrl.stages.core.storage import write_whole

PLACE = "NANOSKYRL_ERRORS"
"""In the environment of each process: the directory where errors are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """How one process ended."""

    rank: int
    message: str
    hint: str | None
    exit_code: int
    is_bug: bool
    """Whether the message is a traceback."""


def is_watched() -> bool:
    """Say whether another process tells this one's errors."""
    return PLACE in os.environ


def leave(message: str, hint: str | None, exit_code: int, *, is_bug: bool = False) -> None:
    """Leave an error where `read_error` finds it."""
    rank = int(os.environ.get("RANK", "0"))
    error = RankError(rank=rank, message=message, hint=hint, exit_code=exit_code, is_bug=is_bug)
    write_whole(Path(os.environ[PLACE]) / f"{rank:05d}.json", json.dumps(asdict(error)).encode(), durable=False)


def read_error(place: Path, exit_codes: dict[int, int], processes: int) -> NanoskyrlError:
    """Return the one error to tell.

    That of the lowest rank which gave a reason; else the process that a signal ended; else
    the first traceback.

    Args:
        place: The directory where errors were left.
        exit_codes: Of the processes that failed, by rank; -9 for one killed by signal 9.
        processes: How many there were.
    """
    left = {file: RankError(**json.loads(file.read_bytes())) for file in sorted(place.glob("*.json"))}
    if reason := next((error for error in left.values() if not error.is_bug), None):
        found = NanoskyrlError(reason.message, hint=reason.hint)
        found.exit_code = reason.exit_code
        return found
    # Those that are left over when one has failed are ended by signal 15.
    rank, code = min(exit_codes.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[1] > 0, item[0]))
    if left and (code > 0 or code == -signal.SIGTERM):
        first = left[min(left, key=lambda file: file.stat().st_mtime_ns)]
        return EngineError(f"process {first.rank} of {processes} failed:\n{first.message.rstrip()}", hint=first.hint)
    if code > 0:
        found = EngineError(
            f"process {rank} of {processes} ended with exit code {code}", hint="What it printed above may say why"
        )
        found.exit_code = code
        return found
    memory = "It often comes for want of memory: use fewer processes or smaller micro-batches. "
    return EngineError(
        f"process {rank} of {processes} was killed by signal {-code}",
        hint=f"{memory if code == -signal.SIGKILL else ''}The same command starts again",
    )
