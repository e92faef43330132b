"""Fleet's task pattern: a task configuration, tools over MCP, and a verifier at the end.

`make_fleet_task_env(task_config)` has the shape of fleet-ai/OpenEnv's
(`src/envs/fleet_env/task_env.py`): `reset` returns a dictionary, `step` a 4-tuple, the
reward comes only at the end, and `close` runs the verifier of an episode that was cut off.
Unlike there, what goes wrong with the instance or the verifier raises, and is never 0.
"""

import json
import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nanoskyrl.envs.outside.common import need
from nanoskyrl.envs.outside.mcp_session import Answer, McpSession
from nanoskyrl.envs.sandbox.base import run_python
from nanoskyrl.stages.core.errors import SettingsError

FINAL_STATE = "state://final"
"""Resource of a local server that tells the state for the verifier."""
_VERIFY = """
import json as _json
_found = verify(_json.loads({state!r}))
print({mark!r} + _json.dumps(None if _found is None else float(_found)))
"""


class Instance(Protocol):
    """What a task is worked on in."""

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools on offer."""
        ...

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Answer:
        """Call one of them."""
        ...

    def verify(self) -> float:
        """Return how well the task is done, 0 to 1."""
        ...

    def close(self) -> None:
        """Let the instance go."""
        ...


class Backend(Protocol):
    """Makes instances."""

    def make(self, task_config: Mapping[str, Any]) -> Instance:
        """Return a fresh instance for a task."""
        ...


class LocalBackend:
    """Any MCP server of the user's; the verifier is a Python function `verify(state)` run in the sandbox."""

    def __init__(
        self, *, url: str | None = None, command: Sequence[str] = (), sandbox: str = "auto", timeout_seconds: float = 60
    ) -> None:
        """Keep where the server is, or how it is started: once for each episode."""
        if (url is None) == (not command):
            raise SettingsError(
                "a local Fleet backend wants one server", hint="Set `fleet.url` or `fleet.command`, and not both"
            )
        self.url, self.command, self.sandbox, self.timeout_seconds = url, command, sandbox, timeout_seconds

    def make(self, task_config: Mapping[str, Any]) -> Instance:
        """Begin a session."""
        return _Local(self, task_config)


class _Local:
    def __init__(self, backend: LocalBackend, task_config: Mapping[str, Any]) -> None:
        self._backend, self._task = backend, task_config
        self._session = McpSession(url=backend.url, command=backend.command, timeout_seconds=backend.timeout_seconds)
        self.list_tools, self.call_tool, self.close = (
            self._session.list_tools, self._session.call_tool, self._session.close,
        )  # fmt: skip

    def verify(self) -> float:
        state = self._session.read_resource(FINAL_STATE)
        json.loads(state)  # a server that tells no JSON is at fault, not the policy
        # The policy has its say in the state, which a verifier may print: the mark is one that it cannot know.
        mark = secrets.token_hex(16)
        program = verifier_of(self._task) + _VERIFY.format(state=state, mark=mark)
        ran = run_python(program, backend=self._backend.sandbox)
        last = ran.stdout.strip().rpartition("\n")[2]
        if not ran.ok or not last.startswith(mark):
            raise RuntimeError(
                f"the verifier of {task_key(self._task)} failed: {ran.stderr.strip()[-300:] or ran.reason}"
            )
        return _as_reward(json.loads(last.removeprefix(mark)), self._task)


class CloudBackend:
    """Fleet's own instances, through the vendor's client; its key is in FLEET_API_KEY."""

    def __init__(self, *, api_key: str | None = None, ttl_seconds: int = 600, timeout_seconds: float = 60.0) -> None:
        """Refuse to begin without a key."""
        self._key = api_key or os.environ.get("FLEET_API_KEY")
        if not self._key:
            raise SettingsError("Fleet's API key is not set", hint="Put it into the variable FLEET_API_KEY")
        self.ttl_seconds, self.timeout_seconds = ttl_seconds, timeout_seconds

    def make(self, task_config: Mapping[str, Any]) -> Instance:
        """Have an instance made."""
        assert self._key
        return _Cloud(self._key, self, task_config)


class _Cloud:
    def __init__(self, key: str, backend: CloudBackend, task_config: Mapping[str, Any]) -> None:
        self._task = task_config
        self._env = (
            need("fleet", "fleet")
            .Fleet(api_key=key)
            .make(
                env_key=_versioned(task_config, "env_key", "env_version"),
                data_key=_versioned(task_config, "data_key", "data_version"),
                env_variables=task_config.get("env_variables"),
                ttl_seconds=backend.ttl_seconds,
            )
        )
        try:
            self._session = McpSession(
                url=f"{self._env.urls.root}mcp", headers={"Authorization": f"Bearer {key}"},
                timeout_seconds=backend.timeout_seconds,
            )  # fmt: skip
        except BaseException:
            self._env.close()
            raise
        self.list_tools, self.call_tool = self._session.list_tools, self._session.call_tool

    def verify(self) -> float:
        task = need("fleet.tasks", "fleet").Task(
            key=task_key(self._task), prompt=str(self._task["prompt"]), env_id=str(self._task["env_key"]),
            verifier_func=verifier_of(self._task),
        )  # fmt: skip
        response = task.verify_detailed(self._env)
        if not response.success:
            raise RuntimeError(f"the verifier of {task_key(self._task)} failed: {response.result!r}")
        return _as_reward(1.0 if response.result is None else response.result, self._task)

    def close(self) -> None:
        try:
            self._session.close()
        finally:
            self._env.close()


def task_key(task_config: Mapping[str, Any]) -> str:
    """Return the name of a task."""
    return str(task_config.get("task_key", "unknown"))


def verifier_of(task_config: Mapping[str, Any]) -> str:
    """Return the code of a task's verifier, under either of its names."""
    code = task_config.get("verifier_code") or task_config.get("verifier_func")
    if not isinstance(code, str):
        raise SettingsError(
            f"Fleet task {task_key(task_config)} has no verifier", hint="Give it `verifier_code`: without, no reward"
        )
    return code


def _versioned(task_config: Mapping[str, Any], key: str, version: str) -> str | None:
    name, of = task_config.get(key), task_config.get(version)
    return None if name is None else f"{name}:{of}" if of else str(name)


def _as_reward(value: Any, task_config: Mapping[str, Any]) -> float:
    if not isinstance(value, int | float):
        raise RuntimeError(f"the verifier of {task_key(task_config)} returned {value!r}, which is no number")
    return float(value)


class FleetTaskEnv:
    """One task on one instance."""

    def __init__(self, task_config: Mapping[str, Any], *, backend: Backend | None = None, max_steps: int = 50) -> None:
        """Have the instance made; without a backend, by Fleet."""
        if task_config.get("task_modality", "tool_use") != "tool_use":
            raise SettingsError(
                f"Fleet task {task_key(task_config)} is for {task_config['task_modality']}",
                hint="Policies here read text; give tasks of the modality tool_use",
            )
        self.task, self.max_steps = task_config, max_steps
        self.final_reward: float | None = None
        self._steps, self._begun, self._done = 0, False, False
        self._instance: Instance | None = (backend or CloudBackend()).make(task_config)
        # An instance costs money: one that nobody closed goes with the last reference to it, or with the process.
        self._let_go = weakref.finalize(self, self._instance.close)
        self._tools: list[dict[str, Any]] = []

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        """Return prompt, observation, step, task_key, modality and tools; instances know no seed."""
        self._steps, self._done, self.final_reward = 0, False, None
        tools = self._living().list_tools()
        self._tools = [tool for tool in tools if tool["function"]["name"] != "computer"]  # for eyes, not for text
        self._begun = True
        return self._observed({})

    def step(self, action: Mapping[str, Any]) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        """Call `tool` with `params`, and end if `done` is set; return observation, reward, done and info.

        A tool's complaint is an observation and `info["tool_error"]`; the reward is 0.0 until the end.
        """
        if self._done:
            raise RuntimeError("the episode is over: call reset() for a new one")
        instance = self._living()
        self._steps += 1
        info: dict[str, Any] = {"step": self._steps}
        seen: Any = {}
        if action.get("tool"):
            answer = instance.call_tool(str(action["tool"]), dict(action.get("params") or {}))
            seen = {"error": answer.text} if answer.is_error else answer.text
            info["tool_error" if answer.is_error else "tool_result"] = answer.text
        by_agent, by_limit = bool(action.get("done")), self._steps >= self.max_steps
        self._done = by_agent or by_limit
        info["done_reason"] = "agent_done" if by_agent else "max_steps" if by_limit else None
        if self._done:
            self.final_reward = instance.verify()
        return self._observed(seen), self.final_reward or 0.0, self._done, info

    def close(self) -> None:
        """Verify an episode that was cut off, so that `final_reward` is what was earned, and let the instance go."""
        if self._instance is None:
            return
        try:
            if self.final_reward is None and self._begun:
                self.final_reward = self._instance.verify()
        finally:
            self._instance, self._done = None, True
            self._let_go()

    def _living(self) -> Instance:
        if self._instance is None:
            raise RuntimeError("the environment is closed")
        return self._instance

    def _observed(self, seen: Any) -> dict[str, Any]:
        return {
            "prompt": self.task.get("prompt", ""), "observation": seen, "step": self._steps,
            "task_key": task_key(self.task), "modality": "tool_use", "tools": self._tools,
        }  # fmt: skip


def make_fleet_task_env(task_config: Mapping[str, Any], **settings: Any) -> FleetTaskEnv:
    """Return the environment of a task; the settings are those of `FleetTaskEnv`."""
    return FleetTaskEnv(task_config, **settings)
