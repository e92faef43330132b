"""All that nanoskyrl knows of a vLLM server's paths: what they take and return, and their faults.

Written for vLLM 0.26 to 0.32. `process.py` knows how servers are started, and which faults are worked round.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential

from nanoskyrl.stages.core.safe_text import keep_secret, struck
from nanoskyrl.stages.engines.vllm.tokens import PATH as TOKENS_PATH

KEEP_ALIVE_SECONDS = 2.0
"""How long an idle connection is kept. Servers close theirs after 5 seconds unless set otherwise, and a request that
is sent on one that is being closed comes to nothing."""
TRIES = 4
"""How often a request that changes nothing when it is repeated is made, within about a second."""


LARGEST_TOKEN = 1 << 31
LARGEST_LOG_PROB, LEAST_LOG_PROB = 1e-3, float(np.finfo(np.float32).min)
"""Nats: rounding may make a probability a little larger than 1."""


class Lost(Exception):
    """A request came to nothing and can be made again: no answer, half an answer, or the server's own failure."""

    timed_out = False
    """Whether all of its time went by: another would take as long."""


class Refused(Exception):
    """The server refused this request, and would again."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def new_session() -> aiohttp.ClientSession:
    """Return connections to servers, as many at once as are asked for."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
    return aiohttp.ClientSession(connector=connector, trust_env=False)


@dataclass(slots=True)
class Client:
    """One server's paths, as coroutines. All but `complete` can be repeated, and are where they come to nothing."""

    url: str
    key: str
    session: aiohttp.ClientSession
    seconds: float
    endpoint: str = "completions"

    def __post_init__(self) -> None:
        """Have the key struck out of whatever the server says."""
        keep_secret(self.key)

    async def call(self, method: str, path: str, body: Any = None, *, seconds: float | None = None) -> Any:
        """Return what the server answers, as JSON or None; asked again where that comes to nothing.

        Raises:
            Lost, Refused: as in `once`, after all tries.
        """
        tries = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, Lost) and not error.timed_out),
            stop=stop_after_attempt(TRIES), wait=wait_exponential(0.1), reraise=True,
        )  # fmt: skip
        return await tries(self.once, method, path, body, seconds=seconds)

    async def once(self, method: str, path: str, body: Any = None, *, seconds: float | None = None) -> Any:
        """Return what the server answers to one request, as JSON or None.

        Raises:
            Lost: no answer, a torn one, or a failure of the server.
            Refused: it said no.
        """
        try:
            async with self.session.request(
                method, self.url.rstrip("/") + path,
                data=None if body is None else msgspec.json.encode(body),  # of thousands of tokens
                headers={"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=seconds or self.seconds),
            ) as response:  # fmt: skip
                data = await response.read()
                if response.status >= 500 and b"has no attribute 'skyrl_" in data:
                    raise Refused(501, "the server has no extension of nanoskyrl's")
                if response.status >= 500 or response.status in (408, 429):
                    raise Lost(f"{response.status}: {_message(data)}")
                if response.status >= 400:
                    raise Refused(response.status, _message(data))
                try:
                    return json.loads(data) if data.strip() else None
                except ValueError as error:
                    if path.startswith("/v1/") and path.endswith("adapter"):
                        return None  # answers with a sentence
                    raise Lost(f"answer is not JSON: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            lost = Lost(struck(f"{type(error).__name__}: {error}"))
            lost.timed_out = isinstance(error, TimeoutError)
            raise lost from error

    async def healthy(self) -> bool:
        """Say whether it answers."""
        try:
            await self.once("GET", "/health", seconds=5)
        except (Lost, Refused):
            return False
        return True

    async def models(self) -> list[dict[str, Any]]:
        """Return what requests may name: the base under the name it was started with, and adapters."""
        return list((await self.call("GET", "/v1/models", seconds=30))["data"])

    async def worker(self, method: str, *args: str, seconds: float | None = None) -> list[dict[str, Any]]:
        """Return what each worker's method of ours returns.

        Raises:
            Refused: the server was started without our extension.
        """
        found = await self.call("POST", "/collective_rpc", {"method": method, "args": list(args)}, seconds=seconds)
        return list(found["results"])

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load a LoRA adapter; one of this name that is there already is left as it is."""
        if all(model["id"] != name for model in await self.models()):
            await self.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        with contextlib.suppress(Refused):
            await self.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def reset_prefix_cache(self) -> None:
        """Forget keys and values of other weights.

        Raises:
            Lost: blocks were held for too long.
        """
        for _ in range(50):
            found = await self.call("POST", "/reset_prefix_cache", seconds=60)
            if found is None or found.get("success", True):
                return
            await asyncio.sleep(0.1)
        raise Lost("the prefix cache is still held by requests")

    async def prompt_logprobs(self, name: str, ids: Sequence[int]) -> list[float]:
        """Return nats of each token but the first, at temperature 1."""
        body = {"model": name, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        found = await self.call("POST", "/v1/completions", body)
        choice = found["choices"][0]
        # Some versions put it beside the choices.
        listed = choice.get("prompt_logprobs") or found.get("prompt_logprobs") or []
        return [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], listed[1:], strict=True)]

    async def complete(
        self, name: str, ids: Sequence[int], sampling: Mapping[str, Any], *, want_logprobs: bool
    ) -> tuple[list[int], np.ndarray | None, str]:
        """Return sampled tokens, their nats (float32), and why it ended.

        Raises:
            Lost: among others, where the answer lacks a part.
        """
        if self.endpoint == "tokens":
            return await self._tokens(name, ids, sampling, want_logprobs)
        body = {
            "model": name, "prompt": list(ids), **sampling, "return_token_ids": True,
            "skip_special_tokens": False, "spaces_between_special_tokens": False,
            **({"logprobs": 0} if want_logprobs else {}),
        }  # fmt: skip
        found = await self.once("POST", "/v1/completions", body)
        try:
            choice = found["choices"][0]
            nats = list(choice["logprobs"]["token_logprobs"]) if want_logprobs else None
            return _checked(choice["token_ids"], nats, choice["finish_reason"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise Lost(f"the answer has no {error}") from error

    async def choose_endpoint(self, wanted: str, name: str, ids: Sequence[int]) -> None:
        """Use our own path if the server has it.

        Raises:
            Refused, Lost: it is asked for by name, and is not there.
        """
        self.endpoint = "completions"
        if wanted == "completions":
            return
        body = sampling_body(temperature=1.0, top_p=1.0, top_k=0, seed=0, max_tokens=1, stop_ids=[])
        try:
            await self._tokens(name, ids, body, True)
            self.endpoint = "tokens"
        except (Lost, Refused):
            if wanted == "tokens":
                raise

    async def _tokens(
        self, name: str, ids: Sequence[int], sampling: Mapping[str, Any], want_logprobs: bool
    ) -> tuple[list[int], np.ndarray | None, str]:
        """As `complete`, on our own path, which writes no text."""
        body = {"model": name, "token_ids": list(ids), "sampling": dict(sampling), "logprobs": want_logprobs}
        found = await self.once("POST", TOKENS_PATH, body)
        try:
            tokens = np.frombuffer(base64.b64decode(found["token_ids"]), "<i4")
            nats = np.frombuffer(base64.b64decode(found["logprobs"]), "<f4") if want_logprobs else None
            return _checked(tokens, nats, found["finish_reason"])
        except (KeyError, TypeError, ValueError) as error:
            raise Lost(f"the answer is torn: {error}") from error


def _checked(tokens: Any, nats: Any, reason: Any) -> tuple[list[int], np.ndarray | None, str]:
    """Return what was sampled, given as arrays or as JSON has it; raises Lost where it is anything else."""
    if not isinstance(tokens, np.ndarray):
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise Lost("the answer's tokens are none")
        try:
            tokens, nats = np.array(tokens), None if nats is None else np.array(nats, float)
        except (TypeError, ValueError, OverflowError) as error:
            raise Lost("the answer's log-probs are none") from error
    if not tokens.size or (nats is not None and nats.shape != tokens.shape):
        raise Lost(f"the answer has {tokens.size} tokens and {0 if nats is None else nats.size} log-probs")
    if tokens.min() < 0 or tokens.max() >= LARGEST_TOKEN:
        raise Lost("the answer's tokens are none")
    if nats is not None and not ((nats <= LARGEST_LOG_PROB) & (nats >= LEAST_LOG_PROB)).all():  # NaN is neither
        raise Lost("the answer's log-probs are none")
    if reason not in ("stop", "length"):
        raise Lost(f"the answer ended with {reason!r}")  # abort, error: sampled to no end
    return tokens.tolist(), None if nats is None else nats.astype(np.float32, copy=False), reason


def sampling_body(
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    max_tokens: int,
    stop_ids: Sequence[int],
    stop_strings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return how tokens are drawn, in the server's words."""
    return {
        "temperature": temperature, "top_p": top_p, "top_k": top_k or -1, "max_tokens": max_tokens,
        # What ends a turn is what we say, and nothing that the model's files say besides.
        "stop_token_ids": list(stop_ids), "ignore_eos": True, **({} if seed is None else {"seed": seed}),
        **({"stop": list(stop_strings), "include_stop_str_in_output": True} if stop_strings else {}),
    }  # fmt: skip


def _message(data: bytes) -> str:
    """Return what an error's body says."""
    text = data.decode(errors="replace")
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        value = json.loads(text)
        error = value.get("error", value)
        text = str(error["message"] if isinstance(error, dict) else error)
    return struck(" ".join(text.split()))[:300]
