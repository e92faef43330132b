"""`verifiers`: any package with `load_environment`, as made for PrimeIntellect's verifiers, its rubric as the scorer.

The package's own rollout runs, in a background loop, and asks a client for the model's turns; the client hands each
question to the episode and waits for what the policy writes. So turns, tools, ends and limits are the environment's
own. When it ends, or is cut off, its rubric judges the state that only it has; reward and metrics go into the row, for
`score`. Calls are written as everywhere here, and reach the environment as calls of a model.
"""

import asyncio
import contextlib
import json
import queue
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from nanoskyrl.envs.actions import TOOL_CALL, tool_calls
from nanoskyrl.envs.base import Message, Observation, Score, Step, Task
from nanoskyrl.envs.outside.common import json_ready, need, no_expert
from nanoskyrl.envs.outside.mcp_session import background_loop
from nanoskyrl.stages.core.checked import ARGUMENTS, MODULE, Checked, PositiveFloat
from nanoskyrl.stages.core.digests import digest_json
from nanoskyrl.stages.core.errors import SettingsError, told_as
from nanoskyrl.stages.core.trajectory import ToolCall, Trajectory

VERDICT = "verifiers"
"""In the metadata of a row: `reward` and `metrics` of the rubric, or the `error` that it raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersConfig(Checked):
    """Which environment."""

    env: str | None = field(default=None, metadata=MODULE)
    """A module with `load_environment`, such as an installed package, or its id with hyphens."""
    args: dict[str, Any] = field(default_factory=dict, metadata=ARGUMENTS)
    """What `load_environment` is called with."""
    success_at: float = 1.0
    """Reward from which an attempt counts as a success."""
    timeout_seconds: PositiveFloat = 600.0
    """For the environment's answer to one turn, and for its rubric; then the attempt fails."""


class Verifiers:
    """One environment of verifiers."""

    Config = VerifiersConfig

    def __init__(self, config: VerifiersConfig) -> None:
        """Keep the settings; `score` needs no verifiers."""
        self.config = config

    @cached_property
    def environment(self) -> Any:
        """The package's environment.

        Raises:
            SettingsError: none is named, verifiers is not installed, or it cannot be made.
        """
        if self.config.env is None:
            raise SettingsError("`verifiers.env` is not set", hint="Name a module that has `load_environment`")
        package = need("verifiers", "verifiers")
        with told_as(
            SettingsError,
            f"the environment `{self.config.env}` of verifiers cannot be made",
            Exception,
            hint="Install its package, and look at `verifiers.args`",
        ):  # whatever a package of the user's raises
            return package.load_environment(self.config.env, **self.config.args)

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the rows of the environment's data set; of the one for evaluation as `test`, if it has one."""
        with told_as(
            SettingsError, f"`{self.config.env}` gives no data set", Exception, hint="Look at `verifiers.args`"
        ):
            environment = self.environment
            rows = [
                dict(row) for row in (environment.get_eval_dataset if split == "test" else environment.get_dataset)()
            ]
        return [self._task(json_ready(row), split) for row in rows]

    def _task(self, row: dict[str, Any], split: str) -> Task:
        prompt = row.pop("prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        named = row.get("example_id")
        return Task(
            task_id=str(digest_json([messages, row])[:16] if named is None else named), split=split,
            prompt=str(messages[-1]["content"]), ground_truth=row.get("answer"),
            messages=tuple({"role": one["role"], "content": one["content"]} for one in messages),
            metadata={"verifiers_row": row},
        )  # fmt: skip

    def start(self) -> "VerifiersEpisode":
        """Return a fresh episode."""
        return VerifiersEpisode(self)

    def score(self, trajectory: Trajectory) -> Score:
        """Return the rubric's verdict, its metrics as parts.

        Raises:
            RuntimeError: the rubric raised.
        """
        found = trajectory.metadata.get(VERDICT) or {}
        if found.get("error"):
            raise RuntimeError(found["error"])
        if found.get("reward") is None:
            return Score(reward=None)
        reward = float(found["reward"])
        return Score(reward=reward, success=reward >= self.config.success_at, parts=found["metrics"])

    def expert(self, task: Task) -> Sequence[str]:
        """Nobody here knows what an environment of somebody's wants."""
        raise no_expert("verifiers")


@cache
def _client_class() -> type:
    """Return the class of clients whose model is a policy that plays an episode."""
    from verifiers.clients import Client  # pyright: ignore[reportMissingImports]

    async def get_response(self: Any, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
        self.asked.put((list(prompt), list(tools or ())))
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    unused = dict.fromkeys(Client.__abstractmethods__)
    return type("PolicyClient", (Client,), {**unused, "get_response": get_response})


class VerifiersEpisode:
    """One rollout of the package's, whose model is the policy."""

    def __init__(self, environment: Verifiers) -> None:
        """Start nothing yet."""
        self._made = environment
        self._seen: list[Any] = []
        self._client: Any = None
        self._rollout: Any = None
        self._state: Any = None

    def reset(self, task: Task, seed: int) -> Observation:
        """Let the rollout begin, and return what it asks first."""
        row = {"prompt": list(task.messages), **task.metadata["verifiers_row"]}
        self._client = _client_class()(object())
        self._client.asked, self._client.answers = queue.Queue(), asyncio.Queue()
        work = self._made.environment.rollout(row, self._client, "policy", {})
        self._rollout = asyncio.run_coroutine_threadsafe(work, background_loop())
        self._rollout.add_done_callback(lambda _: self._client.asked.put(None))
        asked = self._wait()
        if asked is None:
            raise RuntimeError(f"the environment ended before the first turn{self._why()}")
        prompt, tools = asked
        self._seen = prompt
        schemas = [
            {"type": "function", "function": {k: getattr(tool, k) for k in ("name", "description", "parameters")}}
            for tool in tools
        ]
        return Observation(
            messages=[_message(one) for one in prompt],
            tools=schemas,
            metadata={"ground_truth": task.ground_truth, **task.metadata},
        )

    def step(self, action: str) -> Step:
        """Give the rollout what the policy wrote, and return what it asks next."""
        response, records = _response(action, len(self._seen))
        self._answer(response)
        asked = self._wait()
        if asked is None:
            if self._state.get("error") is not None and not _is_policys(self._state["error"]):
                raise RuntimeError(f"the environment failed{self._why()}")
            return Step(done=True, tool_calls=records)
        new = asked[0][len(self._seen) + 1 :]
        self._seen = asked[0]
        replies = [_message(one) for one in new]
        told = iter([reply["content"] for reply in replies if reply["role"] == "tool"])
        records = [record if record.error else replace(record, result=next(told, "")) for record in records]
        return Step(messages=replies, done=False, tool_calls=records)

    def close(self) -> dict[str, Any]:
        """End the rollout if it is not over, and have the rubric judge it."""
        if self._rollout is None:
            return {}
        if not self._rollout.done():
            self._answer(need("verifiers", "verifiers").OverlongPromptError("the turn loop ended the attempt"))
            self._wait()
        return {VERDICT: self._judged()}

    def _answer(self, response: Any) -> None:
        """Hand a response to the waiting client; an error is raised there, as of a model that failed."""
        asyncio.run_coroutine_threadsafe(self._client.answers.put(response), background_loop()).result()

    def _wait(self) -> tuple[list[Any], list[Any]] | None:
        """Return the next prompt and its tools, or None when the rollout has ended."""
        try:
            asked = self._client.asked.get(timeout=self._made.config.timeout_seconds)
        except queue.Empty:
            self._rollout.cancel()
            raise TimeoutError(
                f"the environment did not answer within {self._made.config.timeout_seconds:g} s"
            ) from None
        if asked is None:
            self._state = self._rollout.result()
        return asked

    def _why(self) -> str:
        error = self._state.get("error") if self._state is not None else None
        return f": {type(error).__name__}: {error}" if error is not None else ""

    def _judged(self) -> dict[str, Any]:
        if self._state is None:
            return {"error": "the rollout left no state"}
        rubric = self._made.environment.rubric

        async def judge() -> None:
            await rubric.score_rollout(self._state)
            with contextlib.suppress(AttributeError):
                await rubric.cleanup(self._state)

        try:
            asyncio.run_coroutine_threadsafe(judge(), background_loop()).result(self._made.config.timeout_seconds)
        except Exception as error:  # reward functions are the package's
            return {"error": f"{type(error).__name__}: {error}"}
        metrics = {name: float(value) for name, value in (self._state["metrics"] or {}).items()}
        return {"reward": float(self._state["reward"]), "metrics": metrics}


def _message(message: Any) -> Message:
    """Return a message of verifiers as role and content."""
    content = message.content
    if content is not None and not isinstance(content, str):
        content = "\n".join(str(getattr(part, "text", part)) for part in content)
    return {"role": message.role, "content": content or ""}


def _response(action: str, turn: int) -> tuple[Any, list[ToolCall]]:
    """Return what a policy wrote as a model's response, and the records of its calls; a broken one is only text."""
    from verifiers.types import Response, ResponseMessage, ToolCall as TheirCall  # pyright: ignore[reportMissingImports]

    written = tool_calls(action)
    broken = [call for call in written if call.error is not None]
    calls = [] if broken else written
    message = ResponseMessage(
        content=action.split(TOOL_CALL, 1)[0].rstrip() if calls else action,
        tool_calls=[
            TheirCall(id=f"call_{turn}_{i}", name=call.tool or "", arguments=json.dumps(call.args or {}))
            for i, call in enumerate(calls)
        ] or None,
        finish_reason="tool_calls" if calls else "stop", is_truncated=False,
    )  # fmt: skip
    records = [ToolCall(tool=one.tool, args=one.args, result=one.detail, ok=False, error=one.error) for one in broken]
    records += [ToolCall(tool=one.tool, args=one.args, result="", ok=True) for one in calls]
    return Response(id=f"turn_{turn}", created=0, model="policy", message=message), records


def _is_policys(error: Any) -> bool:
    """Say whether an error is of a call that the policy wrote, and not of the environment."""
    return isinstance(error, need("verifiers", "verifiers").ToolError)
