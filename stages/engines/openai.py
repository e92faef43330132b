"""Engine `openai`: any OpenAI-compatible chat endpoint, for evaluation and judges.

It shows no token ids, so its trajectories are untrainable. The client retries what may
pass (no connection, 429, 5xx) with growing pauses; what still fails makes its attempt fail
as `UNREACHABLE`, and after several in a row nothing more is asked. Replies can be kept in a
journal, so that an evaluation that was interrupted does not ask, and pay, twice.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from nanoskyrl.stages.core.checked import PLACE, Checked, NonNegativeInt, PositiveFloat, PositiveInt
from nanoskyrl.stages.core.digests import digest_json
from nanoskyrl.stages.core.errors import EngineError, SettingsError
from nanoskyrl.stages.core.safe_text import keep_secret, shortened, struck
from nanoskyrl.stages.engines.base import UNREACHABLE, ChatEngine, ChatRequest, Reply, SamplingParams
from nanoskyrl.stages.engines.chat_wire import text_of, to_wire

SEED_BITS = (1 << 31) - 1
"""Some servers take seeds of 32 bits only."""
GIVE_UP_AFTER = 8
"""So many requests in a row that failed after all their tries: the endpoint is down."""
OURS_TO_MEND = (401, 403, 404)
"""Status codes that every request would meet: the key, the address or the model's name is wrong."""
PASSING = (408, 409, 429)
"""Status codes below 500 that may be gone a little later; the client has tried again by then."""
PAUSE_SECONDS = 60.0
"""The longest pause before a request is made again, with room to spare."""
MOST_TOKENS = 1 << 24
"""Of one request; a larger count is no count, and the sum over an attempt's turns fits its column."""
REFUSALS_SHOWN = 300
"""Characters of what an endpoint says is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenaiConfig(Checked):
    """Which endpoint is asked, and how."""

    base_url: str | None = field(default=None, metadata=PLACE)
    """Where /chat/completions lies, such as http://127.0.0.1:8000/v1."""
    model: str | None = None
    """The model's name there."""
    key_env: str = field(default="OPENAI_API_KEY", metadata=PLACE)
    """Environment variable that holds the key; servers without keys need none."""
    concurrency: PositiveInt = field(default=32, metadata=PLACE)
    """Requests under way at once."""
    timeout_seconds: PositiveFloat = field(default=900.0, metadata=PLACE)
    """How long one request may take."""
    retries: NonNegativeInt = field(default=8, metadata=PLACE)
    """Further tries of a request that failed, with growing pauses, about half a minute in all."""
    tools: Literal["native", "text"] = "native"
    """How tools are offered: native (the endpoint's own calls) or text (described in the prompt)."""
    seeded: bool = True
    """Send every request a seed; false for endpoints that refuse one."""
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the limit is called; some models ask for the second."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request, such as reasoning_effort; values may be tables."""


class OpenaiEngine(ChatEngine):
    """One endpoint and one model."""

    Config = OpenaiConfig

    def __init__(self, config: OpenaiConfig) -> None:
        """Make the client; nothing is asked yet.

        Raises:
            SettingsError: endpoint or model is not named.
        """
        for name, flag in (("base_url", "--endpoint"), ("model", "--model")):
            if not getattr(config, name):
                raise SettingsError(f"engine `openai` needs `openai.{name}`", hint=f"Name it with `{flag}`")
        self.config = config
        self.capacity = config.concurrency
        self._client: Any = None
        self._failures = 0
        self._last_failure = ""
        self._counts = {"requests": 0, "from_journal": 0, "unreachable": 0, "refused": 0}
        self._kept: dict[str, dict[str, Any]] = {}
        self._journal: IO[str] | None = None

    def keep_replies(self, journal: Path | None) -> None:
        """Keep every reply in this file, and take those that it holds from there; None: keep none."""
        if self._journal is not None:
            self._journal.close()
        self._kept, self._journal = {}, None
        if journal is None:
            return
        if journal.is_file():
            for line in journal.read_text(encoding="utf-8").split("\n"):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # the last line of a process that was killed
                    row = json.loads(line)
                    self._kept[row["request"]] = row["reply"]
        self._journal = journal.open("a", encoding="utf-8")
        self._journal.write("\n")  # after a torn line

    async def chat(self, request: ChatRequest, sampling: SamplingParams) -> Reply:
        """Return what came of a request, errors included."""
        body = self._body(request, sampling)
        # The seed is in the key though it may not be sent: each sample has a reply of its own.
        key = digest_json([body, request.seed])
        if key in self._kept:
            self._counts["from_journal"] += 1
            return Reply(**self._kept[key])
        if self._failures >= GIVE_UP_AFTER:
            return Reply(finish_reason="error", error=f"{UNREACHABLE}: {self._last_failure}")
        self._counts["requests"] += 1
        reply = await self._ask(body)
        if reply.error is None and self._journal is not None:
            self._journal.write(json.dumps({"request": key, "reply": asdict(reply)}) + "\n")
            self._journal.flush()
        return reply

    def _body(self, request: ChatRequest, sampling: SamplingParams) -> dict[str, Any]:
        config = self.config
        always = {
            "model": config.model,
            "messages": to_wire(request.messages, request.tools, config.tools),
            "temperature": sampling.temperature,
            config.max_tokens_name: request.max_tokens,
        }
        sometimes = {
            "top_p": sampling.top_p if sampling.top_p < 1 else None,
            "top_k": sampling.top_k or None,  # an endpoint that does not know it refuses the request, and says so
            "stop": list(sampling.stop_strings) or None,
            "tools": list(request.tools) or None if config.tools == "native" else None,
            "chat_template_kwargs": dict(request.template_arguments) or None,
            "seed": request.seed & SEED_BITS if config.seeded else None,
        }
        return {**always, **{name: value for name, value in sometimes.items() if value is not None}, **config.extra}

    async def _ask(self, body: Mapping[str, Any]) -> Reply:
        import openai

        try:
            fields = {key: value for key, value in body.items() if key not in ("model", "messages")}
            create = self._connected().chat.completions.with_raw_response.create
            # The client's own limit is for each piece that arrives: a reply that drips would never end.
            async with asyncio.timeout((self.config.timeout_seconds + PAUSE_SECONDS) * (self.config.retries + 1)):
                answer = await create(model=body["model"], messages=body["messages"], extra_body=fields)
            reply = _as_reply(json.loads(answer.http_response.content))
        except openai.APIStatusError as error:
            if error.status_code in OURS_TO_MEND:
                raise EngineError(
                    f"endpoint `{self.config.base_url}` refuses us: {_short(error)}",
                    hint=f"Check the address, the model's name and the key in ${self.config.key_env}",
                ) from error
            if error.status_code in PASSING or error.status_code >= 500:
                return self._unreachable(_short(error))
            # It answered, and will answer the same again: this attempt's failure alone.
            self._failures = 0
            self._counts["refused"] += 1
            # Nothing was read or written: that is known, unlike after a reply that was lost.
            why = f"the endpoint refuses the request: {_short(error)}"
            return Reply(finish_reason="error", prompt_tokens=0, completion_tokens=0, error=why)
        except openai.OpenAIError as error:
            return self._unreachable(_short(error))
        except TimeoutError:
            return self._unreachable("its reply did not come to an end in time")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            return self._unreachable(f"its reply is no chat completion ({type(error).__name__}: {error})")
        self._failures = 0
        return reply

    def _unreachable(self, why: str) -> Reply:
        self._failures += 1
        self._counts["unreachable"] += 1
        self._last_failure = why
        return Reply(finish_reason="error", error=f"{UNREACHABLE}: {why}")

    def _connected(self) -> Any:
        if self._client is None:
            import openai

            keep_secret(os.environ.get(self.config.key_env))
            self._client = openai.AsyncOpenAI(
                base_url=self.config.base_url,
                api_key=os.environ.get(self.config.key_env) or "none",
                max_retries=self.config.retries,
                timeout=self.config.timeout_seconds,
            )
        return self._client

    def verify(self) -> None:
        """An endpoint proves nothing about its weights."""

    def facts(self) -> dict[str, float | int | str | None]:
        """Return how many requests were made, and what came of them."""
        found, self._counts = dict(self._counts), dict.fromkeys(self._counts, 0)
        return {**found}

    def close(self) -> None:
        """Close the connections."""
        self.keep_replies(None)
        if self._client is not None:
            with contextlib.suppress(Exception):
                self.submit(self._client.close()).result(10)
            self._client = None
        self.stop_loop()


def _as_reply(answer: Any) -> Reply:
    choice = answer["choices"][0]
    message, usage = choice["message"], answer.get("usage")
    calls = [
        (str(call["function"]["name"]), str(call["function"].get("arguments") or ""))
        for call in message.get("tool_calls") or ()
    ]
    return Reply(
        text=struck(text_of(message.get("content"), calls)),
        finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
    )


def _count(usage: Any, name: str) -> int | None:
    """Return how many tokens an endpoint says it counted; None where it says nothing that is a count."""
    found = usage.get(name) if isinstance(usage, dict) else None
    is_count = isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= MOST_TOKENS
    return found if is_count else None


def _short(error: Exception) -> str:
    return shortened(struck(" ".join(str(error).split())), REFUSALS_SHOWN)
