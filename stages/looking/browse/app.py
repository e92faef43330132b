"""A run in the whole terminal: steps, their trajectories, and one of them whole, with search and keys.

`skyrl browse`. What is shown is what `show` prints; nothing of the run is changed.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import pyarrow as pa
from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import DataTable, Footer, Header, Input, Static

from nanoskyrl.stages.core.errors import NanoskyrlError
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.safe_text import one_line, printable
from nanoskyrl.stages.looking.find_rows import RowSource, of_step, select
from nanoskyrl.stages.looking.reading import remarks
from nanoskyrl.stages.looking.show_rows import whole_trajectory
from nanoskyrl.stages.looking.show_run import marked_number, remark_lines
from nanoskyrl.stages.looking.step_numbers import outliers, step_numbers
from nanoskyrl.stages.looking.tokens import COLORS

STEP_NUMBERS = ("success", "signal", "kl")
"""Of a step, beside its number."""
FACTS = ("trajectory_id", "task_id", "status", "turns", "tokens", "reward", "success", "failed_calls")
MOST = 2000
"""Trajectories of a step that are listed; a condition finds the others."""
ORDERS = (None, "reward", "-reward", "-tokens", "-failed_calls")
"""What `s` changes to, one after the other: as they lie, lowest reward first, ..."""


class Browser(App[None]):
    """A run to walk through: steps on the left, trajectories in the middle, one on the right."""

    CSS = """
    #steps { width: 34; }
    #middle { width: 64; }
    #rows { height: 1fr; }
    #one { padding: 0 1; }
    #says { height: auto; max-height: 6; padding: 0 1; }
    .found { color: $text-muted; padding: 0 1; height: 1; }
    DataTable:focus, VerticalScroll:focus { background-tint: $foreground 5%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("slash", "search", "Condition or text", key_display="/"),
        Binding("s", "order", "Order"),
        Binding("c", "color", "Colour"),
        Binding("t", "tokens", "Tokens"),
        Binding("n", "step(1)", "Next step"),
        Binding("p", "step(-1)", "Step before"),
        Binding("r", "reload", "Read again"),
        Binding("escape", "leave", "Back", show=False),
    ]

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.shown_run, self.title = run, printable(str(run.root))
        self.steps: list[int] = []
        self.sources: list[RowSource] = []
        self.found: pa.Table = pa.table({})
        self.condition: str | None = None
        self.order, self.color, self.as_tokens = 0, -1, False

    def compose(self) -> ComposeResult:
        """Lay out the parts."""
        yield Header()
        yield Static(id="says")
        with Horizontal():
            yield DataTable(id="steps", cursor_type="row")
            with Vertical(id="middle"):
                yield Input(placeholder="reward < 0.5 and turns > 2, or a text", id="search")
                yield Static(classes="found", id="found")
                yield DataTable(id="rows", cursor_type="row")
            with VerticalScroll(id="scroll"):
                yield Static(id="one")
        yield Footer()

    def on_mount(self) -> None:
        """Read the run."""
        self.query_one("#steps", DataTable).add_columns("step", *STEP_NUMBERS)
        self.query_one("#rows", DataTable).add_columns("id", "reward", "turns", "tokens", "failed", "task")
        self.action_reload()
        self.query_one("#rows").focus()

    def action_reload(self) -> None:
        """Read the run again, as it may have new steps; the cursor stays at its step, or is at the newest."""
        table: DataTable[Text] = self.query_one("#steps", DataTable)
        steps, numbers = step_numbers(self.shown_run)
        held = self.steps[table.cursor_row] if self.steps and table.cursor_row < len(self.steps) - 1 else None
        self.steps = steps
        marked = {name: outliers(name, numbers[name]) for name in STEP_NUMBERS}
        table.clear()
        for index, step in enumerate(steps):
            cells = (marked_number(numbers[name][index], marked[name][index], 2) for name in STEP_NUMBERS)
            table.add_row(Text(str(step)), *cells)
        said = remark_lines(remarks(steps, numbers))
        self.query_one("#says", Static).update(Group(*said) if said else Text(f"{len(steps)} steps"))
        if steps:
            table.move_cursor(row=steps.index(held) if held in steps else len(steps) - 1)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Show what the cursor is at: a step's trajectories, or one of them."""
        if event.data_table.id == "steps" and event.cursor_row < len(self.steps):
            self.sources = of_step(self.shown_run, self.steps[event.cursor_row])
            self.list_rows()
        elif event.data_table.id == "rows":
            self.show_one()

    def list_rows(self) -> None:
        """List the trajectories of the step that meet the condition."""
        table: DataTable[Text] = self.query_one("#rows", DataTable)
        try:
            found = select(self.sources, FACTS, where=self.condition, sort=ORDERS[self.order], limit=MOST)
        except NanoskyrlError as error:
            self.notify(printable(f"{error}. {error.hint or ''}"), severity="error", markup=False)
            return
        self.found = found.table
        table.clear()
        for row in self.found.to_pylist():
            table.add_row(*_cells(row))
        order = ORDERS[self.order]
        by = f", by {order.removeprefix('-')}" if order else ""
        rest = f", {found.matched - found.table.num_rows} not listed" if found.matched > found.table.num_rows else ""
        which = f" with {one_line(self.condition)}" if self.condition else ""
        self.query_one("#found", Static).update(Text(f"{found.table.num_rows} attempts{rest}{by}{which}"))
        self.show_one()

    def show_one(self) -> None:
        """Show the trajectory at the cursor."""
        at = self.query_one("#rows", DataTable).cursor_row
        blocks: Iterable[RenderableType] = [Text("no trajectory", style="dim")]
        if 0 <= at < self.found.num_rows:
            color = None if self.color < 0 else COLORS[self.color]
            blocks = whole_trajectory(self.sources, self.found.slice(at, 1), color=color, as_tokens=self.as_tokens)
        self.query_one("#one", Static).update(Group(*blocks))
        self.query_one("#scroll", VerticalScroll).scroll_home(animate=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take a condition, or look for a text in the responses."""
        text = event.value.strip()
        self.condition = text or None
        if text and not any(sign in text for sign in ("<", ">", "==", "!=", " in ", " is ", "not ")):
            self.condition = f"{text!r} in response"
        self.list_rows()
        self.query_one("#rows").focus()

    def action_search(self) -> None:
        """Go to the field for conditions."""
        self.query_one("#search").focus()

    def action_leave(self) -> None:
        """Leave the field, or take the condition back."""
        if self.focused is not self.query_one("#search") and self.condition:
            self.condition = None
            self.query_one("#search", Input).value = ""
            self.list_rows()
        self.query_one("#rows").focus()

    def action_order(self) -> None:
        """Order the trajectories by something else."""
        self.order = (self.order + 1) % len(ORDERS)
        self.list_rows()

    def action_color(self) -> None:
        """Colour the tokens by something else, or not at all."""
        self.color = self.color + 1 if self.color + 1 < len(COLORS) else -1
        self.as_tokens = False
        self.show_one()

    def action_tokens(self) -> None:
        """Show the tokens as a table, or the turns again."""
        self.as_tokens = not self.as_tokens
        self.show_one()

    def action_step(self, by: int) -> None:
        """Go to another step."""
        table = self.query_one("#steps", DataTable)
        table.move_cursor(row=max(0, min(len(self.steps) - 1, table.cursor_row + by)))


def _cells(row: dict[str, Any]) -> list[Text]:
    """Return a trajectory as a line of the list."""
    style = "" if row["success"] is None else "green" if row["success"] else "red"
    reward = "?" if row["reward"] is None else f"{row['reward']:.3g}"
    counts = ("" if row[name] is None else str(row[name]) for name in ("turns", "tokens", "failed_calls"))
    name, task = Text(row["trajectory_id"][:8]), Text(one_line(row["task_id"]))
    return [name, Text(reward, style=style), *map(Text, counts), task]
