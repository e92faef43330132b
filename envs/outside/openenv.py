"""`openenv`: any environment that an OpenEnv server offers, by its address.

A session of the server is an episode. What an action looks like is read from the server's
schema: where it has one field of text, the policy's text fills it; else the policy writes
the action as JSON. The reward is the sum of what the server gave. A server that fails,
hangs or is full fails the attempt; an action that it does not take is answered with why.
"""

import json
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from nanoskyrl.envs.actions import json_object
from nanoskyrl.envs.base import Observation, Score, Step, Task
from nanoskyrl.envs.commands import ACTION, ACTION_END, action_of, record
from nanoskyrl.envs.outside.common import need, no_expert, returned, sendable
from nanoskyrl.stages.core.checked import PLACE, Checked, FinitePositive, PositiveInt
from nanoskyrl.stages.core.errors import InputError, SettingsError, told_as
from nanoskyrl.stages.core.trajectory import Trajectory

TEST_SEEDS_FROM = 1_000_000
"""Tasks of the test split are seeds from here on."""
REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes by which a server says that it did not take an action; its episode continues."""
SERVER_TEXT_LIMIT = 500
OF_EVERY_OBSERVATION = ("done", "reward", "metadata")
"""Fields that OpenEnv gives every observation; they are not shown."""

HttpUrl = Annotated[str, Meta(pattern="^https?://", description="an address such as http://localhost:8000")]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvConfig(Checked):
    """Which server, and how its tasks, actions and observations are read."""

    table: ClassVar[str] = "openenv"

    url: HttpUrl | None = field(default=None, metadata=PLACE)
    """Where the server listens, such as http://localhost:8000."""
    instruction: str = ""
    """What the policy reads before the first observation."""
    action_field: str | None = None
    """Field of the action that takes the policy's text; unset: the only one there is, if it is text."""
    observation_field: str | None = None
    """Field of the observation that is shown; unset: the only one there is, if it is text, else all of it as JSON."""
    task_api: str | None = None
    """Name under which the server lists its tasks (OpenEnv's task routes); unset: tasks are seeds for `reset`."""
    n_train: PositiveInt = 1024
    """Training tasks, at most."""
    n_test: PositiveInt = 256
    """Held-out tasks, at most."""
    success_at: float = 1.0
    """Sum of rewards from which an episode counts as a success."""
    timeout_seconds: FinitePositive = field(default=60.0, metadata=PLACE)
    """Longest wait for one answer of the server."""


class OpenEnv:
    """A server, reached when it is needed."""

    Config = OpenEnvConfig

    def __init__(self, config: OpenEnvConfig) -> None:
        """Keep the settings; `score` needs no server."""
        self.config = config

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the server's tasks of a split, or one for each seed."""
        url, count = self._url(), self.config.n_test if split == "test" else self.config.n_train
        need("openenv.core.generic_client", "openenv")  # before anything is begun
        if self.config.task_api is None:
            first = TEST_SEEDS_FROM if split == "test" else 0
            resets: list[dict[str, Any]] = [{"seed": first + i} for i in range(count)]
        else:
            listed = _ask(url, f"/{self.config.task_api}/num_tasks", {"split": split}, self.config)
            resets = [{"split": split, "index": i} for i in range(min(count, int(listed["num_tasks"])))]
        return [
            Task(
                task_id="-".join(str(value) for value in reset.values()), split=split, prompt=self.config.instruction,
                metadata={"reset": reset},
            )
            for reset in resets
        ]  # fmt: skip

    def start(self) -> "OpenEnvEpisode":
        """Return a fresh episode."""
        return OpenEnvEpisode(self._url(), self.config)

    def score(self, trajectory: Trajectory) -> Score:
        """Return the sum of the server's rewards."""
        return returned(trajectory, self.config.success_at)

    def expert(self, task: Task) -> Sequence[str]:
        """Refuse: nobody here knows the server's world."""
        raise no_expert("openenv")

    def _url(self) -> str:
        if self.config.url is None:
            raise SettingsError("`openenv.url` is not set", hint="Add `--set openenv.url=http://localhost:8000`")
        return self.config.url.rstrip("/")


class OpenEnvEpisode:
    """One session with the server."""

    def __init__(self, url: str, config: OpenEnvConfig) -> None:
        """Open no connection yet."""
        self.url, self.config = url, config
        self.action_field: str | None = None
        self._client: Any = None

    def reset(self, task: Task, seed: int) -> Observation:
        """Connect, and begin the task; its seed is the task's, not the trajectory's."""
        generic = need("openenv.core.generic_client", "openenv")
        schema = _action_schema(self.url, self.config)
        self.action_field = self.config.action_field or _only_text(schema)
        self._client = generic.GenericEnvClient(self.url, message_timeout_s=self.config.timeout_seconds).sync()
        result = self._client.reset(**task.metadata["reset"])
        how = f"Write one action at a time in {ACTION}{ACTION_END} tags"
        how += "." if self.action_field else f", as a JSON object after this schema: {json.dumps(schema)}"
        parts = [self.config.instruction, how, self._shown(result.observation)]
        text = "\n\n".join(part for part in parts if part)
        return Observation(messages=({"role": "user", "content": text},))

    def step(self, action: str) -> Step:
        """Send one action; one that is no JSON, or that the server refuses, is answered with why."""
        written = action_of(action)
        payload, why = self._payload(written)
        if payload is None:
            return self._refusal(written, "malformed", why)
        try:
            result = self._client.step(sendable(payload))
        except RuntimeError as error:
            if not any(f"(code: {code})" in str(error) for code in REFUSED):
                raise
            return self._refusal(written, "bad_arguments", f"the action was not taken: {error}")
        text = self._shown(result.observation)
        return Step(
            messages=({"role": "user", "content": text},), done=bool(result.done),
            reward=None if result.reward is None else float(result.reward),
            truncated=bool(result.done) and _says_truncated(result.observation),
            tool_calls=(record("step", written, text, None),),
        )  # fmt: skip

    def close(self) -> None:
        """End the session."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _payload(self, written: str) -> tuple[dict[str, Any] | None, str]:
        if self.action_field is not None:
            return {self.action_field: written}, ""
        value, why = json_object(written)
        return value, f"the action cannot be read: {why}"

    def _refusal(self, written: str, kind: str, why: str) -> Step:
        text = f"error: {why[:SERVER_TEXT_LIMIT]}"
        return Step(
            messages=({"role": "user", "content": text},), done=False, tool_calls=(record("step", written, text, kind),)
        )

    def _shown(self, observation: Any) -> str:
        """Return an observation as the policy reads it."""
        if not isinstance(observation, dict):
            return str(observation)
        observation = {key: value for key, value in observation.items() if key not in OF_EVERY_OBSERVATION}
        if self.config.observation_field is not None:
            value = observation.get(self.config.observation_field)
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(observation) == len(texts) == 1 else json.dumps(observation, ensure_ascii=False)


def _says_truncated(observation: Any) -> bool:
    """Say whether an observation tells, itself or in its metadata, that a limit ended the episode."""
    if not isinstance(observation, dict):
        return False
    metadata = observation.get("metadata")
    return observation.get("truncated") is True or (isinstance(metadata, dict) and metadata.get("truncated") is True)


@cache
def _action_schema(url: str, config: OpenEnvConfig) -> dict[str, Any]:
    """Return the JSON schema of the server's actions, without what every OpenEnv action has."""
    schema = dict(_ask(url, "/schema", None, config)["action"])
    schema["properties"] = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
    return schema


def _only_text(schema: dict[str, Any]) -> str | None:
    """Return the one field of an action, if there is one and it is text."""
    fields = schema["properties"]
    name = next(iter(fields)) if len(fields) == 1 else None
    return name if name is not None and fields[name].get("type") == "string" else None


def _ask(url: str, path: str, body: dict[str, Any] | None, config: OpenEnvConfig) -> dict[str, Any]:
    """Return the server's JSON answer to one request.

    Raises:
        InputError: it cannot be reached, or does not answer as an OpenEnv server does.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data=data, headers={"Content-Type": "application/json"})
    with (
        told_as(
            InputError,
            f"the OpenEnv server at `{url}` did not answer {path}",
            OSError,
            ValueError,
            hint="Check that it runs, and `openenv.url`",
        ),
        urllib.request.urlopen(request, timeout=config.timeout_seconds) as answer,
    ):
        value = json.loads(answer.read())
    if not isinstance(value, dict):
        raise InputError(f"the server at `{url}` answered {path} with no object", hint="Is it an OpenEnv server?")
    return value
