"""What is being done, and for how long, on a terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show a word and the seconds that it takes until it is done; nothing where stderr is no terminal.

    Yields a function that shows another word, and counts anew.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda text: bar.reset(task, description=text)
