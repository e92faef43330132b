"""Honest runs, of which `verify` names nothing: resumed, forced, moved, with lag, and whatever else a run may meet."""

import shutil

import pytest
from falsified import forge, relink
from running import SMALL

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.output import discard
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl.stages.running.loop import loop
from nanoskyrl.stages.running.run_settings import change_settings, kept_settings
from nanoskyrl.stages.running.session import Session

REWARDS = "def short(completions, **kwargs):\n    return [{value} / (1 + len(text)) for text in completions]\n"


def steps(count, **tables):
    return merge(SMALL, {"loop": {"steps": count}}, tables)


def settled(**tables):
    def make(root):
        loop(Run(root), steps(2, **tables))
        return root

    return make


def resumed(root):
    for count in (1, 2, 3):
        loop(Run(root), steps(count))
    return root


def interrupted(stage):
    def make(root):
        loop(Run(root), steps(2))
        for name in STAGES[STAGES.index(stage) :]:
            discard(Run(root).stage(1, name))
        shutil.rmtree(Run(root).policy(2))
        loop(Run(root), steps(2))
        return root

    return make


def forced(root):
    loop(Run(root), steps(1))
    loop(Run(root), steps(2, train={"lr": 1e-3}), force=True)
    return root


def set_between(root):
    loop(Run(root), steps(1))
    change_settings(Run(root), {"train": {"lr": 1e-3}, "rollout": {"temperature": 0.8}})
    loop(Run(root), merge(kept_settings(Run(root)), {"loop": {"steps": 2}}), force=True)
    return root


def moved(root):
    settled()(root.parent / "before")
    shutil.move(root.parent / "before", root)
    loop(Run(root), steps(3))
    return root


def copied(root):
    shutil.copytree(settled()(root.parent / "before"), root)
    return root


def upgraded(root):
    """The first step was made by code of which a module is another now."""
    loop(Run(root), steps(1))
    earlier = {"version": "0.0.9", "digest": "0" * 64}
    for stage in STAGES:
        forge(
            Run(root).stage(0, stage),
            code=lambda code: code | earlier | {"modules": dict.fromkeys(code["modules"], "0" * 12)},
        )
    relink(root)
    loop(Run(root), steps(2))
    return root


def rewards_changed(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root.parent))
        for count in (1, 2):
            (root.parent / "honest_rewards.py").write_text(REWARDS.format(value=count))
            loop(Run(root), steps(count, score={"rewards": {"honest_rewards:short": 1.0}}), force=count == 2)
    return root


def by_hand(root):
    session = Session(Run(root), steps(2))
    for _ in range(2):
        session.rollout()
        session.score()
        session.score(force=True)
        session.advantage()
        session.train()
        session.sync()
    return root


def window(root):
    """The second step learns from the first one's rows again."""
    loop(Run(root), steps(1))
    run, session = Run(root), Session(Run(root), steps(2))
    session.rollout()
    session.score()
    session.advantage()
    session.train(source=[run.stage(1, "advantage"), run.stage(0, "advantage")])
    session.sync()
    return root


HONEST = {
    "several environments": settled(rollout={"env": {"text_math": 1, "tool_use": 1}, "rows_per_part": 8}),
    "lag": settled(run={"lag": 1}),
    "set between two steps": set_between,
    "code upgraded": upgraded,
    "resumed": resumed,
    "forced": forced,
    "moved, and resumed": moved,
    "copied": copied,
    "more lag than steps": settled(run={"lag": 3}),
    "rewards whose code changed": rewards_changed,
    "by hand, scored again": by_hand,
    "a replay window": window,
    **{f"interrupted in {stage}": interrupted(stage) for stage in STAGES},
    "evaluated, states pruned": settled(loop={"steps": 3, "eval_every": 1, "keep_states": 1}, eval={"limit": 4}),
    "PPO": settled(train={"algo": "ppo"}),
    "adapters": settled(train={"lora_rank": 4}),
    "recomputed log-probs and a KL": settled(advantage={"old_logprobs": "recompute"}, train={"use_kl_loss": True}),
    "rounds of sampling": settled(train={"algo": "dapo"}, rollout={"max_sample_batches": 2}),
    "a filter between": settled(run={"stages": ["filter"]}, filter={"drop": {"long": "completion_tokens > 30"}}),
}
QUICK = ("several environments", "lag", "set between two steps", "code upgraded")


@pytest.mark.parametrize("how", [pytest.param(how, marks=[] if how in QUICK else [pytest.mark.slow]) for how in HONEST])
def test_nothing_is_named_of_an_honest_run(how, tmp_path):
    found = verify(HONEST[how](tmp_path / "run"))
    assert (found.broken, found.unfinished) == ([], [])


def test_changed_settings_and_code_are_notes(tmp_path):
    found = verify(set_between(tmp_path / "run"))
    assert any("`rollout.temperature` changed: 1.0 from step 0, 0.8 from step 1" in note for note in found.notes)
