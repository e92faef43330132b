"""A loop while it runs, on a terminal: stage, counts, rates, curves, time left, and an attempt when a key asks for it.

Nothing here is asked for by the loop: it reads what lies on disk and what the loop reports anyway.
"""

import contextlib
import os
import select as io_select
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from nanoskyrl.stages.core.errors import NanoskyrlError
from nanoskyrl.stages.core.metrics import latest, number_in, read_metrics
from nanoskyrl.stages.core.rows import from_table
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.safe_text import printable
from nanoskyrl.stages.looking.find_rows import of_step, select, whole_rows
from nanoskyrl.stages.looking.step_numbers import BY_NAME, Steps, outliers, step_numbers
from nanoskyrl.stages.looking.trajectory_view import trajectory_blocks

SHOWN = ("success", "reward", "signal", "tokens", "failed", "entropy", "kl")
PARTS = 4
"""Parts of the reward that have a curve, at most."""
BLOCKS = "▁▂▃▄▅▆▇█"
CURVE = 40
"""Characters of a curve."""
RECENT = 5
"""Steps whose seconds predict those of the others."""
REFRESH = 2.0
"""Times a second."""
KEYS = {"b": ("best", "-reward"), "w": ("worst", "reward")}


@dataclass(slots=True)
class LoopView:
    """What of a loop is shown."""

    run: Run
    steps_wanted: int
    stage: str = "starting"
    began: float = field(default_factory=time.monotonic)
    step: int | None = None
    steps: list[int] = field(default_factory=list)
    numbers: Steps = field(default_factory=dict)
    rates: str = ""
    attempt: Sequence[RenderableType] = ()
    """The best or the worst attempt, while it is asked for."""
    asked: str = ""

    def begins(self, step: int, stage: str) -> None:
        """Note that a stage begins."""
        self.step, self.stage, self.began = step, stage, time.monotonic()

    def reported(self) -> None:
        """Read the numbers again: a step is done."""
        self.steps, self.numbers = step_numbers(self.run)
        self.rates = rates(self.run)
        if self.asked:
            self.attempt = extreme_attempt(self.run, self.asked)

    def pressed(self, key: str) -> None:
        """Show the best or the worst attempt of the newest step, or nothing again."""
        self.asked = "" if key == self.asked or key not in KEYS else key
        self.attempt = extreme_attempt(self.run, self.asked) if self.asked else ()

    def __rich__(self) -> RenderableType:
        """Return the view as it is now."""
        keys = Text("b: newest best attempt   w: newest worst   again: close", style="dim")
        inside = Group(self._state(), self._curves(), *([Text(self.rates)] if self.rates else []), keys, *self.attempt)
        return Panel(inside, title=Text(printable(str(self.run.root))), title_align="left", border_style="cyan")

    def _state(self) -> Text:
        seconds = time.monotonic() - self.began
        at = "" if self.step is None else f"step {self.step} of {self.steps_wanted}, "
        return Text.assemble(f"{at}", (self.stage, "bold"), f" {seconds:.0f} s{self._left()}")

    def _left(self) -> str:
        """Return how long the other steps will take, if they take as long as the newest."""
        known = [value for value in self.numbers.get("seconds", []) if value is not None][-RECENT:]
        if not known or self.step is None:
            return ""
        left = max(0, self.steps_wanted - self.step) * sum(known) / len(known)
        return f"; about {f'{left / 60:.0f} minutes' if left >= 120 else f'{left:.0f} s'} left"

    def _curves(self) -> Table:
        columns = (Column(justify=side, no_wrap=True) for side in ("left", "right", "left"))
        grid = Table(*columns, box=None, show_header=False, pad_edge=False)
        parts = [name for name in self.numbers if name.startswith("part.")][:PARTS]
        for name in (*SHOWN[:2], *parts, *SHOWN[2:]):
            values = self.numbers.get(name, [])
            known = [value for value in values if value is not None]
            if known:
                out = any(outliers(name, values)[-RECENT:])
                share = name.startswith("part.") or (name in BY_NAME and BY_NAME[name].kind == "share")
                line = Text(sparkline(values, share=share), style="green")
                grid.add_row(Text(printable(name)), Text(f"{known[-1]:.3g}", style="bold red" if out else ""), line)
        return grid


def sparkline(values: Sequence[float | None], *, share: bool) -> str:
    """Return the newest values as blocks, one a step; a share goes from 0 to 1, anything else from least to most."""
    newest = values[-CURVE:]
    known = [value for value in newest if value is not None]
    low, high = (0.0, 1.0) if share else (min(known, default=0.0), max(known, default=0.0))

    def block(value: float | None) -> str:
        if value is None:
            return " "
        at = (value - low) / (high - low) if high > low else 0.5
        return BLOCKS[max(0, min(len(BLOCKS) - 1, round(at * (len(BLOCKS) - 1))))]

    return "".join(map(block, newest))


def rates(run: Run) -> str:
    """Return how fast the newest step was, and the memory that training took, as far as they are known."""
    lines = read_metrics(run.metrics)
    rollouts, trains = latest(lines, "rollout"), latest(lines, "train")
    rollout, train = (of[max(of)] if of else {} for of in (rollouts, trains))
    tokens, seconds = number_in(rollout, "rollout/response_tokens/total"), number_in(rollout, "timing/generate")
    numbers = {
        "{:,.0f} attempts": sum(number_in(line, "rollout/rows") or 0 for line in rollouts.values()),
        "{:,.0f} tokens sampled a second": tokens / seconds if tokens and seconds else None,
        "{:,.0f} trained a second": number_in(train, "train/tokens_per_second"),
        "GPU memory {:.1f} GB": (number_in(train, "train/peak_device_memory_bytes") or 0) / 1e9,
        "memory {:.1f} GB": (number_in(train, "train/peak_memory_bytes") or 0) / 1e9,
    }
    return ", ".join(form.format(value) for form, value in numbers.items() if value)


def extreme_attempt(run: Run, key: str) -> list[RenderableType]:
    """Return the attempt of the newest scored step with the highest or the lowest reward, whole."""
    name, sort = KEYS[key]
    for step in reversed(run.steps()):
        try:
            sources = of_step(run, step)
            found = select(sources, ("reward",), where="reward is not None", sort=sort, limit=1) if sources else None
            if found is not None and found.table.num_rows:
                (t,) = from_table(whole_rows(sources, found.table))
                return [Text(f"the {name} attempt of step {step}", style="bold"), *trajectory_blocks(t)]
        except (NanoskyrlError, OSError):  # a stage is just being written, or one before has no rewards
            continue
    return [Text("no attempt was scored yet", style="dim")]


@contextlib.contextmanager
def live_loop(run: Run, steps: int) -> Iterator[LoopView]:
    """Show a loop on the terminal behind stderr until the block ends; what is printed meanwhile appears above."""
    view = LoopView(run, steps)
    view.reported()
    console = Console(stderr=True)
    with (
        Live(view, console=console, refresh_per_second=REFRESH, transient=True, vertical_overflow="crop"),
        _keys(view),
    ):
        yield view


@contextlib.contextmanager
def _keys(view: LoopView) -> Iterator[None]:
    """Pass keys on to the view; nothing where no person types. Ctrl-C goes to the loop as ever."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before, done = termios.tcgetattr(descriptor), threading.Event()

    def listen() -> None:
        while not done.is_set():
            if io_select.select([descriptor], [], [], 0.2)[0]:
                key = os.read(descriptor, 1).decode(errors="replace")
                if not key:
                    return
                view.pressed(key)

    tty.setcbreak(descriptor)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        done.set()
        listener.join()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
