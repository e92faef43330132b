"""What a proof found: what holds, what is broken, and what is only recorded and cannot be followed."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.digests import digest_file

SHOWN = 4
"""Names of what is only recorded that are written out; the rest are counted."""


@dataclass(slots=True)
class Findings:
    """What was looked at and what was found wrong."""

    proved: Counter[str] = field(default_factory=Counter)
    """Checks that hold, by what they are about."""
    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What changed in the run, and texts that tokens do not give: no fault."""
    recorded: list[str] = field(default_factory=list)
    """What manifests say and nothing here proves, such as the digest of a data set."""
    pruned: list[str] = field(default_factory=list)
    """Optimizer states that were deleted to save space: no fault."""
    unfinished: list[str] = field(default_factory=list)
    other_code: list[str] = field(default_factory=list)
    """Outputs that were made by other code than there is now: no fault, but no proof that it would make them again."""
    made_again: list[str] = field(default_factory=list)
    """Outputs that were made again and are equal, with what they were made from."""
    left: list[str] = field(default_factory=list)
    """Outputs that were to be made again and could not be: no fault, but no proof."""
    made_by: Counter[str] = field(default_factory=Counter)
    """Outputs by the version of the package and of the libraries that made them."""
    digests: dict[tuple[int, ...], str] = field(default_factory=dict)
    """Of files that were read; a policy that is published shares its files with the train that made it."""

    @property
    def checked(self) -> int:
        """Files, rows and references that were looked at."""
        return self.proved.total() + len(self.broken)

    @property
    def holds(self) -> bool:
        """Whether nothing is broken."""
        return not self.broken

    def expect(self, about: str, holds: bool, otherwise: str) -> bool:
        """Count a check by what it is about, note what is broken otherwise, and return whether it holds."""
        if holds:
            self.proved[about] += 1
        else:
            self.broken.append(otherwise)
        return holds

    def digest(self, path: Path) -> str:
        """Return the digest of a file; one that has several names is read once."""
        found = path.stat()
        key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if not found.st_ino:  # an object store has no such numbers
            return digest_file(path)
        if key not in self.digests:
            self.digests[key] = digest_file(path)
        return self.digests[key]

    def lines(self) -> Iterator[str]:
        """Yield the findings as text."""
        for what, lines in (("broken", self.broken), ("unfinished", self.unfinished), ("note", self.notes)):
            yield from (f"{what}: {line}" for line in lines)
        if self.other_code:
            more = f", and {len(self.other_code) - 1} more outputs" * (len(self.other_code) > 1)
            yield f"note: made by other code: {self.other_code[0]}{more}"
        yield from (f"made by: {who} ({count} outputs)" for who, count in self.made_by.most_common())
        if self.proved:
            yield f"proved: {', '.join(f'{count} {about}' for about, count in sorted(self.proved.items()))}"
        yield from (f"made again, and equal: {line}" for line in self.made_again)
        yield from (f"not made again: {line}" for line in self.left)
        if self.recorded:
            shown, rest = self.recorded[:SHOWN], len(self.recorded) - SHOWN
            yield f"only recorded: {'; '.join(shown)}{f'; and {rest} more' if rest > 0 else ''}"
        pruned = f", {len(self.pruned)} pruned" if self.pruned else ""
        yield f"{self.checked} checks, {len(self.broken)} broken{pruned}"

    def to_plain(self) -> dict[str, Any]:
        """Return the findings as JSON-ready values."""
        lists = ("broken", "notes", "recorded", "pruned", "unfinished", "other_code", "made_again", "left")
        return {
            "holds": self.holds,
            "checked": self.checked,
            "proved": dict(self.proved),
            "made_by": dict(self.made_by),
            **{name: getattr(self, name) for name in lists},
        }
