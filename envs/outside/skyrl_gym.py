"""`skyrl_gym`: the environments that skyrl-gym registers, over a data set in SkyRL's layout.

A row holds a prompt, and whatever its environment wants to know, such as `reward_spec`;
`env_class` may name an environment of its own. The reward is the sum of what the
environment gave. skyrl-gym has one word, `done`, for an end and for its limit of turns;
here the two are distinguished.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanoskyrl.envs.base import Message, Observation, Score, Step, Task
from nanoskyrl.envs.datasets import PROMPT_KEYS, read_rows, read_tasks
from nanoskyrl.envs.outside.common import json_ready, need, no_expert, returned
from nanoskyrl.stages.core.checked import ARGUMENTS, FILE, Checked, PositiveInt
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.trajectory import ToolCall, Trajectory

UNSAFE = ("lcb", "searchcode", "rlm")
"""They run the policy's code in a plain process: it can read and write whatever nanoskyrl can."""
SEARCH_FAILED = (
    '<information>{"result": "Search error: ',
    '<information>{"result": "Search request failed or timed out after retries.',
)
"""How skyrl-gym's `search` tells the policy that its server failed: no fault of the policy's, and no zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyrlGymConfig(Checked):
    """Which environment, over which tasks."""

    env: str = "gsm8k"
    """Id that skyrl-gym, or a package that registers with it, has; a row's `env_class` comes first."""
    data: str | None = field(default=None, metadata=FILE)
    """A .jsonl or .parquet file of prompts in SkyRL's layout."""
    env_config: dict[str, Any] = field(default_factory=dict, metadata=ARGUMENTS)
    """Settings of the environment, such as `search_url` of `search`."""
    max_turns: PositiveInt | None = None
    """Limit of turns that the environment is given; unset: the row's, else the environment's own."""
    success_at: float = 1.0
    """Sum of rewards from which an episode counts as a success."""
    allow_unsafe: bool = False
    """Let environments run that execute the policy's code without a sandbox."""


class SkyrlGym:
    """skyrl-gym's environments, one for each task."""

    Config = SkyrlGymConfig

    def __init__(self, config: SkyrlGymConfig) -> None:
        """Keep the settings; `score` needs no skyrl-gym."""
        self.config = config

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of the data set; it serves both splits, as it was named."""
        if self.config.data is None:
            raise SettingsError("`skyrl_gym.data` is not set", hint="Name a .jsonl or .parquet file in SkyRL's layout")
        registry = need("skyrl_gym", "skyrl_gym").registry
        rows, tasks = read_rows(self.config.data), read_tasks(self.config.data, split)
        return [self._with_extras(task, place, row, registry) for task, (place, row) in zip(tasks, rows, strict=True)]

    def _with_extras(self, task: Task, place: str, row: dict[str, Any], registry: Any) -> Task:
        env = row.get("env_class") or self.config.env
        if not isinstance(env, str) or (env not in registry and ":" not in env):
            raise InputError(
                f"{place} wants the environment {env!r}, which skyrl-gym does not have",
                hint=f"It has {', '.join(registry)}; or name `module:id`",
            )
        if env in UNSAFE and not self.config.allow_unsafe:
            raise SettingsError(
                f"skyrl-gym's `{env}` runs the policy's code without a sandbox",
                hint="On a machine that may be lost, set `skyrl_gym.allow_unsafe = true`",
            )
        extras = {"extra_info": {}, **{key: value for key, value in row.items() if key not in PROMPT_KEYS}}
        if self.config.max_turns is not None:
            extras["max_turns"] = self.config.max_turns
        metadata = {**task.metadata, "env_class": env, "extras": json_ready(extras)}
        return replace(task, metadata=metadata)

    def start(self) -> "SkyrlGymEpisode":
        """Return a fresh episode."""
        return SkyrlGymEpisode(self.config)

    def score(self, trajectory: Trajectory) -> Score:
        """Return the sum of the environment's rewards."""
        return returned(trajectory, self.config.success_at)

    def expert(self, task: Task) -> Sequence[str]:
        """Answer where the environment is known to want the ground truth after `####`."""
        if task.metadata["env_class"] not in ("gsm8k", "gsm8k_multi_turn"):
            raise no_expert("skyrl_gym")
        return [f"#### {task.ground_truth}"]


class SkyrlGymEpisode:
    """One of skyrl-gym's environments at work."""

    def __init__(self, config: SkyrlGymConfig) -> None:
        """Make no environment yet."""
        self.config = config
        self._env: Any = None
        self._turns = 0

    def reset(self, task: Task, seed: int) -> Observation:
        """Make the environment and show its prompt."""
        gym, omegaconf = need("skyrl_gym", "skyrl_gym"), need("omegaconf", "skyrl_gym")
        settings = omegaconf.OmegaConf.create(self.config.env_config)
        extras = dict(task.metadata["extras"])
        self._env = gym.make(task.metadata["env_class"], env_config=settings, extras=extras)
        self._turns = 0
        prompt: list[Message] = [dict(message) for message in task.messages]
        messages, _ = self._env.init(prompt or [{"role": "user", "content": task.prompt}])
        return Observation(messages=messages, metadata={"ground_truth": task.ground_truth, **task.metadata})

    def step(self, action: str) -> Step:
        """Give the environment the policy's text; what it raises fails the attempt."""
        self._turns += 1
        output = self._env.step(action)
        metadata = json_ready(output.get("metadata") or {})
        done = bool(output["done"])
        messages = [dict(message) for message in output["observations"] or ()]
        if any(str(message.get("content", "")).strip().startswith(SEARCH_FAILED) for message in messages):
            raise ConnectionError(f"the search server failed: {messages[0]['content'].strip()}")
        return Step(
            messages=messages, reward=float(output["reward"]), done=done,
            truncated=done and self._only_the_limit(action, float(output["reward"])),
            tool_calls=_calls(metadata, messages), metadata={"last_turn": metadata} if metadata else {},
        )  # fmt: skip

    def close(self) -> dict[str, Any] | None:
        """Close the environment; its metrics of the episode go into the metadata."""
        if self._env is None:
            return None
        env, self._env = self._env, None
        metrics = json_ready(env.get_metrics())
        env.close()
        return {"metrics": metrics} if metrics else None

    def _only_the_limit(self, action: str, reward: float) -> bool:
        """Say whether the environment would have continued, had it not come to its limit of turns.

        An environment of one turn ends by itself. Others are asked again with the limit lifted, by
        the `_is_done` that skyrl-gym's own have; one without it is believed to have ended by itself
        if the reward is that of a success.
        """
        limit = getattr(self._env, "max_turns", None)
        if not isinstance(limit, int) or limit <= 1 or self._turns < limit:
            return False
        is_done = getattr(self._env, "_is_done", None)
        if is_done is None:
            return reward < self.config.success_at
        self._env.max_turns = limit + 1_000_000
        try:
            return not is_done(action)
        finally:
            self._env.max_turns = limit


def _calls(metadata: Any, messages: Sequence[Message]) -> tuple[ToolCall, ...]:
    """Return the tool call that skyrl-gym tells of in its metadata, if any."""
    if not isinstance(metadata, dict) or not metadata.get("tool_name"):
        return ()
    result = str(messages[0]["content"]) if messages else None
    wanted = any(part is not None for part in metadata.get("tool_input") or ())
    args = {"input": metadata.get("tool_input")}
    return (
        ToolCall(
            tool=str(metadata["tool_name"]), args=args, result=result, ok=wanted, error=None if wanted else "malformed"
        ),
    )
