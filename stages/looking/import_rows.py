"""Trajectories from JSON lines: a finished rollout of a run, and its score where every line has a reward.

Tokens are taken as they are, and no text is turned into tokens: a line without token ids is refused.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanoskyrl.stages.core.digests import digest_file, digest_json
from nanoskyrl.stages.core.errors import InputError, did_you_mean, told_as
from nanoskyrl.stages.core.manifest import Head, Manifest
from nanoskyrl.stages.core.output import open_output
from nanoskyrl.stages.core.rows import to_table
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.trajectory import COLUMNS, STOP_REASONS, ToolCall, Trajectory, Turn
from nanoskyrl.stages.engines.rollout_parts import failed
from nanoskyrl.stages.learning.advantage_config import sampling_of
from nanoskyrl.stages.score import unjudged

ROWS_PER_PART = 4096
TOKENS = {"prompt_ids": np.int32, "response_ids": np.int32, "loss_mask": np.int8, "rollout_logprobs": np.float32}
NEEDED = ("prompt_ids", "response_ids", "loss_mask")
KNOWN = {column.name for column in COLUMNS} | {"step"}
REWARD = "imported"
"""Name of the reward in the settings of the score."""
LINE_HINT = "docs/queries.md says what a line holds"


class Imported(NamedTuple):
    """What was written."""

    rollout: Manifest
    score: Manifest | None
    step: int


def import_rows(file: Path, run: Run, env: str, *, force: bool = False) -> Imported:
    """Write the trajectories of a file as the next step's rollout, and score where they have rewards.

    Args:
        file: JSON lines, as `skyrl export --trajectories jsonl` writes them. `prompt_ids`, `response_ids` and
            `loss_mask` are needed; without `rollout_logprobs` `advantage` computes them.
        run: Where to.
        env: The environment of lines that name none.
        force: Replace what another rollout left there.

    Raises:
        InputError: a line is no trajectory; says which and what is missing.
        OutputError: the step has another rollout, or it cannot be written.
    """
    if not file.is_file():
        raise InputError(f"there is no file `{file}`", hint="Name a file of JSON lines")
    step = run.next_step()
    first = next(_lines(file), None)
    if first is None:
        raise InputError(f"`{file}` holds no line", hint=LINE_HINT)
    scored = first[1].get("reward") is not None or first[1].get("score_status") is not None
    envs, groups = _survey(file, env)
    settings: dict[str, Any] = {
        "env": next(iter(envs)) if len(envs) == 1 else dict.fromkeys(sorted(envs), 1.0),
        "step": step, "train_batch_size": len(groups), "n_samples_per_prompt": max(groups.values()),
    }  # fmt: skip
    head = Head(stage="rollout", settings={"rollout": settings}, inputs={"data": digest_file(file)})
    with open_output(run.stage(step, "rollout"), head, force=force, keep_parts=False, dropped=failed) as out:
        rollout = out.manifest
        if rollout is None:
            for index, rows in enumerate(_batches(file, env, scored)):
                out.write_part(index, to_table(rows))
            rollout = out.finish(rows_in=sum(groups.values()))
    score = _import_score(file, run, step, env, rollout, force) if scored else None
    return Imported(rollout, score, step)


def _import_score(file: Path, run: Run, step: int, env: str, rollout: Manifest, force: bool) -> Manifest:
    """Write the rewards that the lines have."""
    settings = {"score": {"rewards": {REWARD: 1.0}}}
    head = Head(stage="score", settings=settings, inputs={"rollout": rollout.digest}, policy=rollout.policy)
    with open_output(run.stage(step, "score"), head, force=force, keep_parts=False, dropped=unjudged) as out:
        if out.manifest is not None:
            return out.manifest
        for index, rows in enumerate(_batches(file, env, True)):
            out.write_part(index, to_table(rows, "score"))
        return out.finish(rows_in=rollout.rows_out, facts={"sampling": sampling_of(rollout.settings["rollout"])})


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of every line that is not empty."""
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            if not line.strip():
                continue
            with told_as(
                InputError, f"line {number} of `{file}` is no JSON", ValueError, RecursionError, hint=LINE_HINT
            ):
                value = json.loads(line)
            if not isinstance(value, dict):
                raise InputError(f"line {number} of `{file}` is no object", hint=LINE_HINT)
            yield number, value


def _survey(file: Path, env: str) -> tuple[set[str], Counter[str]]:
    """Return the environments of a file, and how many trajectories each group has; refuse unknown names of columns."""
    envs: set[str] = set()
    groups: Counter[str] = Counter()
    for number, value in _lines(file):
        for name in NEEDED:
            if not isinstance(value.get(name), list):
                raise InputError(
                    f"line {number} of `{file}` has no list `{name}`",
                    hint="Tokens are taken as they are: text is never turned into tokens",
                )
        if unknown := sorted(set(value) - KNOWN):
            raise InputError(
                f"line {number} of `{file}` has `{unknown[0]}`, which is no column",
                hint=did_you_mean(unknown[0], KNOWN) or "Put what is of your own into `metadata`",
            )
        envs.add(str(value.get("env") or env))
        groups[_group(value, env)] += int(bool(value.get("is_last_step", True)))
    return envs, groups


def _group(value: Mapping[str, Any], env: str) -> str:
    """Return the group of a line: its own, or that of its prompt."""
    named = value.get("group_id")
    return (
        str(named) if named else digest_json([value.get("env") or env, value.get("task_id"), value["prompt_ids"]])[:32]
    )


def _batches(file: Path, env: str, scored: bool) -> Iterator[list[Trajectory]]:
    """Yield the rows of each part."""
    rows = _rows(file, env, scored)
    while batch := list(islice(rows, ROWS_PER_PART)):
        yield batch


def _rows(file: Path, env: str, scored: bool) -> Iterator[Trajectory]:
    """Yield each line as a row."""
    seen: Counter[str] = Counter()
    for number, value in _lines(file):
        group = _group(value, env)
        filled = {
            "env": env,
            "group_id": group,
            "sample": seen[group],
            **{k: v for k, v in value.items() if v is not None},
        }
        seen[group] += 1
        if scored and filled.get("reward") is None and filled.get("score_status") in (None, "scored"):
            raise InputError(
                f"line {number} of `{file}` has no reward, and the first has",
                hint="Give each a reward, or a `score_status` that says why there is none",
            )
        with told_as(
            InputError, f"line {number} of `{file}` is no trajectory", TypeError, ValueError, KeyError, OverflowError,
            hint=LINE_HINT,
        ):  # fmt: skip
            row = _row(filled, number)
        yield row


def _row(value: dict[str, Any], number: int) -> Trajectory:
    """Return a line as a row; what it leaves out is what a plain attempt has."""
    tokens = {name: np.asarray(value[name], of) for name, of in TOKENS.items() if name in value}
    mask = tokens["loss_mask"]
    stop, reward = str(value.get("stop_reason", "stop")), value.get("reward")
    if not isinstance(reward, int | float | None):
        raise ValueError(f"its reward is {reward!r}, which is no number")
    given: dict[str, Any] = {
        "trajectory_id": digest_json([number, value["env"], value["prompt_ids"], value["response_ids"]])[:32],
        "task_id": value["group_id"], "split": "train", "seed": 0, "policy_version": None, "policy_digest": None,
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "prompt": "", "response": "", "messages": [],
        "logprobs_mode": "processed" if "rollout_logprobs" in value else "recomputed", "rollout_logprobs": None,
        "stop_reason": stop, "status": STOP_REASONS.get(stop, stop), "trainable": True,
        "prompt_tokens": len(value["prompt_ids"]), "completion_tokens": int((mask != 0).sum()),
        "score_status": "scored" if reward is not None else None,
        **value, **tokens,
    }  # fmt: skip
    given["turns"] = (
        [_turn(turn) for turn in value["turns"]] if "turns" in value else _spans(mask, str(given["response"]))
    )
    known = {f.name: f for f in fields(Trajectory)}
    missing = [n for n, f in known.items() if n not in given and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        raise ValueError(f"`{missing[0]}` is missing")
    return Trajectory(**{name: of for name, of in given.items() if name in known})


def _turn(turn: Mapping[str, Any]) -> Turn:
    calls = [ToolCall(**call) for call in turn.get("tool_calls") or ()]
    return Turn(**{**turn, "tool_calls": calls})


def _spans(mask: np.ndarray, response: str) -> list[Turn]:
    """Return a turn for each run of sampled tokens; its words are known where there is one alone."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (mask != 0).astype(np.int8), [0]])))
    spans = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    words = response if len(spans) == 1 else ""
    return [
        Turn(action=words, observation="", done=end == spans[-1][1], first_token=start, token_count=end - start)
        for start, end in spans
    ]
