"""What closes a stage's directory: a manifest of what was made, of what, under which settings and by which code.

`_manifest.json` comes last: a directory without one is unfinished and readers refuse it. It
holds no clock and no host, so equal work gives equal bytes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.digests import canonical_json, digest_bytes
from nanoskyrl.stages.core.errors import InputError, told_as
from nanoskyrl.stages.core.pipeline import OURS
from nanoskyrl.stages.core.storage import file_bytes
from nanoskyrl.stages.core.trajectory import SCHEMA_VERSION

MANIFEST, STARTED, SUMMARY = "_manifest.json", "_started.json", "_summary.json"
"""Of a directory. Readers of data sets skip names that begin with `_`, so they take the parts alone."""
SCHEMA_1 = {name: name.removeprefix("_") for name in (MANIFEST, STARTED, SUMMARY)}
"""Names of these files in directories of schema 1, which are read, and written no more."""
PASSES_ON = "table"
"""Fact of what a stage of somebody's own wrote: the stage of ours whose tables it passed on."""
STAYS_LOCAL = "text_stays_local"
"""Fact of a directory whose text must not leave the machine, with the reason."""
PART_NAME = re.compile(r"part-[0-9]{5}\.parquet")
NUMBERS = "numbers"
"""Fact of a rollout's or a score's manifest: its summary, so that nobody reads all parts for it again."""


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
    code: dict[str, Any]
    """Version, digest and modules, as `code_of` describes them; schema 1 has no modules."""
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
    seal: str | None = None
    """Digest of all the rest, by which `verify` finds a changed manifest that no child names; None: made before."""

    def sealed(self) -> "Manifest":
        """Return the same with its seal."""
        bare = replace(self, seal=None)
        return replace(self, seal=digest_bytes(bare.to_bytes()))

    @property
    def digest(self) -> str:
        """The digest of the manifest's bytes: what children record of their parents."""
        return digest_bytes(self.to_bytes())

    @property
    def fell_short(self) -> int:
        """Rows that should have come to something and did not: failed attempts, and verdicts that could not be had."""
        meant = self.stage == "advantage" or PASSES_ON in self.facts
        return 0 if meant else sum(n for reason, n in self.dropped.items() if reason != "skipped")

    def to_bytes(self) -> bytes:
        """Return the file's contents."""
        # Not `asdict` of all: it copies settings and facts to their last number, and took longer than the text of them.
        value = {f.name: getattr(self, f.name) for f in fields(self)} | {"parts": [asdict(part) for part in self.parts]}
        return json_lines({name: of for name, of in value.items() if of is not None or name != "seal"})


def json_lines(value: Any) -> bytes:
    """Return JSON as our files hold it: keys sorted, one a line, so that equal values give equal bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def located(directory: Path, name: str) -> Path:
    """Return where a directory's manifest, start or summary lies; schema 1 named them without the underscore."""
    old = directory / SCHEMA_1[name]
    return directory / name if (directory / name).is_file() or not old.is_file() else old


def read_manifest(directory: Path, *, stage: str | Sequence[str] | None = None) -> Manifest:
    """Return the manifest of a finished directory.

    Args:
        directory: Where a stage wrote.
        stage: The stage, or stages, that must have written it, or whose tables somebody's own passed on.

    Raises:
        InputError: nothing there, unfinished, not JSON, a newer schema, or another stage's.
    """
    if not directory.is_dir():
        wanted = f" from `skyrl {stage}`" if isinstance(stage, str) else ""
        raise InputError(f"there is no directory `{directory}`", hint=f"Name a directory of shards{wanted}")
    place = located(directory, MANIFEST)
    try:
        value = json.loads(file_bytes(place))
    except FileNotFoundError as error:
        if located(directory, STARTED).exists():
            found = read_started(directory).get("stage", "stage")
            raise InputError(
                f"`{directory}` is unfinished: `{found}` did not end", hint=f"Run `skyrl {found}` again to resume"
            ) from error
        raise InputError(f"`{directory}` has no {MANIFEST}", hint="Name a directory that a stage wrote") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"`{place}` is not JSON: {error}", hint="Run the stage again, with `--force`") from error
    except OSError as error:
        raise InputError(
            f"`{place}` cannot be read: {error.strerror or error}",
            hint="Run the stage again, with `--force`",
        ) from error
    version = value.get("schema_version") if isinstance(value, dict) else None
    if not isinstance(version, int) or version < 1:
        raise InputError(
            f"`{place}` lacks what a manifest holds: its schema version",
            hint="Run the stage again, with `--force`",
        )
    if version > SCHEMA_VERSION:
        raise InputError(
            f"`{directory}` has schema version {version}; this nanoskyrl reads up to {SCHEMA_VERSION}",
            hint="Install a newer nanoskyrl",
        )
    import msgspec

    with told_as(
        InputError,
        f"`{place}` lacks what a manifest holds",
        msgspec.ValidationError,
        UnicodeEncodeError,
        hint="Run the stage again, with `--force`",
    ):
        manifest = msgspec.convert(value, Manifest)
        manifest.to_bytes()  # half a surrogate pair is JSON, but nothing that can be written again or digested
    if none := [name for name in OURS if not isinstance(manifest.settings.get(name, {}), dict)]:
        raise InputError(
            f"`{place}` lacks what a manifest holds: `settings.{none[0]}` is no table",
            hint="Run the stage again, with `--force`",
        )
    names = [part.name for part in manifest.parts]
    if len(set(names)) != len(names) or not all(map(PART_NAME.fullmatch, names)):
        raise InputError(f"`{place}` lists its parts wrongly", hint="Run the stage again, with `--force`")
    wanted = (stage,) if isinstance(stage, str) else stage
    if wanted and not {manifest.stage, manifest.facts.get(PASSES_ON)} & {*wanted}:
        raise InputError(
            f"`{directory}` was written by `{manifest.stage}`, not by `{wanted[0]}`",
            hint=f"Run `skyrl {wanted[0]}` first, and name its output",
        )
    return manifest


def refuse_to_leave(reason: str | None, directory: Path) -> None:
    """Raise where there is a reason that the text of a directory must not be exported or shown to others.

    Args:
        reason: What a benchmark's terms say, as the fact STAYS_LOCAL of a manifest keeps it.
        directory: Whose text it is.

    Raises:
        InputError: gives the reason.
    """
    if reason:
        raise InputError(
            f"the text of `{directory}` stays on this machine: {reason}", hint="Its summary.json holds the numbers"
        )


def is_finished(directory: Path) -> bool:
    """Say whether a stage ended in this directory."""
    return located(directory, MANIFEST).is_file()


def is_begun(directory: Path) -> bool:
    """Say whether a stage has begun or ended its work there."""
    return located(directory, STARTED).is_file() or is_finished(directory)


def read_started(directory: Path) -> dict[str, Any]:
    """Return what a stage that has not finished said before it began; {} if nothing can be read."""
    try:
        value = json.loads(located(directory, STARTED).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def first_difference(ours: Any, theirs: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the dotted name and both values of the first place where two JSON values differ, or None."""
    return next(differences(ours, theirs, name), None)


def differences(ours: Any, theirs: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name and both values of every place where two JSON values differ."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*ours, *theirs}):
            yield from differences(ours.get(key), theirs.get(key), f"{name}.{key}" if name else str(key))
    # JSON knows lists, not tuples.
    elif canonical_json(ours) != canonical_json(theirs):
        yield name, ours, theirs
