"""`tool_use`: questions that want a tool, asked over several turns.

The policy writes `<tool_call>{"tool": ..., "args": {...}}</tool_call>`, sees what the
tool says as a `tool` message, and ends with its answer in `<answer>` tags.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from nanoskyrl.envs.actions import TOOL_CALL, TOOL_CALL_END, tool_calls
from nanoskyrl.envs.base import Observation, Score, Step, Task
from nanoskyrl.envs.datasets import TaskSourceConfig
from nanoskyrl.envs.graders.golds import golds_of
from nanoskyrl.envs.graders.kinds import ANSWERED, NO_ANSWER, answer_verdict, unanswered
from nanoskyrl.envs.sandbox.base import Sandbox, choose
from nanoskyrl.envs.tools import Tool, carry_out_all, offer, replies_to
from nanoskyrl.envs.worlds.text_math.environment import INSTRUCTION
from nanoskyrl.envs.worlds.text_math.problems import MAX_LEVEL
from nanoskyrl.envs.worlds.tool_use.mcp_tools import Sessions
from nanoskyrl.envs.worlds.tool_use.python_exec import make_python_exec
from nanoskyrl.envs.worlds.tool_use.search import Corpus, passages, read_corpus, shipped
from nanoskyrl.envs.worlds.tool_use.tasks import NEEDS, ToolTask, ToolTaskKind, generated, written
from nanoskyrl.envs.worlds.tool_use.world import pages
from nanoskyrl.stages.core.checked import COMMAND, FILE, PositiveFloat, Share
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.trajectory import Trajectory

NOTES, NOTE_LENGTH = 16, 300
"""Calls that the summary for policies without history tells of, and characters of each result."""
USUAL = ("calculator", "search")
MAX_CALLS = 16
"""Carried out of one action; a policy that repeats the tag must not fill its own context."""
WORLD_KINDS = ("multi_hop", "mixed")
"""Kinds that ask about the invented world, whose pages join the encyclopedia."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUseConfig(TaskSourceConfig):
    """Which tools are offered, and which tasks are posed."""

    tools: tuple[str, ...] = ()
    """calculator, search, wiki, python_exec, `module:function`; if empty, the first two and what the kinds need."""
    kinds: Annotated[tuple[ToolTaskKind, ...], Meta(min_length=1)] = ("calculator",)
    """Tasks posed, taking turns; calculator asks for products, search for a fact."""
    level: Annotated[int, Meta(ge=1, le=MAX_LEVEL)] = 1
    """Higher is harder; search tasks have one level."""
    call_weight: Share = 0.1
    """Part of the reward given for calls that are all valid, with at least one; the rest is for the right answer."""
    corpus: str | None = field(default=None, metadata=FILE)
    """A .jsonl or .parquet file of title and text, in place of the encyclopedia that ships."""
    sandbox: Sandbox = "auto"
    """Where python_exec runs; auto: the first that works here."""
    python_session: bool = False
    """Whether a program of python_exec continues from the names of the one before; only monty can."""
    mcp: tuple[str, ...] = field(default=(), metadata=COMMAND)
    """MCP servers whose tools are offered, too: commands such as "python server.py", or http addresses."""
    mcp_timeout_seconds: PositiveFloat = 60.0
    """For a server's answer to one call; then the attempt fails."""

    def check(self) -> None:
        """Refuse pages without the tasks' answers, and sessions in a sandbox that has none."""
        looked_up = [kind for kind in self.kinds if kind in ("search", *WORLD_KINDS)]
        if self.corpus is not None and self.data is None and looked_up:
            raise SettingsError(
                f"`tool_use.corpus` replaces the pages that tasks of kind `{looked_up[0]}` ask about",
                hint="Give tasks of your own with `--data`, or choose other kinds",
            )
        if self.python_session and self.sandbox not in ("auto", "monty"):
            raise SettingsError(
                f"`tool_use.python_session` needs the sandbox monty, not {self.sandbox}", hint="Leave one of them out"
            )

    @property
    def offered(self) -> tuple[str, ...]:
        """The names of the tools on offer."""
        needed = () if self.data is not None else (tool for kind in self.kinds for tool in NEEDS[kind])
        return self.tools or tuple(dict.fromkeys((*USUAL, *needed)))


class ToolUse:
    """Questions, tools, and answers that count."""

    Config = ToolUseConfig

    def __init__(self, config: ToolUseConfig) -> None:
        """Look the tools up, so that a misspelt one, or one that cannot run here, fails at once.

        Raises:
            SettingsError: a tool does not exist or has no JSON schema.
            SandboxError: python_exec is offered, and no sandbox works here.
        """
        self.config = config
        self._corpus = _corpus(config)
        own: dict[str, Callable[..., Any]] = {"search": self._corpus.search, "wiki": self._corpus.wiki}
        self.sandbox = choose(config.sandbox) if "python_exec" in config.offered else None
        if self.sandbox is not None:
            own["python_exec"] = make_python_exec(self.sandbox)
        self.tools = offer(config.offered, own)
        self._plans: dict[str, ToolTask] = {}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of `train` or `test`; kinds take turns while they last."""
        self._sessions().tools()  # a server that does not start fails here, before anything is attempted
        if (tasks := self.config.read(split)) is not None:
            return tasks
        count = self.config.count(split)
        share = -(-count // len(self.config.kinds))
        by_kind = [self._tasks_of(kind, split, share) for kind in self.config.kinds]
        return [tasks[i] for i in range(share) for tasks in by_kind if i < len(tasks)][:count]

    def _tasks_of(self, kind: str, split: str, count: int) -> list[Task]:
        plans = generated(kind, self.config.level, split, count)
        self._plans |= plans if split == "train" else {f"{name}@test": plan for name, plan in plans.items()}
        return [
            Task(
                task_id=name, split=split, prompt=plan.question, ground_truth=plan.answer,
                metadata={"kind": kind, "files": plan.files} if plan.files else {"kind": kind},
            )
            for name, plan in plans.items()
        ]  # fmt: skip

    def start(self, *, in_tags: bool = True) -> "ToolUseEpisode":
        """Return a fresh episode; one whose answers need no tags leaves it to its scorer what answers."""
        return ToolUseEpisode(self, in_tags)

    def _sessions(self) -> Sessions:
        return Sessions(self.config.mcp, self.config.mcp_timeout_seconds)

    def tools_for(self, task: Task, sessions: Sessions) -> Mapping[str, Tool]:
        """Return the tools of one episode: python_exec has files, and perhaps names, of its own, servers a session.

        Raises:
            SettingsError: a server has a tool of a name that is taken.
        """
        served = sessions.tools()
        if taken := sorted(served.keys() & self.tools.keys()):
            raise SettingsError(
                f"an MCP server has a tool `{taken[0]}`, which is offered already", hint="Leave it out of tools"
            )
        return {**self._local_tools(task), **served}

    def _local_tools(self, task: Task) -> Mapping[str, Tool]:
        files = {name: text.encode() for name, text in (task.metadata.get("files") or {}).items()}
        if self.sandbox is None or not (files or self.config.python_session):
            return self.tools
        function = make_python_exec(self.sandbox, files, session=self.config.python_session)
        return {**self.tools, "python_exec": Tool("python_exec", function)}

    def score(self, trajectory: Trajectory) -> Score:
        """Reward the right answer, and valid calls; an answer inside a tool's words does not count."""
        answered, right = answer_verdict(trajectory, self.config.reasoning_marks)
        records = [call for turn in trajectory.turns for call in turn.tool_calls]
        calls = [call for call in records if call.error != NO_ANSWER]
        valid = bool(calls) and all(call.ok for call in calls)
        weight = self.config.call_weight
        return Score(
            reward=(1 - weight) * right + weight * valid,
            success=right,
            parts={"answer": float(right), "calls": float(valid), ANSWERED: float(answered)},
        )

    def expert(self, task: Task) -> list[str]:
        """Call what the task needs, then answer."""
        name = task.task_id if task.split == "train" else f"{task.task_id}@test"
        if self.config.data is None and name not in self._plans:
            self.tasks(task.split)
        plan = self._plans.get(name)
        turns = plan.turns if plan else ()
        actions = ["".join(f"{TOOL_CALL}{written(call)}{TOOL_CALL_END}" for call in calls) for calls in turns]
        return [*actions, f"<answer>{golds_of(task.ground_truth)[0]}</answer>"]


def _corpus(config: ToolUseConfig) -> Corpus:
    if config.corpus is not None:
        return read_corpus(config.corpus)
    if config.data is None and any(kind in WORLD_KINDS for kind in config.kinds):
        return Corpus([*passages(), *pages()])
    return shipped()


class ToolUseEpisode:
    """Answer calls until there is an answer, or neither."""

    def __init__(self, environment: ToolUse, in_tags: bool) -> None:
        """Share the environment's tools."""
        self.environment = environment
        self.in_tags = in_tags
        self.tools: Mapping[str, Tool] = environment.tools
        self._sessions = environment._sessions()
        self._grader: str | None = None
        self._notes: list[str] = []

    def reset(self, task: Task, seed: int) -> Observation:
        """Pose the question; the tools are shown by whoever renders the prompt."""
        self.tools = self.environment.tools_for(task, self._sessions)
        self._grader = task.metadata.get("grader")
        messages = task.messages or ({"role": "user", "content": f"{task.prompt}\n{INSTRUCTION}"},)
        schemas = [tool.schema for tool in self.tools.values()]
        return Observation(
            messages=messages, tools=schemas, metadata={"ground_truth": task.ground_truth, **task.metadata}
        )

    def step(self, action: str) -> Step:
        """Carry out the calls; without any, the episode ends, and a missing answer is recorded."""
        written = tool_calls(action)
        if not written:
            missing = unanswered(action, self._grader, self.environment.config.reasoning_marks) if self.in_tags else []
            return Step(messages=replies_to(missing), done=True, tool_calls=missing)
        calls, replies = carry_out_all(written, self.tools, MAX_CALLS)
        self._notes += [
            f"{call.tool} {json.dumps(call.args)} gave {(call.result or '')[:NOTE_LENGTH]}" for call in calls if call.ok
        ]
        summary = "\n".join(self._notes[-NOTES:]) if self._notes else None
        return Step(messages=replies, done=False, tool_calls=calls, summary=summary)

    def close(self) -> None:
        """End the sessions with servers."""
        self._sessions.close()
