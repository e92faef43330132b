"""The actors of a run on Ray, as plain classes: EnvWorker makes parts, RolloutWorker generates for it.

An EnvWorker has environments and tools, runs what a stage would run of a part, and commits it. The tokens of a policy
come from its RolloutWorker, turn by turn, so that nothing but the requests of one part and their answers is ever on the
way.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.errors import EngineError
from nanoskyrl.stages.core.executor import Job, Maker
from nanoskyrl.stages.core.output import Written
from nanoskyrl.stages.core.registry import look_in
from nanoskyrl.stages.core.storage import at_hand, is_local, patient
from nanoskyrl.stages.engines.base import (
    AsyncEngine,
    AsyncTokenEngine,
    Engine,
    Generation,
    Request,
    SamplingParams,
    ServedEngine,
    TokenEngine,
    face_of,
    make_engine,
)
from nanoskyrl.stages.models.policy import frame_digest, is_weights
from nanoskyrl.stages.models.remote_code import allow_code
from nanoskyrl.stages.models.rendering import Renderer

NEEDED = ("policy_digest", "context_length", "canary_tolerance", "proof", "stop_ids")
"""What must be known of an engine by who asks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a worker must know before it imports anything of the user's."""

    folders: tuple[str, ...]
    """Where modules are found that the settings name."""
    trust_remote_code: bool

    def enter(self) -> None:
        """Make it so in this process."""
        look_in(self.folders)
        allow_code(self.trust_remote_code)


class RolloutWorker:
    """An engine on GPUs of its own. An asynchronous actor: what is asked meanwhile waits only where the engine must."""

    def __init__(self, surroundings: Surroundings) -> None:
        """Hold no engine yet."""
        surroundings.enter()
        self._named: tuple[str, Any] | None = None
        self._engine: Any = None
        self._alone = asyncio.Lock()

    async def answers(self) -> bool:
        """Say that this worker is there."""
        return True

    async def load(self, name: str, config: Any, policy: Path) -> dict[str, Any]:
        """Bring this engine to a policy, and return what is to be known of it."""
        async with self._alone:
            return await asyncio.to_thread(self._load, name, config, policy)

    def _load(self, name: str, config: Any, policy: Path) -> dict[str, Any]:
        if self._named != (name, config):
            if self._engine is not None:
                self._engine.close()
            self._engine, self._named = make_engine(name, config), (name, config)
        engine: TokenEngine = self._engine
        engine.load(policy if is_local(policy) else patient(policy))
        told = {name: getattr(engine, name) for name in NEEDED}
        if isinstance(engine, AsyncEngine):
            told |= {"capacity": engine.capacity, "trajectory_seconds": engine.trajectory_seconds}
        return told

    async def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Generation]:
        """Return one generation for each request, in order."""
        async with self._alone:
            return await asyncio.to_thread(self._engine.generate, requests, sampling)

    async def sample(self, request: Request, sampling: SamplingParams) -> Generation:
        """Return what came of a request, beside others."""
        engine: AsyncTokenEngine = self._engine
        return await asyncio.wrap_future(engine.submit(engine.sample(request, sampling)))

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return nats of each token but the first, given those before, at temperature 1."""
        async with self._alone:
            return await asyncio.to_thread(self._engine.logprobs, token_ids)

    async def verify(self) -> None:
        """Raise ProofError unless what was generated comes from the policy that was asked for."""
        await asyncio.to_thread(self._engine.verify)


def cause_of(error: BaseException) -> BaseException:
    """Return what was raised, out of what Ray wraps around it at each call from worker to worker."""
    from ray.exceptions import RayTaskError

    return cause_of(error.cause) if isinstance(error, RayTaskError) else error


def answers(refs: Any) -> Any:
    """Return what actors return; raises what they raised."""
    import ray

    try:
        return ray.get(refs)
    except Exception as error:
        raise cause_of(error) from error


class RemoteEngine(TokenEngine):
    """The engines of RolloutWorkers: all are brought to a policy, and the first one is asked."""

    takes_stop_strings = True

    def __init__(self, name: str, config: Any, workers: Callable[[], Sequence[Any]]) -> None:
        """Ask nobody yet.

        Args:
            name: Of the engine.
            config: Its settings.
            workers: Returns the actors; called at each `load`.
        """
        self._name, self._config, self._find = name, config, workers
        self._workers: Sequence[Any] = ()
        self._frame: str | None = None
        self._stop_ids: frozenset[int] = frozenset()

    def load(self, policy: Path) -> None:
        """Have the workers take these weights; returns once they are in use."""
        policy = policy.absolute()
        self._workers = self._find()
        told, *_ = answers([worker.load.remote(self._name, self._config, policy) for worker in self._workers])
        self._stop_ids = told.pop("stop_ids")
        for name, value in told.items():
            setattr(self, name, value)
        files = at_hand(policy, without=is_weights)
        if (frame := frame_digest(files)) != self._frame:
            from nanoskyrl.stages.models.loading import load_tokenizer  # which loads torch, that no grader needs

            self.renderer, self._frame = Renderer(load_tokenizer(files)), frame

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every token that ends a turn."""
        return self._stop_ids

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Generation]:
        """Return one generation for each request, in order."""
        return answers(self._workers[0].generate.remote(requests, sampling))

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return nats of each token but the first, given those before, at temperature 1."""
        return answers(self._workers[0].logprobs.remote(token_ids))


class RemoteServedEngine(RemoteEngine, ServedEngine):
    """The same for engines that sample many requests at once."""

    async def sample(self, request: Request, sampling: SamplingParams) -> Generation:
        """Return what came of a request."""
        try:
            return await self._workers[0].sample.remote(request, sampling)
        except Exception as error:
            raise cause_of(error) from error

    def verify(self) -> None:
        """Raise ProofError unless what was generated comes from the policy that was asked for."""
        answers([worker.verify.remote() for worker in self._workers])

    def close(self) -> None:
        """End the thread that asks."""
        self.stop_loop()


def remote_engine(name: str, config: Any, workers: Callable[[], Sequence[Any]]) -> RemoteEngine:
    """Return an engine of this name that lives in RolloutWorkers."""
    kind = RemoteServedEngine if issubclass(face_of(name), AsyncEngine) else RemoteEngine
    return kind(name, config, workers)


class EnvWorker:
    """Environments, tools and graders: makes the parts of a stage, one after the other."""

    def __init__(self, surroundings: Surroundings, rollout_worker: Any = None) -> None:
        """Begin nothing yet.

        Args:
            surroundings: Of the driver.
            rollout_worker: Whom it asks for the tokens of a policy.
        """
        surroundings.enter()
        self._rollout_worker = rollout_worker
        self._engines: dict[tuple[str, Any], Engine] = {}
        self._make: Maker | None = None

    def begin(self, job: Job) -> None:
        """Get ready to make the parts of a job."""
        for place in job.arguments.values():
            if hasattr(place, "fs"):
                patient(place)
        engine = {} if job.engine is None else {"engine": self._engine(*job.engine)}
        self._make = job.begin(**job.arguments, **engine)

    def make(self, index: int, item: Any) -> Written | list[str]:
        """Make a part and commit it; return what it is, or why it is left out."""
        if self._make is None:  # Ray started this worker again, and its driver has not seen it yet
            raise EngineError("the worker has not begun the job")
        return self._make(index, item)

    def _engine(self, name: str, config: Any) -> Engine:
        key = (name, repr(config))
        if key not in self._engines:
            holds = face_of(name).holds_policy
            self._engines[key] = (
                remote_engine(name, config, lambda: [self._rollout_worker]) if holds else make_engine(name, config)
            )
        return self._engines[key]
