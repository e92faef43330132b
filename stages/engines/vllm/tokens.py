"""A path of ours on vLLM's server, tokens in and out: copied beside the server and loaded there by its name.

vLLM's own paths write text, or an object for each token; with log-probs that takes longer than a GPU needs to sample
them. This one asks the same engine and answers with two arrays.
"""

import asyncio
import base64
import importlib
import json
import uuid
from typing import Any

import numpy as np

PATH = "/skyrl/generate"


class TokensOnly:
    """ASGI middleware that answers `PATH` and passes everything else on."""

    def __init__(self, app: Any) -> None:
        """Wrap vLLM's application."""
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request; the engine forgets it when its client is gone."""
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
            return
        try:
            body = json.loads(await _read(receive))
            work = asyncio.ensure_future(_generate(scope["app"].state, body))
            gone = asyncio.ensure_future(_until_gone(receive))
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    return
                status, answer = 200, work.result()
            finally:
                work.cancel()
                gone.cancel()
        except KeyError as error:
            status, answer = 404, {"error": f"there is no {error}"}
        except (ValueError, TypeError) as error:  # what vLLM says of a request that it would refuse again
            status, answer = 400, {"error": str(error)}
        except Exception as error:
            status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def _generate(state: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Return sampled tokens (int32) and their nats (float32), both base64 of little-endian bytes, and the reason."""
    vllm_params = importlib.import_module("vllm.sampling_params")
    wants = body["logprobs"]
    params = vllm_params.SamplingParams(
        **body["sampling"], logprobs=0 if wants else None, flat_logprobs=bool(wants),
        detokenize="stop" in body["sampling"],  # to find strings that end it, text is needed
        output_kind=vllm_params.RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    served = state.openai_serving_models
    adapter = None if served.is_base_model(body["model"]) else served.lora_requests[body["model"]]
    prompt = {"type": "token", "prompt_token_ids": body["token_ids"]}
    given = state.engine_client.generate(prompt, params, str(uuid.uuid4()), lora_request=adapter)
    outputs = [output async for output in given]
    if not outputs:
        raise RuntimeError("the engine gave no output")
    found = outputs[-1].outputs[0]
    answer = {"token_ids": _packed(found.token_ids, "<i4"), "finish_reason": found.finish_reason}
    return answer | ({"logprobs": _packed(found.logprobs.logprobs, "<f4")} if wants else {})


def _packed(values: Any, dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


async def _read(receive: Any) -> bytes:
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    return b"".join(parts)


async def _until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
