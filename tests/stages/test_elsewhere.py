"""Stages whose parts are made elsewhere, and runs behind a URL: the bytes are those of a local run."""

import pickle

import pytest
from running import SMALL, manifests

from nanoskyrl.stages.core.executor import Job
from nanoskyrl.stages.core.manifest import MANIFEST
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl.stages.engines.base import make_engine
from nanoskyrl.stages.looking.show import show
from nanoskyrl.stages.running.cluster.config import shape_of
from nanoskyrl.stages.running.interface import open_run


class Elsewhere:
    """Makes parts as a worker on another machine would: of what survives the way there, and in any order."""

    def __init__(self):
        self.made = 0

    def fill(self, out, job: Job, items):
        left = []
        job = pickle.loads(pickle.dumps(job))
        engine = {} if job.engine is None else {"engine": make_engine(*job.engine)}
        make = job.begin(**job.arguments, **engine)
        for index, item in reversed(list(items)):
            found = pickle.loads(pickle.dumps(make(index, pickle.loads(pickle.dumps(item)))))
            if isinstance(found, list):
                left += found
            else:
                out.note(found)
                self.made += 1
        return left

    def facts(self):
        return {}

    def engine(self, name, config):
        return make_engine(name, config)

    def close(self):
        pass


SETTINGS = {**SMALL, "loop": {"steps": 2, "eval_every": 2}, "eval": {"limit": 8}, "rollout": {**SMALL["rollout"]}}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Return a run of two steps, made here."""
    root = tmp_path_factory.mktemp("local") / "run"
    with open_run(root, SETTINGS) as run:
        run.loop()
    return root


def test_parts_made_elsewhere_are_those_made_here(local, tmp_path):
    with open_run(tmp_path / "run", SETTINGS) as run:
        run.kept._executor = there = Elsewhere()
        run._elsewhere = lambda: {"executor": there}
        for stage in STAGES:
            run.make(stage)
        assert there.made == 3 * 2  # rollout, score and advantage, in two parts each
    ours, theirs = manifests(tmp_path / "run"), manifests(local)
    assert ours
    assert {name: data for name, data in theirs.items() if name in ours} == ours


def test_an_evaluation_made_elsewhere_is_that_made_here(local, tmp_path):
    outputs = []
    for there in (None, Elsewhere()):
        with open_run(local, SETTINGS) as run:
            if there is not None:
                run._elsewhere = lambda there=there: {"executor": there}
            outputs.append(run.eval("text_math", output=tmp_path / str(there is None)).output)
    here, there = ((output / MANIFEST).read_bytes() for output in outputs)
    assert here == there


def test_a_run_behind_a_url_is_that_of_a_local_one(local, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOSKYRL_CACHE", str(tmp_path / "mirror"))
    place = f"memory:/{tmp_path}/run"
    with open_run(place, SETTINGS) as run:
        assert run.loop() == 2
    with open_run(place, SETTINGS) as run:
        assert run.loop() == 0
    assert manifests(place) == manifests(local)
    left = [
        path.name for path in as_path(place).rglob("*") if path.name.startswith(".") or path.name == "_started.json"
    ]
    assert left == []
    show(as_path(place))


def test_workers_follow_from_the_placement():
    def shape(**tables):
        return shape_of({"rollout": {"engine": "vllm"}, **tables})

    assert shape()[:4] == (1, 0, 2, 1)
    placed = {"gpus_generate": "0-3", "gpus_train": "4-7"}
    assert shape(loop=placed) == (4, 1, 8, 4, 4)
    assert shape(loop=placed, vllm={"tensor_parallel": 2})[:2] == (2, 2)
    assert shape(rollout={"engine": "scripted"}, ray={"env_workers": 3})[:3] == (0, 0, 3)
