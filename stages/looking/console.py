"""What is printed with rich: a console that no text of a policy's steers, and tables without lines around them."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from nanoskyrl.stages.core.safe_text import printable


class SafeConsole(Console):
    """Prints escapes in place of control characters; its own colours come after that."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Return what is printed, piece by piece."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else Segment(printable(piece.text), piece.style)


def plain_table(
    names: Iterable[str | Text],
    *,
    left: Collection[str] = (),
    wrapped: Collection[str] | None = None,
    title: str | None = None,
) -> Table:
    """Return a table without rows: numbers stand to the right, words to the left.

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
