"""A run for a terminal: its steps with what explains a stall, one step, its policies, its evaluations."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import Manifest, is_finished, read_manifest
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.runs import EVALUATIONS, Run
from nanoskyrl.stages.core.safe_text import printable
from nanoskyrl.stages.looking.console import facts_table, plain_table, with_rows
from nanoskyrl.stages.looking.curve import curve, evaluated_of, number
from nanoskyrl.stages.looking.environment_report import EnvironmentReport, environment_reports
from nanoskyrl.stages.looking.eval_report import summary_of
from nanoskyrl.stages.looking.find_rows import of_step
from nanoskyrl.stages.looking.headlines import headline
from nanoskyrl.stages.looking.reading import Remark, remarks
from nanoskyrl.stages.looking.step_numbers import BY_NAME, Steps, outliers, step_numbers
from nanoskyrl.stages.models.policy import count_parameters, is_adapter, policy_digest, policy_files, read_info

SHOWN = ("success", "reward", "signal", "tokens", "cut", "failed", "entropy", "kl", "grad", "loss", "seconds")
"""Numbers in the table of steps, in their order."""
TONES = {"good": "green", "note": "", "warning": "yellow"}


def run_blocks(run: Run, limit: int) -> Iterator[RenderableType]:
    """Yield the table of a run's newest steps, what it says, and the curve."""
    steps, numbers = step_numbers(run)
    yield steps_table(run, steps, numbers, limit)
    if len(steps) > limit:
        yield Text(f"{len(steps) - limit} earlier steps; `--limit {len(steps)}` shows all", style="dim")
    if any(any(outliers(name, numbers[name])) for name in SHOWN):
        yield Text("! stands out from the steps around it", style="bold red")
    yield from remark_lines(remarks(steps, numbers))
    yield Text(printable(curve(run)))


def remark_lines(found: Sequence[Remark]) -> list[Text]:
    """Return remarks, a line each."""
    return [Text(f"- {remark.text}", style=TONES[remark.tone]) for remark in found]


def steps_table(run: Run, steps: Sequence[int], numbers: Steps, limit: int) -> Table:
    """Return the newest steps as a table; what stands out from the steps around it is marked."""
    heads = ("step", "done", *(BY_NAME[name].label for name in SHOWN))
    columns = (Column(head, justify="right", no_wrap=True) for head in heads)
    marked = {name: outliers(name, numbers[name]) for name in SHOWN}
    rows = (
        [str(steps[at]), done(run, steps[at]), *(marked_number(numbers[name][at], marked[name][at]) for name in SHOWN)]
        for at in range(max(0, len(steps) - limit), len(steps))
    )
    return with_rows(Table(*columns, box=None, pad_edge=False, padding=(0, 1, 0, 0)), rows)


def marked_number(value: float | None, stands_out: bool, digits: int = 3) -> Text:
    """Return a number of a step with so many digits, marked where it stands out."""
    text = "" if value is None else f"{value:.{digits}g}{'!' * stands_out}"
    return Text(text, style="bold red" if stands_out else "")


def done(run: Run, step: int) -> str:
    """Return how far a step is: up to the stage of which nothing was made yet."""
    made = run.made(step) if run.step(step).is_dir() else []
    finished = {name: found for name in made if (found := readable(run.stage(step, name)))}
    used = {name for manifest in finished.values() for name in manifest.inputs}
    last = [name for name in finished if name not in used]
    return "all" if {*STAGES} <= {*finished} else f"to {last[-1]}" if last else "none"


def readable(directory: Path) -> Manifest | None:
    """Return the manifest of a stage that ended here; None if there is none, or one that `verify` calls broken."""
    try:
        return read_manifest(directory) if is_finished(directory) else None
    except InputError:
        return None


def run_as_plain(run: Run) -> dict[str, Any]:
    """Return a run's steps with their numbers and what they say, JSON-ready."""
    steps, numbers = step_numbers(run)
    marked = {name: outliers(name, values) for name, values in numbers.items()}
    return {
        "run": str(run.root),
        "policies": run.policies(),
        "steps": [
            {
                "step": step,
                "done": done(run, step),
                **{name: values[index] for name, values in numbers.items()},
                "stands_out": [name for name in numbers if marked[name][index]],
            }
            for index, step in enumerate(steps)
        ],
        "remarks": [{"tone": remark.tone, "text": remark.text} for remark in remarks(steps, numbers)],
    }


def step_blocks(run: Run, step: int) -> Iterator[RenderableType]:
    """Yield what each stage of a step left, and its attempts by environment."""
    for stage in dict.fromkeys([*STAGES, *run.made(step)]):
        place = run.stage(step, stage)
        if manifest := readable(place):
            yield Text(f"{stage:<10} {headline(manifest, place)}")
        else:
            yield Text(f"{stage:<10} {'unfinished' if place.is_dir() else 'not begun'}", style="dim")
    yield Text()
    yield environment_table(environment_reports(of_step(run, step)))


def environment_table(found: dict[str, EnvironmentReport]) -> Table:
    """Return the attempts of each environment as a table, a column each."""
    plain = {name: report.to_plain() for name, report in found.items()}
    sizes = sorted({numbers["n"] for numbers in plain.values()})
    labels = {
        "attempts": "attempts", "groups": "groups", "turns_mean": "turns, mean", "tool_calls_mean": "tool calls, mean",
        "failed_calls_mean": "failed calls, mean", "tokens_mean": "sampled tokens, mean", "success": "success",
        "reward": "reward", "pass_at_n": f"pass@{sizes[0] if len(sizes) == 1 else 'n'}",
        "variance_per_prompt": "variance per prompt", "signal": "groups with signal", "reading": "reading",
    }  # fmt: skip
    rows = [[label, *(_cell(numbers[key]) for numbers in plain.values())] for key, label in labels.items()]
    patterns = dict.fromkeys(pattern for numbers in plain.values() for pattern in numbers["patterns"])
    rows += [[f"with {pattern}", *(_share(numbers, pattern) for numbers in plain.values())] for pattern in patterns]
    return plain_table(["", *(Text(printable(name)) for name in plain)], rows, left=[""])


def _cell(value: float | str | None) -> str:
    return str(value) if isinstance(value, int | str) else number(value)


def _share(numbers: dict[str, Any], pattern: str) -> str:
    count = numbers["patterns"].get(pattern, 0)
    return f"{count} ({count / (numbers['attempts'] or 1):.1%})"


def policies_as_plain(run: Run) -> list[dict[str, Any]]:
    """Return what is known of each published policy: version, digest, parent, the step that made it, evaluations."""
    versions = {}
    found = []
    for version in run.policies():
        place = run.policy(version)
        info, digest = read_info(place), policy_digest(place)
        versions[digest] = version
        outputs = filter(readable, run.evaluations(place.name))
        evaluated = {output.name: summary_of(output).get("success") for output in outputs}
        made = f"step {version - 1}" if version and is_finished(run.stage(version - 1, "sync")) else info.source
        found.append(
            {
                "version": version,
                "digest": digest,
                "parent": None if info.parent is None else versions.get(info.parent, info.parent),
                "made_by": made,
                "evaluations": evaluated,
            }
        )
    return found


def policies_table(found: Sequence[dict[str, Any]]) -> Table:
    """Return a run's policies as a table."""
    words = ("digest", "parent", "made by", "evaluations")
    return plain_table(("version", *words), map(_policy_cells, found), left=words, wrapped=())


def _policy_cells(policy: dict[str, Any]) -> list[RenderableType]:
    parent = policy["parent"]
    whose = "" if parent is None else f"policy {parent}" if isinstance(parent, int) else parent[:12]
    shown = ", ".join(f"{name} {number(value)}" for name, value in policy["evaluations"].items())
    texts = (whose, str(policy["made_by"] or "unknown"), shown)
    return [str(policy["version"]), policy["digest"][:12], *(Text(printable(text)) for text in texts)]


def policy_as_plain(place: Path) -> dict[str, Any]:
    """Return what is known of one policy."""
    info = read_info(place)
    return {
        "policy": str(place),
        "digest": policy_digest(place),
        "parent": info.parent,
        "made_from": info.source,
        "parameters": count_parameters(place),
        "adapter": is_adapter(place),
        "files": [file.name for file in policy_files(place)],
    }


def policy_table(found: dict[str, Any]) -> Table:
    """Return one policy as a table."""
    facts = {
        **found,
        "parent": found["parent"] or "none",
        "made_from": found["made_from"] or "unknown",
        "parameters": f"{found['parameters']:,}" + (" (adapter)" if found["adapter"] else ""),
        "files": ", ".join(found["files"]),
    }
    return facts_table({name.replace("_", " "): str(value) for name, value in facts.items() if name != "adapter"})


def evaluations_in(place: Path) -> dict[str, dict[str, Any]]:
    """Return the summaries of the finished evaluations under a folder of `evals`, by policy and what was evaluated."""
    depth = "*/*" if place.name == EVALUATIONS else "*"
    outputs = [output for output in sorted(place.glob(depth)) if readable(output)]
    names = (f"{evaluated_of(output)} {output.name}" for output in outputs)
    return {name: summary_of(output) for name, output in zip(names, outputs, strict=True)}
