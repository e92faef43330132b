"""What a policy is shown of the turns behind it: all of them, the last few, or a summary that the environment keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

from nanoskyrl.envs.base import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """How much of an attempt its next prompt holds."""

    kind: str = "full"
    turns: int = 4
    """Shown whole, the newest included; with `summary`, behind it."""

    def view(self, first: Sequence[Message], turns: Sequence[Sequence[Message]], summary: str | None) -> list[Message]:
        """Return the messages of the next prompt.

        Args:
            first: The messages the episode began with; always shown.
            turns: The messages of each turn: the action, and what was observed.
            summary: What the environment says the attempt knows by now; None where it keeps none.
        """
        if self.kind == "full":
            return [*first, *(message for turn in turns for message in turn)]
        shown = [message for turn in turns[max(0, len(turns) - self.turns) :] for message in turn]
        if self.kind == "summary" and summary is not None:
            return [*_with_summary(first, summary), *shown]
        return [*first, *shown]


def _with_summary(first: Sequence[Message], summary: str) -> list[Message]:
    """Put the summary into the last message the episode began with: many templates want roles to take turns."""
    *before, last = first
    return [*before, {**last, "content": f"{last['content']}\n\nSo far: {summary}"}]
