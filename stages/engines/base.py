"""What generates: an engine takes prompt tokens and returns sampled tokens with their log-probs.

A token engine loads a policy and can prove which one it holds. A chat engine (`openai`)
asks an endpoint for text, a text engine (`scripted`) writes what it was given: they show no
tokens, and their trajectories are for reading and scoring, marked untrainable.
"""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from nanoskyrl.envs.base import Environment, Message, Task
from nanoskyrl.stages.core.checked import PLACE, Checked, Device, PositiveInt
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.models.rendering import Renderer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; the same for all requests of a call."""

    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    logprobs_mode: str = "processed"
    """processed: of the distribution drawn from; raw: of the logits as they are; recomputed: none."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a turn as soon as they occur in it; they stay in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn to be sampled."""

    prompt_ids: Sequence[int]
    seed: int
    """Of this turn's random draws, and of nothing else's."""
    max_tokens: int
    group: str = ""
    """Requests of one group begin the same way, and are kept together where that saves work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What came of a request."""

    token_ids: list[int]
    """With the stop token, or the tokens of the stop string, if one was sampled."""
    rollout_logprobs: np.ndarray | None
    """[len(token_ids)] float32 nats; None where `recomputed` was asked for."""
    finish_reason: str
    """stop (a stop token, the last one), stop_string, length or error."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One turn to be asked for in words."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of the tools on offer."""
    seed: int
    max_tokens: int
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """What the endpoint's chat template is given, such as `enable_thinking`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of a chat request."""

    text: str = ""
    finish_reason: str
    """stop, length or error."""
    prompt_tokens: int | None = None
    """As the endpoint counts them; None: it does not say."""
    completion_tokens: int | None = None
    error: str | None = None


UNREACHABLE = "the endpoint did not answer"
"""How the error of an attempt begins that may well succeed when it is made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfConfig(Checked):
    """How the embedded engine runs."""

    batch_size: PositiveInt = 256
    """Rows generated together, taken in row order inside one part."""
    dtype: Literal["auto", "float64", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU; elsewhere float32, and float64 for benchmarks."""
    device: Device = field(default="auto", metadata=PLACE)
    """Where the model runs; auto finds a GPU."""

    @staticmethod
    def on_gpus(gpus: Sequence[int]) -> dict[str, Any]:
        """Return the settings under which it runs on these GPUs, or on the CPU where there is none."""
        return {"device": f"cuda:{gpus[0]}" if gpus else "cpu"}

    def for_benchmarks(self) -> dict[str, Any]:
        """Return the settings by which a benchmark's numbers hang on no batch size: on a CPU, float64.

        In float32 the last bits of a logit depend on the rows beside it, and now and then turn a token.
        """
        import torch  # the engine needs it, others do not

        on_cpu = self.device == "cpu" or (self.device == "auto" and not torch.cuda.is_available())
        return {"dtype": "float64"} if self.dtype == "auto" and on_cpu else {}


class Engine:
    """What generates; the kinds below say how it is asked. An engine of somebody's own is one class of such a kind."""

    holds_policy: ClassVar[bool] = False
    """Whether it is given a policy of ours and samples from it; else it samples from something of its own."""
    is_served: ClassVar[bool] = False
    """Whether it lives in servers that the next command of a run meets again."""
    takes_stop_strings: ClassVar[bool] = False
    place: Path | None = None
    """The run's directory, where it may find its servers, and write logs."""

    def keep_replies(self, journal: Path | None) -> None:
        """Keep every reply in this file, and take those that it holds from there; None: keep none."""

    def facts(self) -> Mapping[str, float | int | str | None]:
        """Return numbers about the engine's work since it was last asked, for the log."""
        return {}

    def close(self) -> None:
        """Stop what the engine started."""


class TokenEngine(Engine, ABC):
    """Generates tokens with a policy; the attributes are set by `load`."""

    holds_policy = True
    policy_digest: str | None = None
    renderer: Renderer
    context_length: int
    """Longest sequence, prompt and response together."""
    canary_tolerance: float = 1e-4
    """Nats by which its log-probs of a canary may differ from the trainer's, mean weighted by probability; this suits
    float32."""
    proof: Mapping[str, Any] = {}
    """What was shown when the policy was loaded, beyond that the call returned. `sums_match`: exact sums of all weights
    that compute are those of the policy's files."""

    @property
    @abstractmethod
    def stop_ids(self) -> frozenset[int]:
        """Every token that ends a turn."""

    @abstractmethod
    def load(self, policy: Path) -> None:
        """Take these weights; returns once they are in use."""

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Generation]:
        """Return one generation for each request, in order; one that fails never takes others with it."""

    @abstractmethod
    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return nats of each token but the first, given those before, at temperature 1."""


class AsyncEngine(Engine, ABC):
    """Works on many requests at once, each on its own; episodes continue while others wait."""

    capacity: int
    """Attempts that are worth having alive at once."""
    trajectory_seconds: float | None = None
    """How long an attempt may take."""
    _thread: threading.Thread | None = None

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine on the engine's event loop, in a thread of its own."""
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=type(self).__name__, daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop_loop(self) -> None:
        """End the thread; work submitted later begins another."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)
            self._thread = None

    @abstractmethod
    def verify(self) -> None:
        """Raise ProofError unless what was generated comes from the policy that was asked for."""


class AsyncTokenEngine(AsyncEngine, TokenEngine):
    """Samples many requests at once."""

    @abstractmethod
    async def sample(self, request: Request, sampling: SamplingParams) -> Generation:
        """Return what came of a request; raises only what ends the whole rollout."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Generation]:
        """Return one generation for each request, in order."""

        async def all_of_them() -> list[Generation]:
            return list(await asyncio.gather(*(self.sample(request, sampling) for request in requests)))

        return self.submit(all_of_them()).result()


class ServedEngine(AsyncTokenEngine):
    """Samples on servers, which outlive the command that started them where somebody keeps them up."""

    is_served = True
    takes_stop_strings = True


class ChatEngine(AsyncEngine):
    """Asks for text, and sees no token ids."""

    takes_stop_strings = True

    @abstractmethod
    async def chat(self, request: ChatRequest, sampling: SamplingParams) -> Reply:
        """Return what came of a request, errors included."""


class TextEngine(Engine, ABC):
    """Generates text without token ids."""

    @abstractmethod
    def reply(self, environment: Environment, task: Task, turn: int) -> str:
        """Return what is written in this turn of an attempt at the task."""


FACES: Mapping[str, type[Engine]] = {"hf": TokenEngine, "vllm": ServedEngine}
"""What is known of engines whose own classes would load torch, also where a stage is up to date."""


def face_of(name: str) -> type[Engine]:
    """Return the class of an engine, or one that says the same of it; raises as `lookup` does."""
    return FACES.get(name) or lookup("engine", name)


def make_engine(name: str, config: Any) -> Engine:
    """Return an engine by name, with nothing loaded yet."""
    return lookup("engine", name)(config)
