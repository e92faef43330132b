"""`fleet`: tasks in Fleet's pattern, worked on with tools over MCP and judged by a verifier at the end.

Instances are Fleet's own, or any MCP server of the user's. The policy calls tools as in
`tool_use` and writes `<done>` when it has finished; one that is cut off is judged as it left things.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nanoskyrl.envs.actions import TOOL_CALL_END, ParsedCall, tool_calls
from nanoskyrl.envs.base import Observation, Score, Step, Task
from nanoskyrl.envs.outside.common import no_expert, sendable
from nanoskyrl.envs.outside.fleet_task import (
    Backend,
    CloudBackend,
    FleetTaskEnv,
    LocalBackend,
    make_fleet_task_env,
    task_key,
)
from nanoskyrl.envs.sandbox.base import Sandbox
from nanoskyrl.envs.tools import mistake_in, replies_to, too_many
from nanoskyrl.stages.core.checked import COMMAND, FILE, PLACE, Checked, PositiveInt
from nanoskyrl.stages.core.errors import InputError, SettingsError, told_as
from nanoskyrl.stages.core.storage import read_named
from nanoskyrl.stages.core.trajectory import ToolCall, Trajectory

DONE = "<done>"
INSTRUCTION = f"Use the tools to do the task. When it is done, write {DONE}."
NEITHER = f"error: no tool call was found; call a tool, or write {DONE} if the task is done"
MAX_CALLS = 16
"""Carried out of one action, as in `tool_use`."""
HINT = "Give Fleet's tasks: JSON with `tasks`, or JSON lines, each with task_key, prompt, env_key and verifier_code"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig(Checked):
    """Which tasks, and where they are worked on."""

    data: str | None = field(default=None, metadata=FILE)
    """A file of task configurations: JSON with a list `tasks`, or JSON lines."""
    backend: Literal["fleet", "local"] = "fleet"
    """fleet (Fleet's instances; the key in FLEET_API_KEY) or local (an MCP server of the user's)."""
    url: str | None = field(default=None, metadata=PLACE)
    """Address of a local server; each session must have a state of its own."""
    command: tuple[str, ...] = field(default=(), metadata=PLACE | COMMAND)
    """Starts a local server for each episode, such as ["python", "server.py"]."""
    max_steps: PositiveInt = 50
    """Tool calls, and turns without one, after which an episode is over and verified."""
    success_at: float = 1.0
    """Reward from which an episode counts as a success."""
    ttl_seconds: PositiveInt = field(default=3600, metadata=PLACE)
    """How long Fleet keeps an instance."""
    timeout_seconds: float = field(default=60.0, metadata=PLACE)
    """Longest wait for one answer of a server."""
    sandbox: Sandbox = field(default="auto", metadata=PLACE)
    """Where verifiers of local tasks run; auto: the first that works here."""


class Fleet:
    """Fleet's tasks."""

    Config = FleetConfig

    def __init__(self, config: FleetConfig) -> None:
        """Keep the settings; `score` needs neither tasks nor servers."""
        self.config = config

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of the file; it serves both splits, as it was named."""
        if self.config.data is None:
            raise SettingsError("`fleet.data` is not set", hint=HINT)
        self._backend()  # a missing key or server is reported before anything is begun
        return [
            Task(task_id=task_key(task), split=split, prompt=task["prompt"], metadata={"task_config": task})
            for task in read_task_configs(self.config.data)
        ]

    def start(self) -> "FleetEpisode":
        """Return a fresh episode."""
        return FleetEpisode(self._backend(), self.config)

    def score(self, trajectory: Trajectory) -> Score:
        """Return the verifier's word; None where it never came to one."""
        reward = trajectory.metadata.get("final_reward")
        if reward is None:
            return Score(reward=None)
        return Score(reward=reward, success=reward >= self.config.success_at, parts={"verifier": reward})

    def expert(self, task: Task) -> Sequence[str]:
        """Return the `solution` of a task that brings one: a list of texts."""
        solution = task.metadata["task_config"].get("solution")
        if not isinstance(solution, list):
            raise no_expert("fleet")
        return [str(action) for action in solution]

    def _backend(self) -> Backend:
        config = self.config
        if config.backend == "fleet":
            return CloudBackend(ttl_seconds=config.ttl_seconds, timeout_seconds=config.timeout_seconds)
        return LocalBackend(
            url=config.url, command=config.command, sandbox=config.sandbox, timeout_seconds=config.timeout_seconds
        )


def read_task_configs(name: str) -> list[dict[str, Any]]:
    """Return the task configurations of a file, in its order.

    Raises:
        InputError: the file is missing or no JSON, or a task lacks what it needs.
    """
    text = read_named(name, "file of Fleet tasks", HINT)
    with told_as(InputError, f"`{name}` is not JSON", ValueError, RecursionError, hint=HINT):
        rows: Any = (
            [json.loads(line) for line in text.split("\n") if line.strip()]
            if name.endswith(".jsonl")
            else json.loads(text)
        )
    rows = rows.get("tasks") if isinstance(rows, dict) else rows
    if not isinstance(rows, list) or not rows:
        raise InputError(f"`{name}` holds no tasks", hint=HINT)
    seen: set[str] = set()
    for number, row in enumerate(rows):
        for key in ("task_key", "prompt", "env_key"):
            if not isinstance(row, dict) or not isinstance(row.get(key), str):
                raise InputError(f"task {number} of `{name}` has no `{key}`", hint=HINT)
        if not (row.get("verifier_code") or row.get("verifier_func")):
            raise InputError(f"task {number} of `{name}` has no verifier", hint=HINT)
        if row["task_key"] in seen:
            raise InputError(
                f"task {number} of `{name}` has the key `{row['task_key']}` again", hint="Keys must differ"
            )
        seen.add(row["task_key"])
    return rows


class FleetEpisode:
    """One task on one instance, as a conversation."""

    def __init__(self, backend: Backend, config: FleetConfig) -> None:
        """Have no instance made yet."""
        self.backend, self.config = backend, config
        self.env: FleetTaskEnv | None = None
        self.tools: list[str] = []

    def reset(self, task: Task, seed: int) -> Observation:
        """Have the instance made, and show task and tools."""
        self.env = make_fleet_task_env(
            task.metadata["task_config"], backend=self.backend, max_steps=self.config.max_steps
        )
        seen = self.env.reset(seed)
        self.tools = [tool["function"]["name"] for tool in seen["tools"]]
        message = {"role": "user", "content": f"{seen['prompt']}\n{INSTRUCTION}"}
        return Observation(messages=(message,), tools=seen["tools"], metadata={"final_reward": None})

    def step(self, action: str) -> Step:
        """Carry out the calls in their order, and end where the policy says that it has finished."""
        assert self.env is not None
        every = tool_calls(action)
        written = every[:MAX_CALLS]
        finished = DONE in action.rpartition("</think>")[2].rpartition(TOOL_CALL_END)[2]
        calls: list[ToolCall] = []
        _, reward, done, info = None, 0.0, False, {}
        for place, call in enumerate(written, 1):
            mistake = mistake_in(call, self.tools)
            sent = {} if mistake else {"tool": call.tool, "params": sendable(call.args)}
            _, reward, done, info = self.env.step({**sent, "done": finished and place == len(written)})
            calls.append(mistake or _called(call, info))
            if done:
                break
        if not written:
            _, reward, done, info = self.env.step({"done": finished})
        calls += too_many(len(every), MAX_CALLS)
        replies = replies_to(calls)
        if not written and not finished:
            replies = [{"role": "user", "content": NEITHER}]
            calls = [ToolCall(tool=None, result=NEITHER, ok=False, error="malformed")]
        return Step(
            messages=replies, reward=reward if done else None, done=done,
            truncated=info["done_reason"] == "max_steps",
            tool_calls=calls, metadata={"final_reward": self.env.final_reward},
        )  # fmt: skip

    def close(self) -> dict[str, Any] | None:
        """Let the instance go; one that was cut off is judged first."""
        if self.env is None:
            return None
        env, self.env = self.env, None
        env.close()
        return {"final_reward": env.final_reward}


def _called(call: ParsedCall, info: dict[str, Any]) -> ToolCall:
    """Return the record of a call that was carried out."""
    if "tool_error" in info:
        text = info["tool_error"]
        kind = "bad_arguments" if "validation error" in text.lower() else "tool_error"
        return ToolCall(tool=call.tool, args=call.args, result=text, ok=False, error=kind)
    return ToolCall(tool=call.tool, args=call.args, result=info["tool_result"], ok=True)
