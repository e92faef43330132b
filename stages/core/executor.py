"""Who makes the parts of a stage, where it is not the process that was asked for it.

A stage describes its work by a `Job`, which travels to workers. Each worker begins it once, then makes the parts that
it is handed and commits them itself; whoever handed them out closes the output with its manifest. A part follows from
the job and its item alone, so the bytes do not depend on who makes it, or how many there are.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nanoskyrl.stages.core.output import Output, Written

Maker = Callable[[int, Any], Written | list[str]]
"""Makes the part of an index from its item; or returns why it is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker has to know of a stage; all of it can be pickled."""

    begin: Callable[..., Maker]
    """A function of a module. Called once in each worker, with the arguments, and with `engine` where there is one."""
    arguments: Mapping[str, Any]
    """Paths are whole: a worker has a folder of its own."""
    engine: tuple[str, Any] | None = None
    """Name and settings of the engine that parts are made with."""


class Executor(Protocol):
    """Makes parts elsewhere."""

    def fill(self, out: Output, job: Job, items: Iterable[tuple[int, Any]]) -> list[str]:
        """Have a part made of every item, and return why some were left out.

        Args:
            out: Takes down what was committed.
            job: What they are made by.
            items: Index and what the part is made from; taken as there are workers for them.

        Raises:
            NanoskyrlError: what a worker raised, or workers were lost again and again.
        """
        ...

    def facts(self) -> Mapping[str, float | int | str | None]:
        """Return numbers about the work since it was last asked, for the log."""
        ...
