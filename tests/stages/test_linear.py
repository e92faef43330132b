"""Twice the rows are twice the work: no stage walks all of its rows for each of them. Calls are counted."""

import cProfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from running import SMALL
from tiny_models import rows

from nanoskyrl.stages.advantage import advantage
from nanoskyrl.stages.core.manifest import Head, read_manifest
from nanoskyrl.stages.core.output import open_output
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.learning.advantage_config import AdvantageConfig
from nanoskyrl.stages.learning.batching import collate_all, with_marks
from nanoskyrl.stages.learning.train_config import TrainConfig
from nanoskyrl.stages.models.policy import resolve_policy
from nanoskyrl.stages.running.session import Session
from nanoskyrl.stages.score import ScoreConfig, score
from nanoskyrl.stages.train import preview, train

TIMES = (4, 8, 16)
"""How often the rows of a step are there."""
ROWS = 16
STARTER = resolve_policy("starter")


def copied(source: Path, target: Path, times: int) -> None:
    """Write finished shards with each of their groups so many times, under other names."""
    made = read_manifest(source)
    whole = pa.concat_tables(read_parts(source, made))
    with open_output(target, Head(stage=made.stage, settings=made.settings, policy=made.policy)) as out:
        for index in range(times):
            copy = whole
            for name in ("trajectory_id", "group_id"):
                renamed = pa.array([f"{index}-{value}" for value in whole.column(name).to_pylist()])
                copy = copy.set_column(copy.column_names.index(name), copy.field(name), renamed)
            out.write_part(index, copy)
        out.finish(rows_in=whole.num_rows * times)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Return directories of the same step with so many times its rows."""
    root = tmp_path_factory.mktemp("steps")
    session = Session(Run(root / "run"), SMALL)
    for stage in ("rollout", "score", "advantage"):
        session.make(stage, 0)
        for times in TIMES:
            copied(session.run.stage(0, stage), root / str(times) / stage, times)
    return root


def calls(work, *given, **named):
    """Return how often each function was called, C's own among them."""
    profile = cProfile.Profile()
    profile.runcall(work, *given, **named)
    found = Counter()
    for entry in profile.getstats():
        code = entry.code
        found[code if isinstance(code, str) else f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"] += (
            entry.callcount
        )
    return found


@pytest.mark.parametrize(
    ("stage", "work"),
    [
        ("rollout", lambda source, out: score(source, out, ScoreConfig())),
        ("score", lambda source, out: advantage(source, out, AdvantageConfig())),
        ("advantage", lambda source, out: preview(source, TrainConfig(), policy=STARTER)),
        ("advantage", lambda source, out: train(source, out, TrainConfig(policy_mini_batch_size=1), policy=STARTER)),
    ],
    ids=["score", "advantage", "dry run", "train"],
)
def test_calls_grow_with_the_rows_and_not_with_their_square(steps, tmp_path, stage, work):
    work(steps / str(TIMES[0]) / stage, tmp_path / "first")  # imports
    few, more, most = (calls(work, steps / str(times) / stage, tmp_path / str(times)) for times in TIMES)
    # The step from 8 to 16 is twice that from 4 to 8, and four times where the square counts.
    grown = {name: (more[name] - few[name], most[name] - more[name]) for name in most}
    assert {name: pair for name, pair in grown.items() if pair[1] > 3 * max(pair[0], 0) + 16 * ROWS} == {}


def test_a_mini_batch_with_marks_looks_at_its_own_rows_alone():
    own = [0, 1, 2]

    def mini_batch(sequences):
        return list(collate_all(with_marks(sequences, own, [None] * len(own)), own, 64, "cpu"))

    few = rows(100)
    many = few.take([*range(len(few))] * 10)
    mini_batch(few)
    assert calls(mini_batch, few).total() == calls(mini_batch, many).total()
