"""What `verify` finds in runs that were made false, and what it does not say of honest ones."""

import random
import shutil

import pytest
from falsified import WAYS
from running import SMALL

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl.stages.running.loop import loop

SETTINGS = merge(SMALL, {"loop": {"steps": 2, "eval_every": 1}, "eval": {"limit": 4}})
QUICK = 12
"""Ways of which a default run tries one in so many."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """Two steps with an evaluation of every policy."""
    root = tmp_path_factory.mktemp("honest") / "run"
    loop(Run(root), SETTINGS)
    return root


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The same with another seed."""
    root = tmp_path_factory.mktemp("other") / "run"
    loop(Run(root), merge(SETTINGS, {"run": {"seed": 1}}))
    return root


def test_an_honest_run_is_proved_from_its_evaluations_to_its_first_policy(honest):
    found = verify(honest)
    assert (found.broken, found.notes, found.unfinished) == ([], [], [])
    assert {"files", "manifests", "references", "policies", "evaluations", "ledger counts", "texts"} <= set(
        found.proved
    )


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if i % QUICK else []) for i, way in enumerate(WAYS)]
)
def test_what_was_made_false_is_found_and_named(honest, other, tmp_path, way):
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    named = WAYS[way](run, other, random.Random(way))
    broken = verify(run).broken
    assert [line for line in broken if named in line], broken or "nothing is broken"


def test_a_loop_that_was_killed_in_its_last_evaluation_makes_it_when_it_is_called_again(honest, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    place = run / "evals" / "00000002" / "text_math"
    before = (place / "_manifest.json").read_bytes()
    shutil.rmtree(place)
    loop(Run(run), SETTINGS)
    assert (place / "_manifest.json").read_bytes() == before
    assert verify(run).holds
