"""Rows of a benchmark: a local file or folder first, the hub second.

A file that is named is all that is read, so everything works with the hub off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanoskyrl.envs.datasets import read_rows
from nanoskyrl.stages.core.errors import InputError, told_as
from nanoskyrl.stages.core.safe_text import shortened

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """Where a benchmark lies on the hub."""

    name: str
    config: str | None = None
    split: str = "test"
    terms: str = ""
    """What has to be accepted first; empty: nothing."""


def place_of(data: str | None, hub: Hub | None) -> str:
    """Return where rows come from, for messages."""
    return f"`{data}`" if data is not None else f"`{hub.name}` on the hub" if hub is not None else "nowhere"


def needed_text(row: Row, *names: str) -> None:
    """Raise ValueError unless all of these columns hold text."""
    for name in names:
        if not isinstance(row[name], str):
            raise ValueError(f"`{name}` must be text, not {shortened(repr(row[name]))}")


def bench_rows(
    data: str | None,
    hub: Hub | None,
    bench: str,
    needed: Sequence[str],
    check: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Return the rows of a benchmark.

    Args:
        data: A local file or an address that fsspec reads; None: the hub.
        hub: Where the hub has it; None: not there.
        bench: The benchmark's name, for messages.
        needed: Columns that every row must have.
        check: Raises ValueError for a row that does not hold what its columns mean.

    Raises:
        InputError: the file or the hub's copy cannot be read, is empty, lacks a column, or has a row that is refused.
    """
    where = place_of(data, hub)
    if data is not None:
        rows = [row for _, row in read_rows(data, "file", f"rows of {bench}", hub.split if hub else "test")]
    elif hub is not None:
        rows = _hub_rows(hub, bench)
    else:
        raise InputError(f"{bench} has no rows: it is on no hub", hint=f"Name a file with `--set {bench}.data=PATH`")
    if not rows:
        raise InputError(f"{where} has no rows of {bench}", hint="Name a file that has some")
    for number, row in enumerate(rows):
        if missing := [name for name in needed if name not in row]:
            raise InputError(
                f"row {number} of {where} has no column `{missing[0]}`, which {bench} needs",
                hint=f"It has {', '.join(map(str, row))}",
            )
        if empty := [name for name in needed if row[name] is None]:
            raise InputError(
                f"row {number} of {where} has null for `{empty[0]}`, which {bench} needs", hint="Leave such rows out"
            )
        with told_as(
            InputError,
            f"row {number} of {where}",
            ValueError,
            hint="docs/evaluations.md gives the layout; leave such rows out",
        ):
            check(row)
    return rows


def _hub_rows(hub: Hub, bench: str) -> list[Row]:
    import datasets

    try:
        found = datasets.load_dataset(hub.name, hub.config, split=hub.split)
    except Exception as error:  # the hub's client raises whatever its layers do
        terms = f"; {hub.terms}" if hub.terms else ""
        raise InputError(
            f"the rows of {bench} (`{hub.name}` on the hub) cannot be had: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}",
            hint=f"Name a local file with `--set {bench}.data=PATH`{terms}",
        ) from error
    return [dict(row) for row in found]  # pyright: ignore[reportArgumentType, reportCallIssue]
