"""What is printed with rich: a console that no text of a policy's steers, and tables without lines around them."""

from collections.abc import Collection, Iterable, Mapping
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from nanoskyrl.stages.core.safe_text import printable


class SafeConsole(Console):
    """Prints escapes in place of control characters; its own colours come after that."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Return what is printed, piece by piece."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else Segment(printable(piece.text), piece.style)


def open_console(file: IO[str] | None, width: int) -> SafeConsole:
    """Return a console; into a file or a pipe lines may be so wide, whatever the terminal is."""
    found = SafeConsole(file=file)
    return found if found.is_terminal else SafeConsole(file=file, width=width)


def with_rows(grid: Table, rows: Iterable[Iterable[RenderableType]]) -> Table:
    """Return a table after putting rows of cells into it."""
    for row in rows:
        grid.add_row(*row)
    return grid


def plain_table(
    names: Iterable[str | Text],
    rows: Iterable[Iterable[RenderableType]],
    *,
    left: Collection[str] = (),
    wrapped: Collection[str] | None = None,
    title: str | None = None,
) -> Table:
    """Return a table: numbers stand to the right, words to the left.

    Args:
        names: Heads of its columns.
        rows: Their cells.
        left: Those that hold words.
        wrapped: Those whose cells may go over several lines; None: all of them.
        title: What stands above it.
    """
    columns = (
        Column(name, justify="left" if name in left else "right", no_wrap=wrapped is not None and name not in wrapped)
        for name in names
    )
    return with_rows(Table(*columns, box=None, pad_edge=False, title=title, title_justify="left"), rows)


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return facts by name as a table of two columns; what a policy wrote in them is shown, never obeyed."""
    grid = Table(box=None, show_header=False, pad_edge=False)
    return with_rows(grid, ((name, Text(printable(value))) for name, value in facts.items()))
