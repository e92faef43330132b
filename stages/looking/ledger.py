"""The ledger of a step and of a run: where every generated row and token went.

Generated = trained + left out, by reason + stale + waiting for a stage that has not run. A row that several updates
learned from counts once. By length and by difficulty it shows what a filter starves: dropping slow or old groups
drops the hard ones first (tinker-cookbook#822).
"""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from rich.console import Console

from nanoskyrl.algos.shaping import metric_of
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import PASSES_ON, is_finished, read_manifest
from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.rows import row_arrays, values_in
from nanoskyrl.stages.core.runs import Run, step_of
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.core.trajectory import DROP_REASONS, schema_of
from nanoskyrl.stages.looking.console import plain_table

TRAINED, STALE, WAITING = "trained", "stale", "waiting"
FATES = (TRAINED, *DROP_REASONS, STALE, WAITING)
"""What becomes of a row: every reason of `advantage`, too old for its update, or not there yet; else the name of the
stage of somebody's own that dropped it."""
ORDER = ("advantage", "score", "rollout")
"""Stages whose rows say most about a step, the last one first."""
COLUMNS = (
    "trajectory_id", "step_index", "is_last_step", "group_id", "env", "completion_tokens", "loss_mask", "status",
    "metadata", "reward", "success", "kept", "drop_reason",
)  # fmt: skip
Row = tuple[str, int]
"""trajectory_id and step_index."""


Bin = tuple[str, str, str]
"""Fate, length and difficulty."""


@dataclass(slots=True)
class Ledger:
    """Rows and sampled tokens by what became of them, how long they are, and how hard their task is."""

    rows: Counter[Bin] = field(default_factory=Counter)
    tokens: Counter[Bin] = field(default_factory=Counter)

    def __add__(self, other: "Ledger") -> "Ledger":
        """Return both together."""
        return Ledger(self.rows + other.rows, self.tokens + other.tokens)

    def sums(self, by: str | None = None) -> dict[str, dict[str, tuple[int, int]]]:
        """Return rows and tokens by fate, of each `length` or `difficulty`; without `by`, of all under one name."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for place, count in self.rows.items():
            name = {"length": place[1], "difficulty": place[2]}.get(by or "", "all")
            of = found.setdefault(name, {})
            rows, tokens = of.get(place[0], (0, 0))
            of[place[0]] = rows + count, tokens + self.tokens[place]
        return dict(sorted(found.items(), key=lambda item: _rank(item[0])))

    def to_plain(self) -> dict[str, Any]:
        """Return the sums as JSON-ready values."""

        def plain(of: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, int]]:
            fates = {fate: {"rows": of[fate][0], "tokens": of[fate][1]} for fate in _in_order(of)}
            return {
                "generated": {"rows": sum(r for r, _ in of.values()), "tokens": sum(t for _, t in of.values())}
            } | fates

        return {
            **plain(self.sums().get("all", {})),
            "by_length": {name: plain(of) for name, of in self.sums("length").items()},
            "by_difficulty": {name: plain(of) for name, of in self.sums("difficulty").items()},
        }


def ledgers(run: Run, steps: Iterable[int] | None = None) -> Iterator[tuple[int, Ledger]]:
    """Yield the ledger of each step, or of some; what other steps' updates learned from it is looked for in all.

    Raises:
        InputError: a shard or a manifest cannot be read.
    """
    trained = {step: rows_trained(run.stage(step, "train")) for step in run.steps()}
    learned = set().union(*(rows for rows in trained.values() if rows is not None))
    for step in run.steps() if steps is None else steps:
        table = rows_of(run, step)
        if table is not None:
            found = ledger_of(table, learned, is_over=trained.get(step) is not None)
            for stage, dropped in dropped_between(run, step):
                found += ledger_of(dropped, set(), fate=stage)
            yield step, found


def rows_trained(folder: Path) -> set[Row] | None:
    """Return the rows that an update learned from; None where there is no finished one."""
    if not is_finished(folder):
        return None
    tables = read_parts(folder, read_manifest(folder, stage="train"), ("trajectory_id", "step_index"))
    return {row for table in tables for row in keys_of(table)}


def keys_of(table: pa.Table) -> list[Row]:
    """Return which row each row of a table is."""
    return list(zip(*(table.column(name).to_pylist() for name in ("trajectory_id", "step_index")), strict=True))


def rows_of(run: Run, step: int) -> pa.Table | None:
    """Return the rows of a step from the last of our stages that has finished; None where none has."""
    stage = next((stage for stage in ORDER if is_finished(run.stage(step, stage))), None)
    return None if stage is None else _read(run.stage(step, stage), stage)


def dropped_between(run: Run, step: int) -> Iterator[tuple[str, pa.Table]]:
    """Yield what each stage of somebody's own dropped: its name, and these rows as its input has them."""
    for stage in run.made(step):
        if stage in STAGES or not is_finished(run.stage(step, stage)):
            continue
        manifest = read_manifest(run.stage(step, stage))
        parent = next((name for name in manifest.inputs if is_finished(run.stage(step, name))), None)
        columns = manifest.facts.get(PASSES_ON)
        if parent is None or columns is None:
            continue
        before, after = (_read(run.stage(step, name), columns) for name in (parent, stage))
        left = set() if after is None else set(keys_of(after))
        if before is not None:
            yield stage, before.filter(pa.array([key not in left for key in keys_of(before)], pa.bool_()))


def _read(folder: Path, columns: str) -> pa.Table | None:
    names = [name for name in COLUMNS if name in schema_of(columns).names]
    tables = list(read_parts(folder, read_manifest(folder), names))
    return pa.concat_tables(tables) if tables else None


def ledger_of(table: pa.Table, learned: set[Row], *, is_over: bool = True, fate: str | None = None) -> Ledger:
    """Return the ledger of a step's rows.

    Args:
        table: Of the last stage of the step that has finished, with those of COLUMNS that it has.
        learned: Rows that an update learned from.
        is_over: Whether the step's own update is finished: rows that it left are stale, not waiting.
        fate: What became of all of them, such as the stage that dropped them; None: it is looked for.
    """
    difficulty = _difficulties(table)
    ledger = Ledger()
    for row, reason, tokens, group in zip(
        keys_of(table), values_in(table, "drop_reason"), tokens_of(table), values_in(table, "group_id"), strict=True
    ):
        became = fate or (TRAINED if row in learned else reason or (STALE if is_over else WAITING))
        place = became, _length(tokens), difficulty[group]
        ledger.rows[place] += 1
        ledger.tokens[place] += tokens
    return ledger


def tokens_of(table: pa.Table) -> list[int]:
    """Return the sampled tokens of each row, by its mask, else as its engine counted them."""
    masks, counts = row_arrays(table.column("loss_mask")), table.column("completion_tokens").to_pylist()
    return [
        int((mask != 0).sum()) if mask is not None else count or 0 for mask, count in zip(masks, counts, strict=True)
    ]


def _length(tokens: int) -> str:
    """Return the bin of a length: from a power of two up to the next."""
    low = 1 << (tokens.bit_length() - 1) if tokens else 0
    return f"{low} to {2 * low - 1} tokens" if low > 1 else f"{tokens} token{'s' * (tokens != 1)}"


def _difficulties(table: pa.Table) -> dict[str, str]:
    """Return how hard each group's task is: its environment's level, else the share of attempts that solved it."""
    names = ("group_id", "env", "metadata", "is_last_step", "reward", "success")
    facts = {name: values_in(table, name) for name in names}
    rows = [dict(zip(facts, values, strict=True)) for values in zip(*facts.values(), strict=True)]
    several = len(set(facts["env"])) > 1
    found = {}
    for group, members in grouped((row["group_id"], row) for row in rows if row["is_last_step"]).items():
        level = json.loads(members[0]["metadata"] or "{}").get("level")
        known = [row for row in members if row["reward"] is not None]
        solved = [(metric_of(row["success"], row["reward"]) or 0.0) > 0 for row in known]
        share = f"solved by {_band(sum(solved) / len(solved))}" if solved else "never judged"
        of_env = f"{members[0]['env']}, " * several
        found[group] = of_env + (share if level is None else f"level {level}")
    return {group: found.get(group, "never judged") for group in facts["group_id"]}


def _band(share: float) -> str:
    """Return a quarter of the scale, its ends apart: what nobody and what everybody solved teaches nothing."""
    if share in (0.0, 1.0):
        return "none" if not share else "all"
    low = min(int(share * 4), 3) * 25
    return f"{low} to {low + 25}%"


def _in_order(fates: Iterable[str]) -> list[str]:
    """Return fates as they are shown: ours in their order, then the stages of somebody's own that dropped rows."""
    found = set(fates)
    return [*(fate for fate in FATES if fate in found), *sorted(found.difference(FATES))]


BANDS = ("none", "0 to 25%", "25 to 50%", "50 to 75%", "75 to 100%", "all")


def _rank(name: str) -> tuple[str, int]:
    """Return where a bin comes among its kind: the hardest and the shortest first."""
    head, _, band = name.rpartition("solved by ")
    if band in BANDS:
        return head, BANDS.index(band)
    first = name.split(" ")[0]
    return ("", int(first)) if first.isdigit() else (name, 0)


def ledger_cells(ledger: Ledger) -> list[list[str]]:
    """Return a ledger as cells of rows and tokens: a head, then a row for all, each length, and each difficulty."""
    present = _in_order({place[0] for place in ledger.rows})
    cells = [["rows / tokens", "generated", *(fate.replace("_", " ") for fate in present)]]
    for by in (None, "length", "difficulty"):
        for name, of in ledger.sums(by).items():
            every = sum(rows for rows, _ in of.values()), sum(tokens for _, tokens in of.values())
            counts = [every, *(of.get(fate, (0, 0)) for fate in present)]
            cells.append([name, *(f"{rows} / {tokens}" for rows, tokens in counts)])
    return cells


def ledger_at(place: Path) -> Ledger:
    """Return the ledger of a run, or of one step of it.

    Raises:
        InputError: it is neither, or has no rows yet.
    """
    step = step_of(place.resolve())
    run = Run(place.resolve().parent if step is not None else place)
    found = [ledger for _, ledger in ledgers(run, None if step is None else [step])]
    if not found:
        raise InputError(f"there are no rows at `{place}`", hint="Name a run, or a step of one such as step-000000")
    return sum(found[1:], found[0])


def print_ledger(ledger: Ledger, file: IO[str] | None = None) -> None:
    """Print a ledger as a table."""
    head, *rows = ledger_cells(ledger)
    console = Console(file=file)
    console.width = max(console.width, sum(max(map(len, column)) + 2 for column in zip(head, *rows, strict=True)))
    console.print(plain_table(head, rows, left=head[:1], wrapped=()))


def check_ledger(folder: Path, update: pa.Table, given: pa.Table, stale: int) -> Iterator[tuple[bool, str]]:
    """Yield whether each count of an update closes, and what is wrong where it does not.

    Args:
        folder: Of the update.
        update: What it saw of each row that it learned from.
        given: The rows of all its inputs, with the COLUMNS of `advantage`.
        stale: Rows that its manifest says were too old.
    """
    learned, tokens = keys_of(update), dict(zip(keys_of(given), tokens_of(given), strict=True))
    kept = {row for row, is_kept in zip(keys_of(given), given.column("kept").to_pylist(), strict=True) if is_kept}
    yield len(set(learned)) == len(learned), f"{folder} counts rows that it learned from twice"
    others = set(learned) - tokens.keys()
    yield not others, f"{folder} learned from {len(others)} rows that it was not given"
    unkept = (set(learned) & tokens.keys()) - kept
    yield not unkept, f"{folder} learned from {len(unkept)} rows that `advantage` left out"
    told = f"{folder} learned from {len(learned)} rows and counts {stale} stale ones, of {len(kept)} that were kept"
    yield len(learned) + stale == len(kept), told
    trained = zip(learned, update.column("tokens").to_pylist(), strict=True)
    over = [row for row, count in trained if count > tokens.get(row, count)]
    yield not over, f"{folder} trained more tokens of {len(over)} rows than were sampled"
