"""The turn loop: one attempt at one task, tokens in and tokens out.

An attempt keeps its tokens from the first prompt on. What is sampled is appended as it
was sampled, what is observed as the template writes it; nothing is encoded twice. Where a
template rewrites earlier turns, every turn becomes a row with a prompt of its own. What
fails inside one attempt, environment or engine, ends that attempt alone.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from nanoskyrl.envs.actions import restore_stop
from nanoskyrl.envs.base import Environment, Message, Task, check_metadata, check_observation, check_step
from nanoskyrl.envs.memory import Memory
from nanoskyrl.envs.messages import tidy_messages
from nanoskyrl.stages.core.at_once import AtOnce
from nanoskyrl.stages.core.digests import derive_seed
from nanoskyrl.stages.core.metrics import Stopwatch
from nanoskyrl.stages.core.safe_text import struck
from nanoskyrl.stages.core.trajectory import STOP_REASONS, Trajectory, Turn
from nanoskyrl.stages.engines.base import (
    ChatRequest,
    Engine,
    Generation,
    Reply,
    Request,
    SamplingParams,
    TextEngine,
    TokenEngine,
)
from nanoskyrl.stages.engines.listening import Listener
from nanoskyrl.stages.models.rendering import Renderer, answering


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Where an attempt is cut off; lengths are in tokens."""

    max_turns: int
    max_generate_length: int
    """Sampled in one turn."""
    max_input_length: int
    """Longest prompt of a turn; a longer one ends the attempt before it is sampled from."""
    max_sequence_length: int
    """Prompt and response together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The columns that say whose attempt this is."""

    trajectory_id: str
    group_id: str
    sample: int
    env: str
    seed: int
    policy_version: int | None
    policy_digest: str | None


ONE_BY_ONE = AtOnce(1)
FAILURES = (Exception, SystemExit, GeneratorExit)
"""What an environment may raise and fail its own attempt alone; Ctrl-C goes through."""
IDENTITY = tuple(f.name for f in fields(Identity))


@dataclass(slots=True)
class _Segment:
    """One row in the making."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.prompt_ids) + len(self.response_ids)

    def append(self, ids: Sequence[int], *, sampled: bool, rollout_logprobs: np.ndarray | None = None) -> None:
        self.response_ids += ids
        self.loss_mask += [int(sampled)] * len(ids)
        self.rollout_logprobs += [float("nan")] * len(ids) if rollout_logprobs is None else rollout_logprobs.tolist()


class Attempt:
    """One trajectory while it happens."""

    def __init__(
        self,
        task: Task,
        identity: Identity,
        environment: Environment,
        engine: Engine,
        sampling: SamplingParams,
        limits: TurnLimits,
        *,
        stepwise: bool,
        memory: Memory = Memory(),
        speech: Renderer | Listener | None = None,
    ) -> None:
        """Pose the task and build the first prompt; `speech` reads turns, and writes prompts of tokens."""
        self.task, self.identity, self.environment = task, identity, environment
        self.engine, self.sampling, self.limits, self.stepwise = engine, sampling, limits, stepwise
        self.memory = memory
        self.speech = speech or (engine.renderer if isinstance(engine, TokenEngine) else Listener())
        self._calls = 0
        self._first: Sequence[Message] = ()
        self._turns: list[Sequence[Message]] = []
        self._summary: str | None = None
        self.messages: list[Message] = []
        self.metadata: dict[str, Any] = dict(task.metadata)
        self.segments: list[_Segment] = []
        self.turn = 0
        self.stop_reason: str | None = None
        self.error: str | None = None
        self.counted: tuple[int | None, int | None] = (0, 0)
        """Prompt and completion tokens of all turns, where the engine shows none; None: one of them was not counted."""
        self._tools: Sequence[dict[str, Any]] = ()
        self._episode: Any = None
        try:
            self._episode = environment.start()
            observation = self._episode.reset(task, identity.seed)
            check_observation(observation)
            self.messages = self._tidy(observation.messages)
            self._first = tuple(self.messages)
            self.metadata.update(observation.metadata)
            self._tools = observation.tools
            first = self.speech.prompt_ids(self.messages, self._tools) if isinstance(self.speech, Renderer) else []
            self.segments.append(_Segment(first))
            self._check_input()
        except FAILURES as error:  # whatever an environment raises is this attempt's failure and nobody else's
            self._fail(error)

    def _tidy(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as they can be shown: chat templates write text, and endpoints take pictures, too."""
        return [
            {**message, "content": struck(message["content"])} if isinstance(message.get("content"), str) else message
            for message in tidy_messages(messages, pictures=not isinstance(self.speech, Renderer))
        ]

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to sample."""
        return self.stop_reason is not None

    def request(self) -> Request:
        """Return what is to be sampled next."""
        segment = self.segments[-1]
        return Request(
            prompt_ids=[*segment.prompt_ids, *segment.response_ids],
            seed=derive_seed(self.identity.seed, "turn", self.turn),
            max_tokens=min(self.limits.max_generate_length, self.limits.max_sequence_length - segment.length),
            group=self.identity.group_id,
        )

    def take(self, generation: Generation) -> None:
        """Append what was sampled, act on it, and append what was observed."""
        assert isinstance(self.speech, Renderer)
        if generation.error is not None:
            self._fail(generation.error)
            return
        if generation.rollout_logprobs is not None and not np.isfinite(generation.rollout_logprobs).all():
            self._fail("the engine's log-probs are not finite")
            return
        segment = self.segments[-1]
        first = len(segment.response_ids)
        segment.append(generation.token_ids, sampled=True, rollout_logprobs=generation.rollout_logprobs)
        words = generation.token_ids[:-1] if generation.finish_reason == "stop" else generation.token_ids
        text = self.speech.decode(words)
        if generation.finish_reason in ("stop", "stop_string"):
            self._act(text, first, len(generation.token_ids))
            return
        reason = "max_sequence_length" if segment.length >= self.limits.max_sequence_length else "length"
        # Cut off in the middle of a word: the environment is not asked to act on half an action.
        self._cut_off(text, reason, first, len(generation.token_ids))

    def chat_request(self) -> ChatRequest | None:
        """Return what is to be asked for next, of an engine that takes words; None: it failed, and has ended."""
        seed = derive_seed(self.identity.seed, "turn", self.turn)
        try:
            shown = self.memory.view(self._first, self._turns, self._summary)
        except FAILURES as error:  # as in __init__
            self._fail(error)
            return None
        return ChatRequest(
            messages=shown, tools=self._tools, seed=seed, max_tokens=self.limits.max_generate_length,
            template_arguments=self.speech.arguments if isinstance(self.speech, Listener) else {},
        )  # fmt: skip

    def take_reply(self, reply: Reply) -> None:
        """Act on what an endpoint wrote, and count its tokens."""
        prompt, completion = self.counted
        self.counted = _sum(prompt, reply.prompt_tokens), _sum(completion, reply.completion_tokens)
        if reply.error is not None:
            self._fail(reply.error)
        elif reply.finish_reason == "length":  # as in `take`
            self._cut_off(reply.text, "length", None, None)
        else:
            self._act(restore_stop(reply.text, self.sampling.stop_strings), None, None)

    def take_text(self, action: str) -> None:
        """Act on text from an engine without tokens, which counts none."""
        self.counted = (None, None)
        self._act(action, None, None)

    def _cut_off(self, text: str, reason: str, first: int | None, count: int | None) -> None:
        """Record a turn that nobody acts on."""
        self._unanswered(text, first, count)
        self._end(reason)

    def _unanswered(self, text: str, first: int | None, count: int | None) -> None:
        try:
            action, _ = self.speech.heard(text, self._tools, self._calls)  # graders read it as environments do
        except FAILURES:  # of a format of the user's
            action = text
        turn = Turn(action=action, observation="", done=False, first_token=first, token_count=count)
        self._record(turn, {"role": "assistant", "content": text}, [])

    def _act(self, text: str, first: int | None, count: int | None) -> None:
        """Let the environment act on a turn, and make the next prompt; what fails there fails this attempt alone."""
        try:
            action, said = self.speech.heard(text, self._tools, self._calls)
            step = self._episode.step(action)
            check_step(step)
            step = replace(step, messages=answering(said, self._tidy(step.messages)))
        except FAILURES as error:  # as in __init__
            self._unanswered(text, first, count)
            self._fail(error)
            return
        self._calls += len(said.get("tool_calls") or ())
        self.metadata.update(step.metadata)
        self._summary = self._summary if step.summary is None else step.summary
        turn = Turn(
            action=action, observation=step.observation, reward=step.reward, done=step.done,
            tool_calls=tuple(step.tool_calls), first_token=first, token_count=count,
        )  # fmt: skip
        self._record(turn, said, step.messages)
        self.turn += 1
        if step.done:
            self._end("max_turns" if step.truncated else "stop")
        elif self.turn >= self.limits.max_turns:
            self._end("max_turns")
        elif isinstance(self.speech, Renderer):
            try:
                self._go_on(self.speech, said, step.messages)
            except FAILURES as error:  # a template refuses what this policy has brought about
                self._fail(error)

    def _go_on(self, renderer: Renderer, said: Message, observations: Sequence[Message]) -> None:
        """Make the prompt of the next turn."""
        segment = self.segments[-1]
        if self.stepwise:
            shown = self.memory.view(self._first, self._turns, self._summary)
            prompt = renderer.prompt_ids(shown, self._tools)
            if len(prompt) >= self.limits.max_sequence_length:
                self._end("max_sequence_length")
            elif len(prompt) > self.limits.max_input_length:
                self._end("max_input_length")
            else:
                self.segments.append(_Segment(prompt))
            return
        added = renderer.continuation_ids(observations, segment.response_ids[-1], said)
        if segment.length + len(added) >= self.limits.max_sequence_length:
            self._end("max_sequence_length")
        else:
            segment.append(added, sampled=False)
            self._check_input()

    def _check_input(self) -> None:
        length = self.segments[-1].length
        if length > self.limits.max_input_length:
            self._end("max_input_length")
        elif length >= self.limits.max_sequence_length:
            self._end("max_sequence_length")

    def _record(self, turn: Turn, said: Message, observations: Sequence[Message]) -> None:
        self.messages.append(said)
        self._turns.append((said, *observations))
        self.segments[-1].turns.append(turn)
        self.segments[-1].messages = [*self.messages, *observations]
        self.messages += observations

    def abandoned(self, error: str) -> "Attempt":
        """Return the attempt as it is now, failed; whatever still works on this one is not seen any more."""
        left = copy.copy(self)
        left.segments = [
            replace(
                segment, response_ids=segment.response_ids[:], loss_mask=segment.loss_mask[:],
                rollout_logprobs=segment.rollout_logprobs[:], turns=segment.turns[:], messages=segment.messages[:],
            )
            for segment in self.segments
        ]  # fmt: skip
        left.messages, left.metadata, left._episode = self.messages[:], dict(self.metadata), None
        left._fail(error)
        return left

    def _fail(self, error: BaseException | str) -> None:
        self.error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._end("error")

    def _end(self, reason: str) -> None:
        self.stop_reason = reason
        if self._episode is None:
            return
        try:
            last_words = self._episode.close()
            if last_words is not None:
                check_metadata(last_words)
                self.metadata.update(last_words)
        except FAILURES as error:  # as in __init__
            if self.error is None:
                self.error, self.stop_reason = f"{type(error).__name__}: {error}", "error"
        self._episode = None

    def rows(self) -> list[Trajectory]:
        """Return the finished attempt: one row, or one for each turn."""
        assert self.stop_reason is not None
        segments = self.segments or [_Segment([])]
        return [self._row(segment, index, index == len(segments) - 1) for index, segment in enumerate(segments)]

    def _row(self, segment: _Segment, index: int, last: bool) -> Trajectory:
        assert self.stop_reason is not None
        tokens = isinstance(self.engine, TokenEngine)
        with_logprobs = tokens and self.sampling.logprobs_mode != "recomputed"
        renderer = self.speech if isinstance(self.speech, Renderer) else None
        actions = "\n".join(turn.action for turn in segment.turns)
        return Trajectory(
            **{name: getattr(self.identity, name) for name in IDENTITY},
            step_index=index,
            is_last_step=last,
            task_id=self.task.task_id,
            split=self.task.split,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            logprobs_mode=self.sampling.logprobs_mode,
            prompt_ids=np.array(segment.prompt_ids, np.int32) if tokens else None,
            response_ids=np.array(segment.response_ids, np.int32) if tokens else None,
            loss_mask=np.array(segment.loss_mask, np.int8) if tokens else None,
            rollout_logprobs=np.array(segment.rollout_logprobs, np.float32) if with_logprobs else None,
            prompt=renderer.decode_prompt(segment.prompt_ids)
            if renderer
            else "\n".join(str(m["content"]) for m in self.messages if m["role"] in ("system", "user")),
            response=renderer.decode(segment.response_ids) if renderer else actions,
            messages=segment.messages or self.messages,
            turns=segment.turns,
            status=STOP_REASONS[self.stop_reason],
            stop_reason=self.stop_reason,
            error=self.error,
            trainable=tokens,
            prompt_tokens=len(segment.prompt_ids) if tokens else self.counted[0],
            completion_tokens=sum(segment.loss_mask) if tokens else self.counted[1],
            metadata=self.metadata,
        )


def _sum(counted: int | None, more: int | None) -> int | None:
    return None if counted is None or more is None else counted + more


def play(
    attempts: Sequence[Attempt], engine: Engine, sampling: SamplingParams, watch: Stopwatch,
    at_once: AtOnce = ONE_BY_ONE,
) -> None:  # fmt: skip
    """Carry all attempts to their end, turn by turn, in their order.

    Args:
        attempts: Begun; those that have ended already are left as they are.
        engine: Samples the turns of all living attempts together.
        sampling: The same for all.
        watch: Takes the time of generating and of the environments apart.
        at_once: How the environments of all living attempts step.
    """
    while alive := [attempt for attempt in attempts if not attempt.ended]:
        if isinstance(engine, TextEngine):
            with watch("env"):
                replies = [engine.reply(attempt.environment, attempt.task, attempt.turn) for attempt in alive]
                at_once.map(lambda turn: turn[0].take_text(turn[1]), zip(alive, replies, strict=True))
            continue
        assert isinstance(engine, TokenEngine)  # chat engines play concurrently
        with watch("generate"):
            generations = engine.generate([attempt.request() for attempt in alive], sampling)
        with watch("env"):
            at_once.map(lambda turn: turn[0].take(turn[1]), zip(alive, generations, strict=True))
