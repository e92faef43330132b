"""Locks behind a URL, where there are neither POSIX locks nor renames: objects that say who holds what.

Whoever wants a place writes a claim beside it, then lists all claims on it. Stores show at once what was written, so of
two that come together at least one sees the other. Another claim that is alive is a refusal. A claim is alive while its
holder writes it again every few seconds; one that has stood still for `LEASE_SECONDS` of the looker's own clock, or
whose process of this machine is gone, is taken away.
"""

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from nanoskyrl.stages.core.children import is_gone, owner
from nanoskyrl.stages.core.errors import OutputError

BEAT_SECONDS, LEASE_SECONDS = 5.0, 30.0
MARK = ".claim-"


@contextlib.contextmanager
def claimed(directory: Path, held: OutputError) -> Iterator[None]:
    """Hold a place behind a URL.

    Args:
        directory: The place; its claims lie beside it.
        held: What is raised while somebody else holds it.

    Raises:
        OutputError: at the end, if another process took the place over, for this one was not heard of.
    """
    claim = directory.parent / f".{directory.name}{MARK}{secrets.token_hex(8)}"
    ended = threading.Event()
    _write(claim, 0)
    beats = threading.Thread(target=_beat, args=(claim, ended), daemon=True, name="claim")
    beats.start()
    try:
        _refuse_others(directory, claim, held)
        yield
        if not claim.exists():
            raise OutputError(
                f"another process took over `{directory}`: nothing was heard of this one for {LEASE_SECONDS:.0f} s",
                hint="Run the command again; finished parts are kept",
            )
    finally:
        ended.set()
        beats.join()
        claim.unlink(missing_ok=True)


def _beat(claim: Path, ended: threading.Event) -> None:
    count = 0
    while not ended.wait(BEAT_SECONDS):
        count += 1
        with contextlib.suppress(OSError):  # a store that is away for a while; the next beat may arrive
            if claim.exists():  # else it was taken away: two may not hold one place
                _write(claim, count)


def _write(claim: Path, count: int) -> None:
    claim.write_bytes(json.dumps({**owner(), "beat": count}).encode())


def _refuse_others(directory: Path, claim: Path, held: OutputError) -> None:
    """Raise if somebody else is alive; what the dead left is taken away."""
    seen: dict[Path, tuple[bytes, float]] = {}
    while others := [other for other in _claims(directory) if other != claim]:
        for other in others:
            try:
                said = other.read_bytes()
            except FileNotFoundError:  # it has just let go
                continue
            first, since = seen.setdefault(other, (said, time.monotonic()))
            gone = _is_gone(said)
            if gone is False or said != first:
                raise held
            if gone or time.monotonic() - since > LEASE_SECONDS:
                other.unlink(missing_ok=True)
        if any(other.exists() for other in others):
            time.sleep(BEAT_SECONDS / 5)


def _is_gone(said: bytes) -> bool | None:
    """Say whether the process of a claim is gone; None: it is another machine's, of which nobody knows."""
    try:
        holder = json.loads(said)
        return is_gone(holder) or (False if holder["host"] == socket.gethostname() else None)
    except (ValueError, KeyError, TypeError):  # no claim of ours
        return None


def _claims(directory: Path) -> list[Path]:
    return list(directory.parent.glob(f".{directory.name}{MARK}*"))
