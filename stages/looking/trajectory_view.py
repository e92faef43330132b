"""One trajectory, whole, as blocks for a terminal: what is known of it, its turns with their calls, its tokens."""

import json
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from nanoskyrl.envs.graders.kinds import NO_ANSWER
from nanoskyrl.envs.tool_formats.own import calls_in_words
from nanoskyrl.stages.core.safe_text import printable
from nanoskyrl.stages.core.trajectory import ToolCall, Trajectory
from nanoskyrl.stages.looking.console import facts_table
from nanoskyrl.stages.looking.curve import number
from nanoskyrl.stages.looking.tokens import ColorBy, TokenFacts, shade

ROLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def trajectory_blocks(
    t: Trajectory, *, advantage: str | None = None, tokens: Sequence[TokenFacts] = (), color: ColorBy | None = None
) -> Iterator[RenderableType]:
    """Yield a trajectory as rich renderables, top to bottom; text of the policy's is shown, never obeyed.

    Args:
        t: The row.
        advantage: What its tokens got, in words; None: nobody estimated it.
        tokens: Of its response.
        color: With tokens, the response is shown token by token, coloured by this.
    """
    yield _facts(t, advantage)
    for message in t.messages:
        role = printable(str(message.get("role")))
        text = calls_in_words(str(message.get("content") or ""), message.get("tool_calls") or ())
        yield Panel(Text(printable(text)), title=Text(role), title_align="left", border_style=ROLES.get(role, "white"))
    yield from (_call(index, call) for index, turn in enumerate(t.turns) for call in turn.tool_calls)
    if t.error:
        yield Text(f"error: {printable(t.error)}", style="red")
    if color is not None:
        yield from _colored(tokens, color)


def _facts(t: Trajectory, advantage: str | None) -> Table:
    facts = {
        "trajectory": t.trajectory_id,
        "task": f"{t.env} {t.split} {t.task_id}",
        "group, sample": f"{t.group_id}, {t.sample}",
        "policy": f"version {t.policy_version}, digest {(t.policy_digest or 'none')[:12]}",
        "sampled at": f"temperature {t.temperature:g}, top_p {t.top_p:g}, top_k {t.top_k}, seed {t.seed}",
        "ended": f"{t.status} ({t.stop_reason})",
        "tokens": f"{number(t.prompt_tokens, 'd')} prompt, {number(t.completion_tokens, 'd')} sampled",
        "reward": reward_of(t),
        "success": str(t.success) if t.score_status else "not scored yet",
        **({} if advantage is None else {"advantage": advantage}),
        "metadata": json.dumps(t.metadata, ensure_ascii=False),
    }
    return facts_table(facts)


def reward_of(t: Trajectory) -> str:
    """Return a row's reward and its parts, or why it has none."""
    if t.score_status is None:
        return "not scored yet"
    if t.score_status != "scored":
        return ", ".join([t.score_status, *t.reward_parts])
    parts = ", ".join(f"{name} {number(value)}" for name, value in t.reward_parts.items())
    return f"{number(t.reward)}  {parts}"


def _call(turn: int, call: ToolCall) -> Text:
    args = json.dumps(call.args, ensure_ascii=False)
    nothing = "neither a call nor an answer" if call.error == NO_ANSWER else "a call that cannot be read"
    written = f"{call.tool}({args})" if call.tool else nothing
    outcome = Text("ok", style="green") if call.ok else Text(printable(f"failed: {call.error}"), style="red")
    return Text.assemble(printable(f"turn {turn}: {written} -> {call.result!r}, "), outcome)


def _colored(tokens: Sequence[TokenFacts], color: ColorBy) -> Iterator[RenderableType]:
    """Yield the response token by token, and what the colours mean."""
    if not tokens:
        yield Text("no tokens: the engine gave none, or the row's text is withheld", style="dim")
        return
    if all(token.of(color) is None for token in tokens):
        yield Text(WITHOUT[color], style="dim")
        return
    text = Text()
    largest = max((abs(token.advantage or 0.0) for token in tokens), default=0.0)
    for token in tokens:
        style = token_style(shade(token.of(color), color, largest)) if token.sampled else "dim"
        text.append(printable(token.text) or f"[{token.id}]", style=style)
    yield Panel(text, title=Text(f"tokens by {color}"), title_align="left", subtitle=Text(MEANING[color]))


WITHOUT = {
    "advantage": "no advantages: the rows of `advantage` hold them, and only of rows that are kept",
    "logprob": "no log-probs were recorded",
    "ratio": "no ratios: `advantage.old_logprobs = \"recompute\"` asks for the policy's own log-probs",
    "mask": "no loss mask",
}  # fmt: skip
MEANING = {
    "advantage": "green: pushed up, red: pushed down, dim: not sampled",
    "logprob": "red: unlikely when it was sampled (5 nats or more at its fullest), dim: not sampled",
    "ratio": "green: likelier at the update than when sampled, red: less likely (twice at their fullest)",
    "mask": "green: trained on, dim: not sampled",
}


def token_style(share: float) -> str:
    """Return a rich style for a shade between -1 and 1."""
    strength = min(1.0, abs(share))
    if strength < 0.02:
        return ""
    low = round(40 * strength)
    full = round(60 + 110 * strength)
    return f"on rgb({low},{full},{low})" if share > 0 else f"on rgb({full},{low},{low})"


def token_table(tokens: Sequence[TokenFacts]) -> Table:
    """Return the tokens as a table, a line each, with the columns that hold anything."""
    names = ("logprob", "advantage", "ratio", "old_logprob", "ref_logprob", "value", "return_")
    used = [name for name in names if any(getattr(token, name) is not None for token in tokens)]
    columns = [
        *(Column(name, justify="right") for name in ("token", "id", "mask")),
        Column("text", no_wrap=True, max_width=24),
        *(Column(name.removesuffix("_").replace("_", " "), justify="right", no_wrap=True) for name in used),
    ]
    grid = Table(*columns, box=None, pad_edge=False)
    for token in tokens:
        cells = ("" if value is None else f"{value:.4g}" for value in (getattr(token, name) for name in used))
        text = Text(printable(token.text).replace("\n", "\\n").replace("\t", "\\t"))
        grid.add_row(
            str(token.index), str(token.id), str(int(token.sampled)), text, *cells, style="" if token.sampled else "dim"
        )
    return grid
