"""How a stage begins, resumes after a crash, and ends.

While it runs, `_started.json` holds what it is about to do; a later run with the same settings,
inputs and code keeps the parts already in place and resumes at the next. Under other code an
unfinished output is begun again, and a finished one stays: `OtherCode` tells.
"""

import contextlib
import dataclasses
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from nanoskyrl.stages.core.at_once import Behind, ahead, in_turn
from nanoskyrl.stages.core.code import OtherCode, changed_modules, code_of
from nanoskyrl.stages.core.config import with_later_keys
from nanoskyrl.stages.core.digests import cached_digest, digest_bytes, digest_file
from nanoskyrl.stages.core.errors import ConflictError, OutputError
from nanoskyrl.stages.core.manifest import (
    MANIFEST,
    PART_NAME,
    SCHEMA_1,
    STARTED,
    SUMMARY,
    Head,
    Manifest,
    Part,
    first_difference,
    is_finished,
    read_manifest,
    read_started,
)
from nanoskyrl.stages.core.metrics import Stopwatch
from nanoskyrl.stages.core.registry import package_version
from nanoskyrl.stages.core.safe_text import shortened
from nanoskyrl.stages.core.shards import part_bytes, part_name, read_part
from nanoskyrl.stages.core.storage import (
    TEMPORARY,
    create_whole,
    entries,
    is_local,
    lock_of,
    locked,
    make_directory,
    remove_tree,
    sync_directory,
    write_whole,
)
from nanoskyrl.stages.core.trajectory import SCHEMA_VERSION

CLEARING = "clearing"
"""Stage in `_started.json` while an old output is being deleted: what is still there is worth nothing."""
FOLDERS = ("policy", "state", "_files")
"""What a stage may write beside its parts and its summary."""
FILES = "|".join(re.escape(name) for name in (*SCHEMA_1, *SCHEMA_1.values()))
OURS = re.compile(
    rf"({PART_NAME.pattern}|{FILES})((\.[0-9a-f]{{8}})?\.tmp)?|{'|'.join(FOLDERS)}|files|((policy|state)-\w+|state)\.tmp"
)
"""Every name that a stage gives in its directory, or gave under schema 1; others are never touched."""
PACKAGES = ("torch", "transformers", "tokenizers", "peft", "accelerate", "pyarrow", "numpy")


def _packages() -> dict[str, str]:
    return {name: version for name in PACKAGES if (version := package_version(name))}


Count = Callable[[pa.Table], Mapping[str, int]]
Written = tuple[Part, Mapping[str, int]]
"""What the manifest says of a part, and the rows of it that it counts by reason."""


def commit_part(directory: Path, index: int, table: pa.Table, dropped: Count | None) -> Written:
    """Put a part in place, unless another worker was first, and return what lies there."""
    path, data = directory / part_name(index), part_bytes(table)
    if not create_whole(path, data):
        return _described(path, read_part(path), digest_file(path), dropped)
    return _described(path, table, digest_bytes(data), dropped)


def _described(path: Path, table: pa.Table, digest: str, dropped: Count | None) -> Written:
    return Part(path.name, table.num_rows, digest), dropped(table) if dropped else {}


class Output:
    """A stage's directory while it is written. Made by `open_output`."""

    def __init__(self, directory: Path, head: Head, dropped: Count | None) -> None:
        """Use `open_output`."""
        self.directory = directory
        self.head = head
        self.dropped = dropped
        self._written: dict[str, Written] = {}
        self.manifest: Manifest | None = None
        """Set when the directory is finished."""

    def has_part(self, index: int) -> bool:
        """Say whether a part is in place from an earlier, interrupted run."""
        return (self.directory / part_name(index)).is_file()

    def write_part(self, index: int, table: pa.Table) -> None:
        """Put a part in place."""
        path, data = self.directory / part_name(index), part_bytes(table)
        write_whole(path, data)
        self._written[path.name] = _described(path, table, digest_bytes(data), self.dropped)

    def note(self, written: Written) -> None:
        """Take down a part that a worker has committed."""
        self._written[written[0].name] = written

    def parts(
        self,
        sources: Sequence[Part],
        read: Callable[[Part], pa.Table],
        make: Callable[[int, pa.Table], pa.Table],
        columns: Sequence[str],
        watch: Stopwatch,
    ) -> Iterator[pa.Table]:
        """Yield all parts in their order, once those that are missing are made and on their way into place.

        One part is written while the next is made: that is another processor's work. It is also read ahead where that
        means waiting for a store; files of this machine come faster than three threads take turns at Python's lock.

        Args:
            sources: What the parts are made from, one each.
            read: Reads one of these.
            make: Makes a part from its index and that.
            columns: Of parts that were in place; the others come whole.
            watch: Where the time is noted.
        """

        def stored() -> Iterator[tuple[int, bool, pa.Table]]:
            for index, source in enumerate(sources):
                there, place = self.has_part(index), self.directory / part_name(index)
                yield index, there, read_part(place, columns=columns) if there else read(source)

        with Behind(watch, "write") as writer:
            for index, there, part in (in_turn if is_local(self.directory) else ahead)(stored(), watch, "read"):
                if not there:
                    part = make(index, part)
                    writer(self.write_part, index, part)
                yield part

    def finish(
        self, *, rows_in: int, facts: Mapping[str, Any] | None = None, files: dict[str, str] | None = None
    ) -> Manifest:
        """Close the directory with its manifest.

        Args:
            rows_in: Rows, or trajectories, that were to be worked on.
            facts: What a later stage needs to know.
            files: Digests of files beside the parts that are known, by their names; some may still be on their way.
        """
        parts, counts = [], Counter[str]()
        for path in part_files(self.directory):
            # A part of an interrupted run is read again, so that the manifest is that of an unbroken one.
            part, dropped = self._written.get(path.name) or _described(
                path, read_part(path), digest_file(path), self.dropped
            )
            parts.append(part)
            counts.update(dropped)
        self.manifest = Manifest(
            **dataclasses.asdict(self.head),
            schema_version=SCHEMA_VERSION,
            code=code_of(self.head.stage, self.head.settings),
            packages=_packages(),
            parts=tuple(parts),
            rows_in=rows_in,
            rows_out=sum(part.rows for part in parts),
            dropped=dict(sorted(counts.items())),
            files=folder_digests(self.directory, files),
            facts=dict(facts or {}),
        ).sealed()
        write_whole(self.directory / MANIFEST, self.manifest.to_bytes())
        (self.directory / STARTED).unlink(missing_ok=True)
        sync_directory(self.directory)
        return self.manifest


def tidy(directory: Path) -> None:
    """Take away what a process left that was killed between its manifest and its end; one at work is let be."""
    if is_finished(directory) and (
        (directory / STARTED).exists() or (is_local(directory) and lock_of(directory).exists())
    ):
        with contextlib.suppress(OutputError), locked(directory):
            (directory / STARTED).unlink(missing_ok=True)


def part_files(directory: Path) -> list[Path]:
    """Return the parts that are in place, in order."""
    return sorted(path for path in entries(directory) if PART_NAME.fullmatch(path.name))


def folder_digests(directory: Path, known: dict[str, str] | None = None) -> dict[str, str]:
    """Return the digest of every file that a stage wrote beside its parts, those that are known included."""
    found = {SUMMARY: digest_file(directory / SUMMARY)} if (directory / SUMMARY).is_file() else {}
    folders = [directory / folder for folder in FOLDERS if (directory / folder).is_dir()]
    files = (path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file())
    known, names = known or {}, {path.relative_to(directory).as_posix(): path for path in files}
    # A policy was hashed when it was written.
    found |= {name: cached_digest(path) for name, path in names.items() if name not in known}
    return dict(sorted((found | known).items()))


@contextlib.contextmanager
def open_output(
    directory: Path, head: Head, *, force: bool = False, keep_parts: bool = True, dropped: Count | None = None
) -> Iterator[Output]:
    """Open a stage's output: new, to be resumed, or up to date.

    Args:
        directory: Where the stage writes.
        head: What it is about to do.
        force: Replace what another stage run left there.
        keep_parts: False for a stage that is all or nothing.
        dropped: Counts the rows of a part that were left out, not kept, failed or not judged, by reason.

    Raises:
        ConflictError: finished or begun under another head; names the first difference.
        OutputError: it cannot be written, holds foreign files, or another process is writing it.
    """
    output = Output(directory, head, dropped)
    if is_finished(directory) and not force:
        output.manifest = _finished_already(directory, head)
        tidy(directory)
        yield output
        return
    make_directory(directory)
    with locked(directory):
        if is_finished(directory) and not force:  # another process ended it meanwhile
            output.manifest = _finished_already(directory, head)
        else:
            _begin(directory, head, force=force, keep_parts=keep_parts)
        yield output


def is_current(directory: Path, head: Head) -> bool:
    """Say whether a finished output is what this head would make; one of other code is reported, and stays.

    Raises:
        InputError: its manifest cannot be read.
    """
    try:
        _finished_already(directory, head)
    except ConflictError:
        return False
    return True


def _finished_already(directory: Path, head: Head) -> Manifest:
    manifest = read_manifest(directory)
    _refuse_difference(directory, head, dataclasses.asdict(manifest), "finished")
    _same_code(directory, head, manifest.code, "it stays")
    return manifest


def _begin(directory: Path, head: Head, *, force: bool, keep_parts: bool) -> None:
    """Make the directory ready: keep the parts that can be resumed from, clear the rest, and say what begins."""
    ours, begun = _check_ours(directory), read_started(directory)
    if force or begun.get("stage") == CLEARING:
        _clear(directory)
    elif begun or (directory / STARTED).is_file():
        resumes = keep_parts and part_files(directory)
        if resumes and (directory / STARTED).is_file():  # what schema 1 left is begun again, whatever it was
            _refuse_difference(directory, head, begun, "begun", packages=True)
        if not resumes or not _same_code(directory, head, begun.get("code"), "it is begun again"):
            _clear(directory)
    elif ours:
        raise OutputError(f"`{directory}` holds parts of no stage", hint="Name an empty directory, or use `--force`")
    for path in directory.glob(f"*{TEMPORARY}"):
        _remove(path)
    started = {**dataclasses.asdict(head), "code": code_of(head.stage, head.settings), "packages": _packages()}
    # Of use only to a process that was killed: a power cut that loses it costs a `--force`.
    write_whole(directory / STARTED, json.dumps(started, indent=2, sort_keys=True).encode(), durable=False)


def _refuse_difference(
    directory: Path, head: Head, found: Mapping[str, Any], state: str, *, packages: bool = False
) -> None:
    wanted = dataclasses.asdict(head) | ({"packages": _packages()} if packages else {})
    if found.get("schema_version") == 1:  # which knew a plug-in by the bytes of its file
        wanted["settings"] = wanted["settings"] | {k: v for k, v in found["settings"].items() if k == "plugins"}
    recorded = {key: found.get(key) for key in wanted}
    if isinstance(recorded["settings"], Mapping):
        recorded["settings"] = with_later_keys(recorded["settings"], wanted["settings"])
    difference = first_difference(wanted, recorded)
    if difference:
        name, *both = difference
        now, then = (shortened(json.dumps(value)) for value in both)
        raise ConflictError(
            f"`{directory}` is {state} with another `{name}`: {then}, now {now}",
            hint="Give the settings that it has, name another output, or replace it with `--force`",
        )


def _same_code(directory: Path, head: Head, made_by: Any, does: str) -> bool:
    """Return whether an output was made by the code of now; tell if it was not.

    Raises:
        OtherCode: it was not, and warnings of this kind are errors: see `CodeConfig`.
    """
    changed = changed_modules(code_of(head.stage, head.settings), made_by)
    if changed:
        warnings.warn(OtherCode(directory, changed, does), stacklevel=2)
    return not changed


def _check_ours(directory: Path) -> bool:
    """Return whether the directory holds files that a stage put in place; refuse others."""
    names = [path.name for path in entries(directory)]
    for name in names:
        if not OURS.fullmatch(name):
            raise OutputError(
                f"`{directory}` holds `{name}`, which no stage wrote", hint="Name a directory of its own for the output"
            )
    return any(not name.endswith(TEMPORARY) for name in names)


def _clear(directory: Path) -> None:
    """Empty the directory, in an order that a crash can fall into: it says so until it is done."""
    write_whole(directory / STARTED, json.dumps({"stage": CLEARING}).encode(), durable=False)
    for name in (MANIFEST, SCHEMA_1[MANIFEST]):
        (directory / name).unlink(missing_ok=True)
    for path in entries(directory):
        if path.name != STARTED:
            _remove(path)


def discard(directory: Path) -> None:
    """Delete what a stage left, finished or not.

    Raises:
        OutputError: it holds foreign files, or another process is writing it.
    """
    with locked(directory):
        _check_ours(directory)
        _clear(directory)
        remove_tree(directory)


def _remove(path: Path) -> None:
    if path.is_dir():
        remove_tree(path)
    else:
        path.unlink()
