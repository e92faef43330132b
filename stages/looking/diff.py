"""What differs between two runs, steps, outputs of stages or policies: settings, code, rows, weights, in their order.

What follows from a difference that was named is not named again: an output made from another one has another parent,
and that is all. Clocks, speeds and memory in `metrics.jsonl` are no differences.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.code import changed_modules
from nanoskyrl.stages.core.digests import digest_file
from nanoskyrl.stages.core.errors import InputError, told_as
from nanoskyrl.stages.core.manifest import NUMBERS, Manifest, differences, is_finished, read_manifest
from nanoskyrl.stages.core.metrics import latest, read_metrics
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.runs import EVALUATIONS, Run, step_of
from nanoskyrl.stages.looking.diff_columns import Decode, close, shown
from nanoskyrl.stages.looking.diff_rows import compare_rows
from nanoskyrl.stages.looking.diff_weights import compare_weights
from nanoskyrl.stages.looking.tokens import TOKENIZER, read_tokenizer
from nanoskyrl.stages.models.policy import POLICY_JSON, is_adapter

OF_A_MACHINE = re.compile(r"(time|host|timing/.*|.*(memory|per_second|mfu|queue|gpu).*)")
"""Numbers of `metrics.jsonl` that no two runs share."""
PLAIN = ("stage", "schema_version", "settings", "packages", "rows_in", "rows_out", "dropped")
"""Of a manifest: what is compared as it is."""


@dataclass(slots=True)
class Difference:
    """One thing that differs."""

    place: str
    """Relative to both: `step-000003/score`; `` where two outputs are compared."""
    what: str
    """A column, a setting, a file or the like."""
    how: str
    """What it is in the first, and in the second."""
    again: int = 0
    """How many later outputs have the same difference."""

    def line(self) -> str:
        """Return it in one line."""
        also = f" (also in {self.again} later output{'s' * (self.again > 1)})" if self.again else ""
        return f"{self.place}: " * bool(self.place) + f"{self.what}: {self.how}{also}"


@dataclass(slots=True)
class Compared:
    """What differs, in the order in which it came about."""

    differences: list[Difference] = field(default_factory=list)
    outputs: int = 0
    """Outputs, policies and files of settings that both have."""
    rows: int = 0


class PlaceComparison:
    """Two places under comparison, and what is known to differ already."""

    def __init__(self, tolerance: float) -> None:
        """Begin with nothing compared.

        Args:
            tolerance: Largest difference of numbers of rows, weights, facts and metrics that counts as none.
        """
        self.tolerance = tolerance
        self.found = Compared()
        self._known: set[tuple[Any, Any]] = set()
        """Digests of what was compared, and of what therefore differs wherever it is named."""
        self._noted: dict[tuple[str, str], Difference] = {}
        self._touched: set[str] = set()
        """Places in which anything differs."""

    def differs(self, place: str, what: str, how: str) -> None:
        """Note a difference; one that was noted of an earlier output is only counted."""
        self._touched.add(place)
        noted = self._noted.get((what, how))
        if noted is not None and noted.place != place:
            noted.again += 1
            return
        self._noted[what, how] = Difference(place, what, how)
        self.found.differences.append(self._noted[what, how])

    def both(self, place: str, what: str, first: bool, second: bool, *, how: str = "in") -> bool:
        """Say whether both have a thing, and note where one alone has it."""
        if first != second:
            self.differs(place, what, f"{how} the {'first' if first else 'second'} alone")
        return first and second

    def values(self, place: str, what: str, ours: Any, theirs: Any, *, exactly: bool = True) -> None:
        """Note where two values of JSON differ."""
        for name, a, b in differences(ours, theirs):
            if isinstance(a, str) and (a, b) in self._known:
                continue
            if exactly or not close(a, b, self.tolerance):
                self.differs(place, f"{what} {name}".strip(), f"{shown(a)} -> {shown(b)}")

    def runs(self, ours: Run, theirs: Run) -> None:
        """Compare two runs."""
        self._settings_files(ours, theirs)
        self._policy_of(ours, theirs, 0)
        numbers = [read_metrics(run.metrics) for run in (ours, theirs)]
        by_stage = {stage: [latest(lines, stage) for lines in numbers] for stage in STAGES}
        for step in sorted({*ours.steps(), *theirs.steps()}):
            self.steps(ours, theirs, step)
            self._policy_of(ours, theirs, step + 1)
            for stage, (a, b) in by_stage.items():
                self._numbers(f"{ours.step(step).name}/{stage}", a.get(step), b.get(step))
        later = {version for run in (ours, theirs) for version in run.policies() if version}
        for version in sorted(later - {step + 1 for run in (ours, theirs) for step in run.steps()}):
            self._policy_of(ours, theirs, version)
        self.folders(ours.root, theirs.root, f"{EVALUATIONS}/*/*", _decoder(ours.root))

    def steps(self, ours: Run, theirs: Run, step: int) -> None:
        """Compare all outputs of a step."""
        name = ours.step(step).name
        if self.both(name, "step", ours.step(step).is_dir(), theirs.step(step).is_dir()):
            self.folders(ours.root, theirs.root, f"{name}/*", _decoder(ours.root))

    def folders(self, ours: Path, theirs: Path, pattern: str, decode: Decode | None) -> None:
        """Compare the outputs whose paths in both match a pattern."""
        names = {path.relative_to(root) for root in (ours, theirs) for path in root.glob(pattern) if path.is_dir()}
        for name in sorted(names, key=_order):
            done = (is_finished(root / name) for root in (ours, theirs))
            if self.both(name.as_posix(), "output", *done, how="finished in"):
                self.outputs(ours / name, theirs / name, name.as_posix(), decode)

    def outputs(self, ours: Path, theirs: Path, place: str = "", decode: Decode | None = None) -> None:
        """Compare two outputs of stages."""
        a, b = read_manifest(ours), read_manifest(theirs)
        self.found.outputs += 1
        for what in PLAIN:
            self.values(place, what, getattr(a, what), getattr(b, what))
        if modules := changed_modules(a.code, b.code):
            more = f" and {len(modules) - 3} more" * (len(modules) > 3)
            self.differs(place, "code", f"other {', '.join(modules[:3])}{more}")
        self.values(place, "code version", a.code.get("version"), b.code.get("version"))
        self.values(place, "made from", {**a.inputs, "policy": a.policy}, {**b.inputs, "policy": b.policy})
        rows = compare_rows((ours, a), (theirs, b), self.tolerance, decode)
        self.found.rows += rows.rows
        for what, how in rows.lines():
            if what != "policy_digest" or a.policy == b.policy:  # else it is what it was made from, named above
                self.differs(place, what, how)
        if self._files(ours, theirs, a, b, place):
            self._known.add((a.facts.get("policy"), b.facts.get("policy")))
        # The summary of a stage follows from its rows.
        facts = ({name: of for name, of in one.facts.items() if name != NUMBERS} for one in (a, b))
        self.values(place, "facts", *facts, exactly=False)
        if place not in self._touched and a.parts != b.parts and not self.tolerance:
            self.differs(place, "digests of parts", "the manifests give others, and the rows are the same")
        self._known.add((a.digest, b.digest))

    def _files(self, ours: Path, theirs: Path, a: Manifest, b: Manifest, place: str) -> bool:
        """Compare what outputs hold beside their parts, and say whether weights differ.

        Files that were pruned go by their recorded digests. Where weights differ, the optimizer's state and
        `policy.json` do, too.
        """
        weights = False
        for name in sorted({*a.files, *b.files}):
            if weights and (name.startswith("state/") or name.endswith(POLICY_JSON)):
                continue
            if not self.both(place, name, name in a.files, name in b.files):
                continue
            there = [(root / name).is_file() for root in (ours, theirs)]
            if not any(there) or (name.startswith("state/") and not all(there)):
                self.values(place, f"digest of {name}", a.files[name], b.files[name])
            elif self.both(place, name, *there):
                weights |= self.files(ours / name, theirs / name, place, name) and name.endswith(".safetensors")
        return weights

    def files(self, ours: Path, theirs: Path, place: str, name: str) -> bool:
        """Compare two files: weights tensor by tensor, JSON key by key, others by their bytes; say if they differ."""
        digests = digest_file(ours), digest_file(theirs)
        if digests[0] == digests[1]:
            return False
        if digests in self._known:
            return True
        self._known.add(digests)
        found: list[tuple[str, str]] = []
        if ours.suffix == ".safetensors":
            found = list(compare_weights(ours, theirs, self.tolerance))
        elif ours.suffix == ".json":
            apart = differences(_read_json(ours), _read_json(theirs))
            found = [(key, f"{shown(a)} -> {shown(b)}") for key, a, b in apart if not close(a, b, self.tolerance)]
        if not found and not (self.tolerance and ours.suffix in (".safetensors", ".json")):
            found = [("", f"other bytes, {ours.stat().st_size} and {theirs.stat().st_size} of them")]
        for what, how in found:
            self.differs(place, f"{name} {what}".strip(), how)
        return bool(found)

    def policies(self, ours: Path, theirs: Path, place: str = "") -> None:
        """Compare two policies, and the critics beside them."""
        self.found.outputs += 1
        weights = False
        files = [(root, path) for root in (ours, theirs) for path in root.rglob("*") if path.is_file()]
        for name in sorted({path.relative_to(root).as_posix() for root, path in files}):
            there = ((root / name).is_file() for root in (ours, theirs))
            if self.both(place, name, *there) and not (weights and name == POLICY_JSON):
                weights |= self.files(ours / name, theirs / name, place, name) and name.endswith(".safetensors")

    def _policy_of(self, ours: Run, theirs: Run, version: int) -> None:
        places = ours.policy(version), theirs.policy(version)
        name = places[0].relative_to(ours.root).as_posix()
        if self.both(name, "policy", *(path.is_dir() for path in places)):
            self.policies(*places, name)

    def _settings_files(self, ours: Run, theirs: Run) -> None:
        tables = [_read_toml(run.settings_file) for run in (ours, theirs)]
        self.found.outputs += 1
        # A table that one of them lacks is empty there: each setting is named by itself.
        self.values("run.toml", "", *({name: of.get(name, {}) for name in {*tables[0], *tables[1]}} for of in tables))

    def _numbers(self, place: str, ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> None:
        """Compare numbers of a stage, where nothing else of it differs: they follow from its rows."""
        if ours is None or theirs is None or place in self._touched:
            return
        a, b = ({k: v for k, v in of.items() if not OF_A_MACHINE.fullmatch(k)} for of in (ours, theirs))
        self.values(place, "metrics.jsonl", a, b, exactly=False)


def _order(name: Path) -> tuple[str, int, str]:
    """Return what puts a step's outputs in the order in which they are made, named ones behind their stage."""
    stage = name.name.partition("-")[0]
    return str(name.parent), STAGES.index(stage) if stage in STAGES else len(STAGES), name.name


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with told_as(InputError, f"`{path}` cannot be read", ValueError, hint="Correct the file"):
        return tomllib.loads(path.read_text())


@lru_cache(maxsize=4)
def _decoder(root: Path) -> Decode | None:
    """Return what turns the token ids of a run into text; None where it has no policy with a tokenizer."""
    files = sorted(root.glob(f"policies/*/{TOKENIZER}"))
    tokenizer = read_tokenizer(files[0]) if files else None
    return None if tokenizer is None else lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def diff(ours: Path, theirs: Path, *, tolerance: float = 0.0) -> Compared:
    """Return what differs between two places of the same kind.

    Args:
        ours: A run, a step of one, the output of a stage, or a policy.
        theirs: Another.
        tolerance: Largest difference of numbers that counts as none; settings are compared exactly.

    Raises:
        InputError: nothing is there, the two are of other kinds, or one cannot be read.
    """
    kinds = [_kind(place) for place in (ours, theirs)]
    if kinds[0] != kinds[1]:
        raise InputError(
            f"`{ours}` is a {kinds[0]}, and `{theirs}` a {kinds[1]}",
            hint="Name two of a kind: runs, stages or policies",
        )
    comparison = PlaceComparison(tolerance)
    if kinds[0] == "run":
        comparison.runs(Run(ours), Run(theirs))
    elif kinds[0] == "policy":
        comparison.policies(ours, theirs)
    elif kinds[0] == "stage's output":
        comparison.outputs(ours, theirs, decode=_decoder(ours.resolve().parents[1]))
    else:
        comparison.folders(ours, theirs, "*", _decoder(ours.resolve().parent))
    return comparison.found


def _kind(place: Path) -> str:
    if not place.is_dir():
        raise InputError(f"there is no directory `{place}`", hint="Name a run, a step, a stage's output or a policy")
    if is_finished(place):
        return "stage's output"
    if (place / "config.json").is_file() or is_adapter(place):
        return "policy"
    if step_of(place) is not None:
        return "step"
    run = Run(place)
    if run.steps() or run.policies() or run.settings_file.is_file():
        return "run"
    read_manifest(place)  # says what is wrong with a stage's directory
    raise AssertionError("unreachable: a directory without a manifest is refused")


def lines(found: Compared, limit: int | None = None) -> Iterator[str]:
    """Yield the differences in words, and what was compared."""
    shown_first = found.differences[:limit]
    yield from (difference.line() for difference in shown_first)
    if left := len(found.differences) - len(shown_first):
        yield f"... and {left} more; --limit shows them"
    total = len(found.differences)
    what = f"{found.outputs} outputs and {found.rows} rows compared"
    yield f"{what}, {total} difference{'s' * (total != 1)}" if total else f"{what}: no difference"
