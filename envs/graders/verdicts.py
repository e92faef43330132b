"""Verdicts on trajectories: rewards of several kinds weighted into one, and what becomes of those that fail.

A reward that raises, or is no number, leaves its trajectory without a verdict, and says why: never 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from nanoskyrl.envs.base import Environment, Score
from nanoskyrl.envs.graders.judge import Judge, JudgeConfig
from nanoskyrl.envs.graders.own_rewards import OwnReward, RewardError, place_of
from nanoskyrl.stages.core.at_once import AtOnce
from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.core.rows import BrokenRow, StoredRows
from nanoskyrl.stages.core.trajectory import Trajectory

Scorer = Callable[[Trajectory], Score]
Verdicts = dict[str, tuple[Score, str]]
"""Verdict and score_status by trajectory."""

SKIPPED = (Score(reward=None), "skipped")
"""Of failed rows."""
ENV_REWARD, JUDGE_REWARD = "env", "judge"
ERROR = "error: "
"""Begins the name of a part that says why there is no verdict."""
LARGEST_REWARD = 1e12
"""Past it, means and variances of a group no longer fit their types."""


class Weighted:
    """One scorer from several: the weighted sum of rewards, the first stated success, all parts."""

    def __init__(self, functions: Mapping[str, Scorer], weights: Mapping[str, float]) -> None:
        """Ask nothing yet."""
        self._functions, self._weights = functions, weights
        self.waits = JUDGE_REWARD in functions

    def begin(self, trajectories: Sequence[Trajectory], most: int) -> None:
        """Let reward functions of the user's judge all of them, in at most so many processes."""
        for function in self._functions.values():
            if isinstance(function, OwnReward):
                function.begin(trajectories, most)

    def __call__(self, trajectory: Trajectory) -> Score:
        """Return the score of a trajectory; raises what a function raises."""
        verdicts = {name: function(trajectory) for name, function in self._functions.items()}
        parts: dict[str, float | None] = {}
        for name, verdict in verdicts.items():
            parts |= {name: verdict.reward, **{f"{name}/{part}": value for part, value in verdict.parts.items()}}
        given = [verdict.reward for verdict in verdicts.values()]
        # One part unjudged leaves the whole unjudged: a sum over the rest would be another reward.
        known = [value for value in given if value is not None]
        total = (
            sum(weight * value for weight, value in zip(self._weights.values(), known, strict=True))
            if len(known) == len(given)
            else None
        )
        success = next((verdict.success for verdict in verdicts.values() if verdict.success is not None), None)
        return Score(reward=total, success=success, parts=parts)


def weighted(
    rewards: Mapping[str, float],
    environment: Environment,
    timeout_seconds: float = 60.0,
    judge_config: JudgeConfig = JudgeConfig(),
    conversational: bool = False,
) -> Scorer:
    """Return one scorer from several.

    Raises:
        SettingsError: a reward function does not import, or the judge has no endpoint.
    """
    functions: dict[str, Scorer] = {}
    for name in rewards:
        if name == ENV_REWARD:
            functions[name] = environment.score
        elif name == JUDGE_REWARD:
            functions[name] = Judge(judge_config).score
        else:
            functions[name] = OwnReward(name, timeout_seconds, conversational=conversational)
    if list(functions) == [ENV_REWARD] and rewards[ENV_REWARD] == 1:
        return environment.score
    return Weighted(functions, rewards)


def judge(table: pa.Table, scorer: Scorer, threads: int = 1, kept: Verdicts | None = None) -> Verdicts:
    """Return verdict and score_status by trajectory; a trajectory of several rows is judged once, whole.

    A scorer that waits for something is asked from several threads; the order is that of the rows.
    """
    kept = kept or {}
    rows, names, statuses = StoredRows(table), *(table.column(of).to_pylist() for of in ("trajectory_id", "status"))
    places = dict(zip(names, range(len(names)), strict=True))
    several = grouped(zip(names, range(len(names)), strict=True)) if len(places) < len(names) else {}

    def whole(name: str) -> Trajectory:
        """Return a trajectory: its last row, with the turns of all."""
        last = rows[places[name]]
        if len(steps := several[name] if several else ()) < 2:
            return last
        return replace(last, turns=[turn for step in steps for turn in rows[step].turns])

    left = [name for name, place in places.items() if name not in kept and statuses[place] != "failed"]
    if isinstance(scorer, Weighted):
        scorer.begin([whole(name) for name in left], threads)
    # A method of a benchmark's: whether it waits for a judge, its class says.
    at_once = AtOnce(threads, waits=getattr(getattr(scorer, "__self__", scorer), "waits", False))
    # Each is made when its turn comes: all of a part together would keep the garbage collector at work.
    found = dict(zip(left, at_once.map(lambda name: _judge_one(scorer, whole(name)), left), strict=True))
    return {name: kept.get(name) or found.get(name) or SKIPPED for name in places}


def _judge_one(scorer: Scorer, trajectory: Trajectory) -> tuple[Score, str]:
    try:
        verdict = checked(scorer(trajectory))
    except BrokenRow:  # no verdict on what nobody wrote so
        raise
    except TimeoutError as error:
        return Score(reward=None, parts={f"{ERROR}{error}": None}), "verifier_timeout"
    except (
        Exception,
        SystemExit,
        GeneratorExit,
    ) as error:  # a reward function's failure is its row's, not the stage's, and no verdict
        told = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}{place_of(error)}"
        return Score(reward=None, parts={f"{ERROR}{told}": None}), "verifier_error"
    if verdict.reward is not None and not abs(verdict.reward) <= LARGEST_REWARD:  # NaN is not below it either
        return Score(reward=None, parts={f"{ERROR}the reward is {verdict.reward}": None}), "verifier_error"
    return verdict, "scored" if verdict.reward is not None else "verifier_error"


def checked(verdict: Any) -> Score:
    """Return a verdict with plain numbers and truth values.

    Raises:
        TypeError, ValueError: it is no Score, or holds what is neither.
    """
    if not isinstance(verdict, Score):
        raise TypeError(f"the verdict is a {type(verdict).__name__}, not a Score")
    if verdict.success is not None and verdict.success not in (True, False):
        raise TypeError(f"success is {verdict.success!r}, neither true nor false")
    if (
        type(verdict.reward) is float
        and type(verdict.success) is bool
        and {str}.issuperset(map(type, verdict.parts))
        and {float}.issuperset(map(type, verdict.parts.values()))
    ):
        return verdict
    parts = {str(name): None if value is None else float(value) for name, value in verdict.parts.items()}
    return Score(
        reward=None if verdict.reward is None else float(verdict.reward),
        success=None if verdict.success is None else bool(verdict.success),
        parts=parts,
    )
