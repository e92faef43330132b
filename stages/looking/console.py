"""A console of rich on which nothing that a policy wrote steers the terminal."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from nanoskyrl.stages.core.safe_text import printable


class SafeConsole(Console):
    """Prints escapes in place of control characters; its own colours come after that."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Return what is printed, piece by piece."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else Segment(printable(piece.text), piece.style)
