"""What a process that was killed left under a temporary name, and how the next command may take it away.

Before a process makes a directory that becomes something else when it is whole, it says so in a file beside it: which
directory, and which process of which machine it is. Only what such a file names is removed, and only where that
process, by its number and its start, is gone. A name alone says nothing.
"""

import contextlib
import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from nanoskyrl.stages.core.children import is_gone, owner
from nanoskyrl.stages.core.storage import is_local, make_directory

RECORD = ".owner"
"""Suffix of the file that says whose a directory is."""


@contextlib.contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """Make a hidden directory beside a place, to be renamed to it; what is not is removed.

    Raises:
        OSError: it cannot be made.
    """
    make_directory(target.parent)
    scratch = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    record = scratch.with_name(scratch.name + RECORD)
    # The record comes first, or a kill between the two would leave what nobody may remove.
    record.write_text(json.dumps({"scratch": scratch.name, **owner()}), encoding="utf-8")
    try:
        scratch.mkdir()
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        record.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what processes that are gone left in a folder, and return it."""
    removed: list[Path] = []
    if not is_local(folder):  # nothing is renamed there
        return removed
    for record in sorted(folder.glob(f".*{RECORD}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # no record of ours
            said = json.loads(record.read_bytes())
            scratch = record.with_name(record.name.removesuffix(RECORD))
            if said["scratch"] != scratch.name or scratch.is_symlink() or not is_gone(said):
                continue
            if scratch.is_dir():
                shutil.rmtree(scratch)
                removed.append(scratch)
            record.unlink(missing_ok=True)
    return removed
