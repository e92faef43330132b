"""What closes a stage's directory, and how a stage begins, goes on after a crash, and ends.

`manifest.json` comes last: a directory without one is unfinished and readers refuse it.
It holds no clock and no host, so equal work gives equal bytes. While a stage runs,
`started.json` holds what it is about to do; a later run with the same settings, inputs
and code keeps the parts already in place and goes on at the next.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from nanoskyrl.stages.core.digests import canonical_json, digest_bytes, digest_file, digest_json
from nanoskyrl.stages.core.errors import ConflictError, InputError, OutputError
from nanoskyrl.stages.core.shards import part_name, read_part, write_part
from nanoskyrl.stages.core.storage import TEMPORARY, is_local, make_directory, remove_tree, sync_directory, write_whole
from nanoskyrl.stages.core.trajectory import SCHEMA_VERSION

MANIFEST, STARTED = "manifest.json", "started.json"
CLEARING = "clearing"
"""In `started.json` while an old output is being deleted: what is still there is worth nothing."""
TABLES = ("rollout", "score", "advantage", "train", "sync", "eval")
"""Settings of stages in a manifest, which later stages look into."""
STAYS_LOCAL = "text_stays_local"
"""Fact of a directory whose text must not leave the machine, with the reason."""
FOLDERS, SUMMARY = ("policy", "state", "files"), "summary.json"
"""What a stage may write beside its parts."""
PART_NAME = re.compile(r"part-[0-9]{5}\.parquet")
OURS = re.compile(
    rf"({PART_NAME.pattern}|manifest\.json|started\.json|summary\.json)(\.tmp)?|policy|state|files|policy-\w+\.tmp"
)
"""Every name that a stage gives in its directory; others are never touched."""
SOURCES = Path(__file__).parents[2]
"""Folder of the package's folders, in a checkout as where it is installed."""
PACKAGES = ("torch", "transformers", "tokenizers", "peft", "accelerate", "pyarrow", "numpy")


@dataclass(frozen=True, slots=True)
class Part:
    """One shard of a directory."""

    name: str
    rows: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What is known of a stage's work before it begins; equal heads give equal outputs."""

    stage: str
    settings: dict[str, Any]
    """Only those that can change the rows: no paths, run names, devices or logging."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Digest of each input's manifest, by name."""
    policy: str | None = None
    """Digest of the policy that generated, or that training started from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a finished directory says of itself."""

    stage: str
    schema_version: int
    settings: dict[str, Any]
    inputs: dict[str, str]
    policy: str | None
    code: dict[str, str]
    packages: dict[str, str]
    parts: tuple[Part, ...]
    rows_in: int
    rows_out: int
    dropped: dict[str, int]
    """Rows left out, not kept, failed or not judged, by reason."""
    files: dict[str, str] = field(default_factory=dict)
    """Digests of everything that is not a part, such as `policy/model.safetensors`."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else the stage found out and a later one needs, such as a policy's digest."""

    @property
    def digest(self) -> str:
        """The digest of the manifest's bytes: what children record of their parents."""
        return digest_bytes(self.to_bytes())

    @property
    def fell_short(self) -> int:
        """Rows that should have come to something and did not: failed attempts, and verdicts that could not be had."""
        return 0 if self.stage == "advantage" else sum(n for reason, n in self.dropped.items() if reason != "skipped")

    def to_bytes(self) -> bytes:
        """Return the file's contents."""
        return (json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


@functools.cache
def code_version() -> dict[str, str]:
    """Return the package's version and a digest of its sources."""
    sources = {
        path.relative_to(SOURCES).as_posix(): digest_file(path)
        for folder in ("algos", "envs", "eval", "stages")
        for path in sorted((SOURCES / folder).rglob("*.py"))
    }
    return {"version": package_version("nanoskyrl") or "unknown", "digest": digest_json(sources)}


@functools.cache
def package_version(name: str) -> str | None:
    """Return an installed package's version, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> dict[str, str]:
    return {name: version for name in PACKAGES if (version := package_version(name))}


def read_manifest(directory: Path, *, stage: str | Sequence[str] | None = None) -> Manifest:
    """Return the manifest of a finished directory.

    Args:
        directory: Where a stage wrote.
        stage: The stage, or stages, that must have written it.

    Raises:
        InputError: nothing there, unfinished, not JSON, a newer schema, or another stage's.
    """
    if not directory.is_dir():
        wanted = f" from `skyrl {stage}`" if isinstance(stage, str) else ""
        raise InputError(f"there is no directory `{directory}`", hint=f"Name a directory of shards{wanted}")
    try:
        value = json.loads((directory / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        if (directory / STARTED).exists():
            found = _read_started(directory).get("stage", "stage")
            raise InputError(
                f"`{directory}` is unfinished: `{found}` did not end", hint=f"Run `skyrl {found}` again to go on"
            ) from error
        raise InputError(f"`{directory}` has no manifest.json", hint="Name a directory that a stage wrote") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"`{directory / MANIFEST}` is not JSON: {error}", hint="Run the stage again, with `--force`"
        ) from error
    except OSError as error:
        raise InputError(
            f"`{directory / MANIFEST}` cannot be read: {error.strerror or error}",
            hint="Run the stage again, with `--force`",
        ) from error
    version = value.get("schema_version") if isinstance(value, dict) else None
    if not isinstance(version, int) or version < 1:
        raise InputError(
            f"`{directory / MANIFEST}` lacks what a manifest holds: its schema version",
            hint="Run the stage again, with `--force`",
        )
    if version > SCHEMA_VERSION:
        raise InputError(
            f"`{directory}` has schema version {version}; this nanoskyrl reads up to {SCHEMA_VERSION}",
            hint="Install a newer nanoskyrl",
        )
    import msgspec

    try:
        manifest = msgspec.convert(value, Manifest)
        manifest.to_bytes()  # half a surrogate pair is JSON, but nothing that can be written again or digested
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InputError(
            f"`{directory / MANIFEST}` lacks what a manifest holds: {error}", hint="Run the stage again, with `--force`"
        ) from error
    if none := [name for name in TABLES if not isinstance(manifest.settings.get(name, {}), dict)]:
        raise InputError(
            f"`{directory / MANIFEST}` lacks what a manifest holds: `settings.{none[0]}` is no table",
            hint="Run the stage again, with `--force`",
        )
    names = [part.name for part in manifest.parts]
    if len(set(names)) != len(names) or not all(map(PART_NAME.fullmatch, names)):
        raise InputError(
            f"`{directory / MANIFEST}` lists its parts wrongly", hint="Run the stage again, with `--force`"
        )
    wanted = (stage,) if isinstance(stage, str) else stage
    if wanted and manifest.stage not in wanted:
        raise InputError(
            f"`{directory}` was written by `{manifest.stage}`, not by `{wanted[0]}`",
            hint=f"Run `skyrl {wanted[0]}` first, and name its output",
        )
    return manifest


def check_may_leave(manifest: Manifest, directory: Path) -> None:
    """Raise unless the text of a directory may be exported or shown to others.

    Raises:
        InputError: it came from a benchmark whose terms forbid it.
    """
    refuse_to_leave(manifest.facts.get(STAYS_LOCAL), directory)


def refuse_to_leave(reason: str | None, directory: Path) -> None:
    """Raise where there is a reason that the text of a directory must stay.

    Raises:
        InputError: gives the reason.
    """
    if reason:
        raise InputError(
            f"the text of `{directory}` stays on this machine: {reason}", hint="Its summary.json holds the numbers"
        )


def is_finished(directory: Path) -> bool:
    """Say whether a stage ended in this directory."""
    return (directory / MANIFEST).is_file()


def _read_started(directory: Path) -> dict[str, Any]:
    try:
        value = json.loads((directory / STARTED).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def first_difference(ours: Any, theirs: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the dotted name and both values of the first place where two JSON values differ, or None."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*ours, *theirs}):
            if found := first_difference(ours.get(key), theirs.get(key), f"{name}.{key}" if name else str(key)):
                return found
        return None
    # JSON knows lists, not tuples.
    return None if canonical_json(ours) == canonical_json(theirs) else (name, ours, theirs)


Count = Callable[[pa.Table], Mapping[str, int]]


class Output:
    """A stage's directory while it is written. Made by `open_output`."""

    def __init__(self, directory: Path, head: Head, dropped: Count | None) -> None:
        """Use `open_output`."""
        self.directory = directory
        self.head = head
        self._dropped = dropped
        self._written: dict[str, tuple[Part, Mapping[str, int]]] = {}
        self.manifest: Manifest | None = None
        """Set when the directory is finished."""

    @property
    def up_to_date(self) -> bool:
        """Whether there is nothing to do."""
        return self.manifest is not None

    def has_part(self, index: int) -> bool:
        """Say whether a part is in place from an earlier, interrupted run."""
        return (self.directory / part_name(index)).is_file()

    def write_part(self, index: int, table: pa.Table) -> None:
        """Put a part in place."""
        path = self.directory / part_name(index)
        write_part(path, table)
        self._written[path.name] = self._describe(path, table)

    def _describe(self, path: Path, table: pa.Table) -> tuple[Part, Mapping[str, int]]:
        """Return what the manifest says of a part."""
        return Part(path.name, table.num_rows, digest_file(path)), self._dropped(table) if self._dropped else {}

    def finish(self, *, rows_in: int, facts: Mapping[str, Any] | None = None) -> Manifest:
        """Close the directory with its manifest.

        Args:
            rows_in: Rows, or trajectories, that were to be worked on.
            facts: What a later stage needs to know.
        """
        parts, counts = [], {}
        for path in part_files(self.directory):
            # A part of an interrupted run is read again, so that the manifest is that of an unbroken one.
            part, dropped = self._written.get(path.name) or self._describe(path, read_part(path))
            parts.append(part)
            for reason, count in dropped.items():
                counts[reason] = counts.get(reason, 0) + count
        self.manifest = Manifest(
            **dataclasses.asdict(self.head),
            schema_version=SCHEMA_VERSION,
            code=code_version(),
            packages=_packages(),
            parts=tuple(parts),
            rows_in=rows_in,
            rows_out=sum(part.rows for part in parts),
            dropped=dict(sorted(counts.items())),
            files=folder_digests(self.directory),
            facts=dict(facts or {}),
        )
        write_whole(self.directory / MANIFEST, self.manifest.to_bytes())
        (self.directory / STARTED).unlink(missing_ok=True)
        sync_directory(self.directory)
        return self.manifest


def part_files(directory: Path) -> list[Path]:
    """Return the parts that are in place, in order."""
    return sorted(path for path in directory.iterdir() if PART_NAME.fullmatch(path.name))


def is_begun(directory: Path) -> bool:
    """Say whether a stage has begun or ended its work there."""
    return (directory / STARTED).is_file() or is_finished(directory)


def folder_digests(directory: Path) -> dict[str, str]:
    """Return the digest of every file that a stage wrote beside its parts."""
    found = {SUMMARY: digest_file(directory / SUMMARY)} if (directory / SUMMARY).is_file() else {}
    for folder in FOLDERS:
        if (directory / folder).is_dir():
            for path in sorted(path for path in (directory / folder).rglob("*") if path.is_file()):
                found[path.relative_to(directory).as_posix()] = digest_file(path)
    return found


@contextlib.contextmanager
def open_output(
    directory: Path, head: Head, *, force: bool = False, keep_parts: bool = True, dropped: Count | None = None
) -> Iterator[Output]:
    """Open a stage's output: new, to be gone on with, or up to date.

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
        yield output
        return
    make_directory(directory)
    with locked(directory):
        if is_finished(directory) and not force:  # another process ended it meanwhile
            output.manifest = _finished_already(directory, head)
            yield output
            return
        _begin(directory, head, force=force, keep_parts=keep_parts)
        yield output


def _finished_already(directory: Path, head: Head) -> Manifest:
    manifest = read_manifest(directory)
    _refuse_difference(directory, head, dataclasses.asdict(manifest), "finished")
    (directory / STARTED).unlink(missing_ok=True)  # left by one that was killed after its manifest
    return manifest


def _begin(directory: Path, head: Head, *, force: bool, keep_parts: bool) -> None:
    """Make the directory ready: keep the parts that can be gone on with, clear the rest, and say what begins."""
    ours, begun = _check_ours(directory), _read_started(directory)
    if force or begun.get("stage") == CLEARING:
        _clear(directory)
    elif (directory / STARTED).is_file():
        if keep_parts and part_files(directory):
            _refuse_difference(directory, head, begun, "begun", packages=True)
        else:  # nothing in it is worth keeping, whatever it was begun with
            _clear(directory)
    elif ours:
        raise OutputError(f"`{directory}` holds parts of no stage", hint="Name an empty directory, or use `--force`")
    for path in directory.glob(f"*{TEMPORARY}"):
        _remove(path)
    started = {**dataclasses.asdict(head), "code": code_version(), "packages": _packages()}
    # Of use only to a process that was killed: a power cut that loses it costs a `--force`.
    write_whole(directory / STARTED, json.dumps(started, indent=2, sort_keys=True).encode(), durable=False)


def _refuse_difference(
    directory: Path, head: Head, found: Mapping[str, Any], state: str, *, packages: bool = False
) -> None:
    wanted = {**dataclasses.asdict(head), "code": code_version()} | ({"packages": _packages()} if packages else {})
    difference = first_difference(wanted, {key: found.get(key) for key in wanted})
    if difference:
        name, now, then = difference
        raise ConflictError(
            f"`{directory}` is {state} with another `{name}`: {_short(then)}, now {_short(now)}",
            hint="Give the settings that it has, name another output, or replace it with `--force`",
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_ours(directory: Path) -> bool:
    """Return whether the directory holds files that a stage put in place; refuse others."""
    names = [path.name for path in directory.iterdir()]
    for name in names:
        if not OURS.fullmatch(name):
            raise OutputError(
                f"`{directory}` holds `{name}`, which no stage wrote", hint="Name a directory of its own for the output"
            )
    return any(not name.endswith(TEMPORARY) for name in names)


def _clear(directory: Path) -> None:
    """Empty the directory, in an order that a crash can fall into: it says so until it is done."""
    write_whole(directory / STARTED, json.dumps({"stage": CLEARING}).encode(), durable=False)
    (directory / MANIFEST).unlink(missing_ok=True)
    for path in directory.iterdir():
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


@contextlib.contextmanager
def locked(directory: Path, held: OutputError | None = None) -> Iterator[None]:
    """Keep other processes from writing here; a killed one lets go by itself.

    Args:
        directory: Or a file, for which one process at a time may answer.
        held: What is raised while another process does; None: that it writes the directory.
    """
    if not is_local(directory):
        yield
        return
    import filelock

    # Kept out of the directory, whose files are all accounted for.
    place = f"nanoskyrl-{os.getuid()}-{digest_bytes(str(directory.resolve()).encode())[:16]}.lock"
    lock = filelock.FileLock(str(Path(tempfile.gettempdir()) / place))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise held or OutputError(
            f"another process is writing `{directory}`", hint="Wait for it, or name another output"
        ) from error
    try:
        yield
    finally:
        lock.release()
