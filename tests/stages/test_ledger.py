"""The ledger of a run closes: rows and tokens generated are those trained on and those left out, by each reason."""

import json

import pytest
from falsified import forge, relink
from running import SMALL, skyrl_here

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.looking.ledger import ledger_at, rows_of, tokens_of
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl.stages.running.session import Session

WORLD = """
from nanoskyrl.envs.worlds.text_math.environment import TextMath, TextMathEpisode

class Breaking(TextMathEpisode):
    def reset(self, task, seed):
        if seed % 7 == 0:
            raise RuntimeError("the world is gone")
        return super().reset(task, seed)

class Sometimes(TextMath):
    def start(self):
        return Breaking(self.config.reasoning_marks)
"""
SETTINGS = merge(
    SMALL,
    {
        "rollout": {"env": "ledger_world:Sometimes", "max_generate_length": 14, "train_batch_size": 8},
        "advantage": {"overlong_filter": True, "drop_zero_variance": True},
    },
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps; the second is given the rows of the first, too, which are too old for it."""
    here = tmp_path_factory.mktemp("ledger")
    (here / "ledger_world.py").write_text(WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(here))
        run = Run(here / "run")
        for step in range(2):
            session = Session(run, SETTINGS if not step else merge(SETTINGS, {"train": {"max_staleness": 0}}))
            session.rollout()
            session.score()
            session.advantage()
            session.train(source=[run.stage(earlier, "advantage") for earlier in range(step, -1, -1)])
            session.sync()
    return run


def test_rows_and_tokens_are_all_accounted_for(run):
    ledger = ledger_at(run.root)
    fates = ledger.sums()["all"]
    assert {"trained", "failed", "overlong", "zero_variance"} <= fates.keys()
    tables = [rows_of(run, step) for step in run.steps()]
    assert sum(rows for rows, _ in fates.values()) == sum(table.num_rows for table in tables)
    assert sum(tokens for _, tokens in fates.values()) == sum(sum(tokens_of(table)) for table in tables)
    for by in ("length", "difficulty"):
        parts = ledger.sums(by).values()
        assert {
            fate: (sum(part.get(fate, (0, 0))[0] for part in parts), sum(part.get(fate, (0, 0))[1] for part in parts))
            for fate in fates
        } == fates
    updates = [read_parts(run.stage(step, "train"), read_manifest(run.stage(step, "train"))) for step in run.steps()]
    learned = {name for tables in updates for table in tables for name in table.column("trajectory_id").to_pylist()}
    assert fates["trained"][0] == len(learned)


def test_old_rows_are_counted_as_stale_and_verify_holds(run):
    assert read_manifest(run.stage(1, "train")).facts["stale_rows"] > 0
    found = verify(run.root)
    assert found.broken == []
    assert found.proved["ledger counts"] == 10


def test_it_is_printed_and_told_as_json(run):
    assert "zero variance" in skyrl_here("show", run.root, "--ledger").stdout
    told = json.loads(skyrl_here("show", run.root, "--ledger", "--json").stdout)
    fates = [told[name]["rows"] for name in ("trained", "failed", "overlong", "zero_variance")]
    assert sum(fates) <= told["generated"]["rows"]


@pytest.mark.parametrize(
    ("stage", "forged"),
    [
        ("train", {"facts": lambda facts: facts | {"stale_rows": facts["stale_rows"] - 1}}),
        ("advantage", {"dropped": lambda dropped: dropped | {"failed": dropped["failed"] + 1}}),
        ("rollout", {"dropped": lambda dropped: {}}),
    ],
)
def test_a_forged_count_is_found(run, tmp_path, stage, forged):
    import shutil

    shutil.copytree(run.root, tmp_path / "run")
    place = tmp_path / "run" / "step-000001" / stage
    forge(place, **forged)
    relink(tmp_path / "run")
    assert any(str(place) in line for line in verify(tmp_path / "run").broken)
