"""What the output of a stage holds, in one line; the commands end with it."""

from pathlib import Path

from nanoskyrl.stages import rollout as rollout_stage, score as score_stage
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import PASSES_ON, Manifest
from nanoskyrl.stages.core.safe_text import printable
from nanoskyrl.stages.looking.curve import number, success_keys


def headline(manifest: Manifest, output: Path) -> str:
    """Return one line that says what a stage's output holds."""
    lines = {
        "rollout": _rollout_line, "score": _score_line, "advantage": _advantage_line, "train": _train_line,
        "sync": _sync_line, "eval": _eval_line,
    }  # fmt: skip
    try:
        text = lines.get(manifest.stage, _own_line)(manifest, output)
    # A manifest that somebody made by hand, or an evaluation whose summary is gone.
    except (InputError, KeyError, TypeError, AttributeError, ValueError, OSError):
        text = f"{manifest.rows_out} rows of `{manifest.stage}`"
    return printable(f"{text}: {output}")


def _rollout_line(manifest: Manifest, output: Path) -> str:
    numbers = rollout_stage.numbers_of(output, manifest)
    ends = ", ".join(f"{key.rsplit('/', 1)[1]} {value}" for key, value in numbers.items() if "/stop_reason/" in key)
    settings = manifest.settings["rollout"]
    turns, tokens = numbers["rollout/turns/mean"] or 0, numbers["rollout/response_tokens/mean"]
    each = f"{turns:.1f} turns and {'?' if tokens is None else f'{tokens:.0f}'} sampled tokens each"
    return f"{manifest.rows_out} rows of {settings['env']}, {each}, ended by {ends}"


def _score_line(manifest: Manifest, output: Path) -> str:
    numbers = score_stage.numbers_of(output, manifest)
    success, reward = number(numbers["reward/success"]), number(numbers["reward/avg_raw_reward"])
    scored = manifest.rows_out - sum(manifest.dropped.values())
    unjudged = manifest.facts.get("unjudged")
    why = f"; {unjudged['count']} trajectories: {unjudged['reason']}" if unjudged else ""
    of_envs = "".join(f", {name} {number(numbers[key])}" for name, key in success_keys(numbers).items())
    counts = f"{scored} of {manifest.rows_out} rows scored{_dropped(manifest, '')}"
    return f"{counts}, success {success}{of_envs}, reward {reward}{why}"


def _advantage_line(manifest: Manifest, output: Path) -> str:
    kept = manifest.rows_out - sum(manifest.dropped.values())
    return f"{kept} of {manifest.rows_out} rows to learn from{_dropped(manifest, 'left out: ')}"


def _dropped(manifest: Manifest, what: str) -> str:
    """Return the rows that a manifest counts by reason, behind a word, in brackets; empty where there are none."""
    counts = ", ".join(f"{reason} {count}" for reason, count in manifest.dropped.items())
    return f" ({what}{counts})" if counts else ""


def _own_line(manifest: Manifest, output: Path) -> str:
    """Return what a stage of somebody's own did to the rows that it passed on."""
    left = (
        f"{manifest.rows_out} of {manifest.rows_in} rows of {manifest.facts[PASSES_ON]} passed on by {manifest.stage}"
    )
    return left + _dropped(manifest, "dropped: ")


def _train_line(manifest: Manifest, output: Path) -> str:
    settings, facts = manifest.settings["train"], manifest.facts
    how = f"LoRA rank {facts['lora_rank']}" if facts["lora_rank"] else "the whole model"
    if "trained_parameters" in facts:
        how += f" ({facts['trained_parameters'] / facts['parameters']:.2%} of {facts['parameters']:,} weights)"
    steps = "1 optimizer step" if facts["optimizer_steps"] == 1 else f"{facts['optimizer_steps']} optimizer steps"
    shared = ""
    if computed := facts.get("computed_tokens"):
        shared = f"; shared {1 - computed / facts['tokens']:.0%}, limit {facts['tokens'] / computed:.1f}x"
    return f"policy trained with {settings['algo']}, {steps} on {how}, lr {facts['lr']:g}{shared}"


def _sync_line(manifest: Manifest, output: Path) -> str:
    version = manifest.facts.get("version")
    same = ", the same as before" if manifest.facts.get("changed") is False else ""
    return f"policy {version if version is not None else manifest.facts['policy'][:12]} published and proved{same}"


def _eval_line(manifest: Manifest, output: Path) -> str:
    from nanoskyrl.stages.looking.eval_report import summary_of

    numbers = summary_of(output)
    low, high = numbers["success_95"] or (None, None)
    env = manifest.settings["rollout"]["env"]
    # A benchmark has no other tasks than these.
    tasks = "tasks" if "benchmark" in numbers else "held-out tasks" if numbers["held_out"] else "training tasks"
    success = f"success {number(numbers['success'])} [{number(low)}, {number(high)}]"
    return f"{success} on {numbers['tasks']} {tasks} of {env}"
