"""OpenAI-compatible endpoints on loopback: real HTTP servers, whose answers a test scripts."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Answer = Callable[[dict[str, Any]], Any]
"""From a request's body: the text, (text, finish reason), an HTTP status, or a whole response."""


class Endpoint:
    """A running server, and what it was asked."""

    url = ""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = 0


@contextlib.contextmanager
def endpoint(answer: Answer, *, together: int = 1) -> Iterator[Endpoint]:
    """Serve /v1/chat/completions while the block runs; nothing is answered before so many have asked at once."""
    import asyncio

    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    app, found = FastAPI(), Endpoint()
    now = [0]
    met = asyncio.Event()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        found.asked.append(body)
        found.keys.append(request.headers.get("authorization"))
        now[0] += 1
        found.most_at_once = max(found.most_at_once, now[0])
        if now[0] >= together:
            met.set()
        try:
            await met.wait()
            given = answer(body)
        finally:
            now[0] -= 1
        if isinstance(given, int):
            return JSONResponse({"error": {"message": f"scripted {given}"}}, given, headers={"retry-after-ms": "1"})
        if isinstance(given, dict):
            return given
        text, reason = given if isinstance(given, tuple) else (given, "stop")
        return {
            "id": "1", "object": "chat.completion", "created": 0, "model": body["model"],
            "choices": [{"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
        }  # fmt: skip

    with served(app) as address:
        found.url = f"{address}/v1"
        yield found


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an application in a thread while the block runs; its address."""
    import uvicorn

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True  # clients keep connections open, which it would wait for
        thread.join(10)
