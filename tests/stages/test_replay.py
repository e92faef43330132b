"""An optimizer's state that was not written is made again from the shards, to the last bit."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from killing import FORKS, kill_at
from running import SMALL, as_flags, manifests, same_bytes, skyrl_here

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import is_finished
from nanoskyrl.stages.core.metrics import latest, read_metrics
from nanoskyrl.stages.core.runs import STAGES, Run
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl.stages.running.loop import loop
from nanoskyrl.stages.running.session import Session


def state_every(count):
    """Return settings under which every so many steps a state is written, the second of them at the last."""
    return merge(SMALL, {"loop": {"steps": 2 * count, "keep_states": 0}, "train": {"state_every": count}})


def states(run, steps):
    return [(run.stage(step, "train") / "state").is_dir() for step in range(steps)]


def state_bytes(run, step):
    return {path.name: path.read_bytes() for path in (run.stage(step, "train") / "state").iterdir()}


def killed_in_mid_replay(arguments):
    """Run the command until an update was made again, and return how the process ended."""
    process = FORKS.Process(target=_kill_after_one, args=([str(argument) for argument in arguments],))
    process.start()
    process.join()
    return process.exitcode


def _kill_after_one(arguments):
    from nanoskyrl.stages.learning import replay
    from nanoskyrl_cli.main import run

    real = replay._make
    replay._make = lambda *given: (real(*given), os.kill(os.getpid(), signal.SIGKILL))
    raise SystemExit(run(arguments))


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_between_two_states_and_in_mid_replay_a_run_ends_with_the_bytes_of_an_unbroken_one(count, tmp_path):
    whole, broken, last = Run(tmp_path / "whole"), Run(tmp_path / "broken"), 2 * count - 1
    loop(whole, state_every(count))
    written = [*[False] * (count - 1), True] * 2
    assert states(whole, 2 * count) == written
    command = ["loop", "--run", broken.root, *as_flags(state_every(count))]
    assert kill_at("score", 4 * last + 1, command) == -signal.SIGKILL  # four files a step
    assert is_finished(broken.stage(last - 1, "sync"))
    assert states(broken, last) == written[:-1]
    assert killed_in_mid_replay(command) == -signal.SIGKILL  # one of the updates was made again
    assert not is_finished(broken.stage(last, "train"))
    done = skyrl_here(*command)
    assert done.returncode == 0, done.stderr
    assert manifests(whole.root) == manifests(broken.root)
    assert same_bytes(whole.root, broken.root) == []
    assert state_bytes(whole, last) == state_bytes(broken, last)
    lines = [latest(read_metrics(run.metrics), "train")[last] for run in (whole, broken)]
    assert [line.get("train/replayed_updates") for line in lines] == [None, count - 1]


def killed_over_a_state(number, arguments):
    """Run the command until a state is about to be put in its place, and return how the process ended."""
    process = FORKS.Process(target=_kill_over_a_state, args=(number, [str(argument) for argument in arguments]))
    process.start()
    process.join()
    return process.exitcode


def _kill_over_a_state(number, arguments):
    from nanoskyrl_cli.main import run

    real, left = Path.rename, [number]

    def rename(self, target):
        if Path(target).name == "state":
            left[0] -= 1
            while not left[0]:  # in a thread of its own: the next step runs until it has made a part
                if (Path(target).parents[1].with_name("step-000002") / "score" / "part-00000.parquet").exists():
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.01)
        return real(self, target)

    Path.rename = rename
    raise SystemExit(run(arguments))


def test_killed_over_a_state_that_was_on_its_way_a_run_ends_with_the_bytes_of_an_unbroken_one(tmp_path):
    whole, broken = Run(tmp_path / "whole"), Run(tmp_path / "broken")
    loop(whole, state_every(2))
    command = ["loop", "--run", broken.root, *as_flags(state_every(2))]
    assert killed_over_a_state(1, command) == -signal.SIGKILL
    assert is_finished(broken.stage(1, "sync"))
    assert states(broken, 2) == [False, False]
    done = skyrl_here(*command)
    assert done.returncode == 0, done.stderr
    assert same_bytes(whole.root, broken.root) == []
    assert states(broken, 4) == [False, True, False, True]
    assert [state_bytes(whole, step) == state_bytes(broken, step) for step in (1, 3)] == [True, True]
    assert verify(broken.root).pruned == []
    assert not list(broken.root.glob("step-*/train/*.tmp"))


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()  # published weights are hard links
    path.write_bytes(data)


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("replay") / "run")
    loop(run, state_every(2))
    return run


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("step-000001/train/state/optimizer.pt", "has another digest than its manifest says"),
        ("policies/00000002/model.safetensors", "what it learnt from is another now"),
        ("step-000002/advantage/part-00000.parquet", "corrupt"),
    ],
)
def test_a_state_is_not_made_again_from_what_was_changed(four_steps, tmp_path, file, told):
    run = Run(tmp_path / "run")
    shutil.copytree(four_steps.root, run.root)
    shutil.rmtree(run.stage(3, "train") / "state")
    flipped(run.root / file)
    with pytest.raises(InputError, match=told):
        loop(run, merge(state_every(2), {"loop": {"steps": 5}}))


def test_a_state_that_is_gone_is_made_again_and_put_back_and_what_was_left_over_it_goes(four_steps, tmp_path):
    run = Run(tmp_path / "run")
    shutil.copytree(four_steps.root, run.root)
    shutil.move(run.stage(3, "train") / "state", run.stage(3, "train") / "state-left.tmp")
    loop(run, merge(state_every(2), {"loop": {"steps": 5}}))
    assert state_bytes(run, 3) == state_bytes(four_steps, 3)
    assert not list(run.root.glob("step-*/train/*.tmp"))
    assert verify(run.root).holds
    Session(run, state_every(2)).prune(4, 1)
    assert states(run, 5) == [False, False, False, True, False]


def test_a_state_that_lacks_a_file_is_made_again(four_steps, tmp_path):
    run = Run(tmp_path / "run")
    shutil.copytree(four_steps.root, run.root)
    (run.stage(3, "train") / "state" / "optimizer.pt").unlink()
    loop(run, merge(state_every(2), {"loop": {"steps": 5}}))
    assert state_bytes(run, 3) == state_bytes(four_steps, 3)
    assert verify(run.root).holds


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"lora_rank": 4}, marks=pytest.mark.slow),
        pytest.param(
            {"algo": "ppo", "policy_mini_batch_size": 2, "update_epochs_per_batch": 2}, marks=pytest.mark.slow
        ),
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_by_hand_under_rates_that_change_the_state_is_that_of_one_who_wrote_them_all(tmp_path, more):
    rates = (1e-3, 1e-3, 2e-4)
    for every in (1, 3):
        run = Run(tmp_path / str(every))
        for step, lr in enumerate(rates):
            settings = merge(SMALL, {"train": {**more, "lr": lr, "state_every": every}})
            settings = merge(settings, {"sync": {"tolerance": 1.0}})  # the engine computes in float32
            for stage in STAGES:
                getattr(Session(run, settings), stage)(step)
    one, three = (Run(tmp_path / str(every)) for every in (1, 3))
    assert states(three, 3) == [False, False, True]
    assert state_bytes(one, 2) == state_bytes(three, 2)
    policies = [
        {path.relative_to(run.root): path.read_bytes() for path in run.policy(3).rglob("*") if path.is_file()}
        for run in (one, three)
    ]
    assert policies[0] == policies[1]
    settings = merge(SMALL, {"train": {**more, "lr": rates[-1], "state_every": 3}})
    shutil.rmtree(three.stage(1, "advantage"))
    with pytest.raises(InputError, match="step-000001/advantage"):
        Session(three, settings).train(2, force=True)


def test_the_newest_states_that_were_written_are_kept(tmp_path):
    run = Run(tmp_path / "run")
    session = Session(run, state_every(2))
    for step in range(6):
        (run.stage(step, "train") / "state").mkdir(parents=True) if step % 2 else None
        session.prune(step, 2)
        assert states(run, 6).count(True) == min(2, (step + 1) // 2)
    assert states(run, 6) == [False, False, False, True, False, True]
