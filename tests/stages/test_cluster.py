"""Stages and the loop on a Ray cluster of several node processes, with a real S3 server between them."""

import os
import threading
import time

import pytest

pytest.importorskip("ray")
pytest.importorskip("moto.server")

from clusters import OBJECT_STORE, cluster_of, s3
from running import SMALL, manifests

from nanoskyrl.stages.core.errors import EngineError, OutputError, SettingsError
from nanoskyrl.stages.core.storage import as_path, create_whole, locked
from nanoskyrl.stages.running.interface import open_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROLLOUT = {"engine": "scripted", "train_batch_size": 64, "n_samples_per_prompt": 2, "rows_per_part": 4}
SLOW = {"rewards": {"clusters:slow": 1.0}, "concurrency": 1}
"""Parts of 32 that take a fifth of a second each: there is time for something to happen to them."""


@pytest.fixture(scope="module")
def store():
    with s3() as found:
        yield found


@pytest.fixture(scope="module")
def cluster(store, tmp_path_factory):
    """Two nodes of three CPUs that share neither a temporary folder nor a home."""
    with cluster_of(2, 3, tmp_path_factory.mktemp("hosts")) as found:
        yield found


def on_ray(cluster, **ray):
    return {"run": {"executor": "ray"}, "ray": {"address": cluster.address, **ray}}


def made(root, settings):
    """Return what rollout, score and advantage leave."""
    with open_run(root, settings) as run:
        for stage in ("rollout", "score", "advantage"):
            run.make(stage)
    return manifests(root)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Return what they leave when they are made here."""
    return made(tmp_path_factory.mktemp("local") / "run", {"rollout": ROLLOUT, "score": SLOW})


def after_first_part(folder, act):
    """Do something once a part is in place."""

    def wait():
        while not list(folder.glob("part-*")):
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_node_that_is_lost_takes_no_finished_part_with_it(cluster, local, tmp_path):
    """The parts that its workers had in hand are made by the others."""
    node = cluster.add_node(num_cpus=2, object_store_memory=OBJECT_STORE)
    cluster.wait_for_nodes()
    scored = tmp_path / "run" / "step-000000" / "score"
    losing = after_first_part(scored, lambda: cluster.remove_node(node, allow_graceful=False))
    with pytest.warns(UserWarning, match="worker was lost"):
        found = made(tmp_path / "run", {"rollout": ROLLOUT, "score": SLOW, **on_ray(cluster, env_workers=8)})
    losing.join()
    assert found == local


def test_a_store_that_is_away_for_a_while_is_waited_for(cluster, store, local):
    scored = as_path("s3://bucket/away") / "step-000000" / "score"
    leaving = after_first_part(scored, lambda: store.away(2.0))
    found = made("s3://bucket/away", {"rollout": ROLLOUT, "score": SLOW, **on_ray(cluster, env_workers=3)})
    leaving.join()
    assert found == local


def test_the_loop_on_ray_is_the_local_one(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOSKYRL_CACHE", str(tmp_path / "mirror"))
    settings = {**SMALL, "loop": {"steps": 2, "eval_every": 2}, "eval": {"limit": 8}}
    with open_run(tmp_path / "run", settings) as run:
        assert run.loop() == 2
    place = "s3://bucket/loop"
    with open_run(place, {**settings, **on_ray(cluster, env_workers=2, rollout_workers=1)}) as run:
        assert run.loop() == 2
    assert manifests(place) == manifests(tmp_path / "run")


def test_what_a_worker_raises_is_raised_here(cluster, tmp_path):
    settings = {"rollout": {**ROLLOUT, "stop_strings": ["x"]}, **on_ray(cluster, env_workers=1)}
    with (
        open_run(tmp_path / "run", settings) as run,
        pytest.raises(SettingsError, match=r"takes no `rollout.stop_strings`"),
    ):
        run.rollout()


def test_a_cluster_that_is_not_there_is_one_clear_error(tmp_path):
    settings = {"rollout": ROLLOUT, "run": {"executor": "ray"}, "ray": {"address": "127.0.0.1:1"}}
    with open_run(tmp_path / "run", settings) as run, pytest.raises(EngineError, match=r"no Ray cluster at"):
        run.rollout()


def test_a_store_honours_what_locks_and_commits_need(store):
    place = as_path("s3://bucket/commits")
    assert [create_whole(place / "part", data) for data in (b"first", b"second")] == [True, False]
    assert (place / "part").read_bytes() == b"first"
    with locked(place), pytest.raises(OutputError, match="another process is writing"), locked(place):
        pass
    assert [path.name for path in place.parent.iterdir() if path.name.startswith(".commits")] == []
    assert os.environ["AWS_ENDPOINT_URL"].endswith(str(store.port))
