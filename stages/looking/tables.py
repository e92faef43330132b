"""Tables for a terminal, without lines around them: numbers stand to the right, words to the left."""

from collections.abc import Collection, Iterable, Mapping

from rich.table import Table
from rich.text import Text

from nanoskyrl.stages.core.safe_text import printable


def table_of(
    names: Iterable[str | Text],
    *,
    left: Collection[str] = (),
    wrapped: Collection[str] | None = None,
    title: str | None = None,
) -> Table:
    """Return a table without rows.

    Args:
        names: Heads of its columns.
        left: Those that hold words.
        wrapped: Those whose cells may go over several lines; None: all of them.
        title: What stands above it.
    """
    grid = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for name in names:
        no_wrap = wrapped is not None and name not in wrapped
        grid.add_column(name, justify="left" if name in left else "right", no_wrap=no_wrap)
    return grid


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return facts by name as a table of two columns; what a policy wrote in them is shown, never obeyed."""
    grid = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        grid.add_row(name, Text(printable(value)))
    return grid
