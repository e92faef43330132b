"""Every second of a stage has a name in its line of metrics.jsonl."""

import pytest
from running import SMALL

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.metrics import read_metrics
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.running.loop import loop

NAMES = {
    "rollout": {"prepare", "load", "generate", "env", "rows", "write", "summary"},
    "score": {"prepare", "read", "score", "write", "summary"},
    "advantage": {"prepare", "read", "estimate", "check", "write", "summary"},
    "train": {"prepare", "read", "load", "train", "save"},
    "sync": {"prepare", "proof", "publish", "write"},
    "eval": {"prepare", "load", "generate", "env", "rows", "score", "write", "summary"},
}
"""Of what takes time in each stage."""


def test_the_parts_of_each_stage_sum_to_the_whole(tmp_path):
    run = Run(tmp_path / "run")
    loop(run, merge(SMALL, {"loop": {"steps": 1, "eval_every": 1}, "eval": {"limit": 2}}))
    lines = {line["stage"]: line for line in read_metrics(run.metrics)}
    for stage, names in NAMES.items():
        timings = {name.removeprefix("timing/"): value for name, value in lines[stage].items() if "timing/" in name}
        total = timings.pop("total")
        assert names <= timings.keys(), stage
        assert sum(timings.values()) == pytest.approx(total, rel=1e-6), stage
