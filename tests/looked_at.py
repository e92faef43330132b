"""Runs to look at: a small real one, and one whose policy wrote what does harm where it is obeyed."""

import json
from pathlib import Path

from running import SMALL, skyrl_here

from nanoskyrl.stages.core.metrics import MetricsLog
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.running.loop import loop

HOSTILE = (
    '<script>window.pwned = 1</script><img src=x onerror="window.pwned = 2"></script><!--'
    '<a href="javascript:window.pwned=3">x</a><style>*{display:none}</style>'
    "\x1b]0;pwned\x07\x1b[31mred\x1b[2J \u202eoverridden \x9b1m [bold]markup[/bold] \\u003c {{ 7 * 7 }} & \u2028"
    "</textarea>"
)
"""A completion that a page or a terminal must show and never obey."""
TASKS = ("calculator-1-005118", "calculator-1-004107")


def small_run(root: Path, steps: int = 2, **rollout: object) -> Run:
    """Train the starter on tool_use for a few small steps."""
    settings = {
        "rollout": {**SMALL["rollout"], "env": "tool_use", "max_turns": 3, "max_generate_length": 40, **rollout}
    }
    loop(Run(root), {**settings, "loop": {"steps": steps, "eval_every": steps}, "eval": {"limit": 8, "n_samples": 1}})
    return Run(root)


def hostile_run(root: Path) -> Run:
    """Attempt two tasks with a policy that writes HOSTILE, in a call that cannot be read and as its answer."""
    actions = root.parent / "actions.jsonl"
    said = [f"<tool_call>{HOSTILE}</tool_call>", f"<answer>{HOSTILE}</answer>"]
    actions.write_text("".join(json.dumps({"task_id": task, "actions": said}) + "\n" for task in TASKS))
    flags = [
        "--env",
        "tool_use",
        "--engine",
        "scripted",
        "--set",
        f"scripted.actions={actions}",
        "--tasks",
        ",".join(TASKS),
    ]
    sizes = ["--train-batch-size", "2", "--n-samples-per-prompt", "2", "--max-turns", "3"]
    for command in (["rollout", *flags, *sizes], ["score"]):
        done = skyrl_here(*command, "--run", root)
        assert done.returncode == 0, done.stderr
    return Run(root)


def told_run(root: Path, **numbers: list[float | None]) -> Run:
    """Write the numbers to metrics.jsonl: success, signal, entropy, kl, tokens, cut and failed, a list each."""
    run = Run(root)
    steps = max(map(len, numbers.values()))
    of = {name: [*values, *[None] * (steps - len(values))] for name, values in numbers.items()}
    for step in range(steps):
        at = {name: values[step] for name, values in of.items()}
        log = MetricsLog(run.metrics, step)
        cut = at.get("cut")
        log.write(
            "rollout",
            {
                "rollout/rows": 100,
                "rollout/response_tokens/mean": at.get("tokens"),
                "rollout/stop_reason/length": None if cut is None else round(100 * cut),
                "rollout/tool_calls": 100,
                "rollout/failed_calls": None if at.get("failed") is None else round(100 * (at["failed"] or 0)),
            },
        )
        log.write("score", {"reward/success": at.get("success"), "reward/groups_with_signal": at.get("signal")})
        log.write("train", {"policy/policy_entropy": at.get("entropy"), "policy/ppo_kl": at.get("kl")})
    return run
