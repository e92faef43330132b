"""One session with an MCP server, for callers that do not run an event loop of their own.

A session lives in one task of a background loop, because the protocol's streams must be
closed where they were opened; calls are handed to it and waited for. A call that gets no
answer in time raises, as does everything that is the connection's fault. What the server
answers, its errors about a call included, comes back.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from nanoskyrl.envs.outside.common import need
from nanoskyrl.stages.core.children import ending_with_us

_STARTING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tool said."""

    text: str
    is_error: bool


class McpSession:
    """A session, begun by the constructor and ended by `close`."""

    def __init__(
        self,
        *,
        url: str | None = None,
        command: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        """Connect to a server over HTTP, or start one that speaks on its standard streams.

        Raises:
            SettingsError: the package `mcp` is not installed.
            Exception: whatever the connection fails with.
        """
        need("mcp", "fleet")
        self._transport = _http(url, headers or {}) if url is not None else _process(list(command))
        self._timeout = timeout_seconds
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._served = asyncio.run_coroutine_threadsafe(self._serve(ready), background_loop())
        try:
            ready.result(timeout_seconds)
        except BaseException:
            self._served.cancel()
            raise

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the server's tools as `{"type": "function", "function": {name, description, parameters}}`."""
        tools: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = self._call(lambda session, cursor=cursor: session.list_tools(cursor))
            tools += [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description or "",
                        "parameters": tool.inputSchema,
                    },
                }
                for tool in page.tools
            ]
            cursor = page.nextCursor
            if not cursor:
                return tools

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Answer:
        """Return what a tool says; pictures and other contents that are no text are named by their type."""
        result = self._call(lambda session: session.call_tool(name, arguments))
        parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
        return Answer("\n".join(parts), bool(result.isError))

    def read_resource(self, uri: str) -> str:
        """Return the text of one of the server's resources, which the policy is not offered."""
        result = self._call(lambda session: session.read_resource(uri))
        return "\n".join(part.text for part in result.contents if hasattr(part, "text"))

    def close(self) -> None:
        """End the session; a second time nothing happens."""
        if not self._served.done():
            background_loop().call_soon_threadsafe(self._requests.put_nowait, None)
            concurrent.futures.wait([self._served], timeout=10)
            self._served.cancel()

    def _call(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        if self._served.done():
            raise ConnectionError("the session with the MCP server has ended")
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        background_loop().call_soon_threadsafe(self._requests.put_nowait, (work, future))
        finished, _ = concurrent.futures.wait([future, self._served], self._timeout, concurrent.futures.FIRST_COMPLETED)
        if future.done():
            return future.result()
        if not finished:
            self._served.cancel()  # its answer may still come, and would be taken for that of the next call
            raise TimeoutError(f"the MCP server did not answer within {self._timeout:g} seconds")
        raise ConnectionError("the MCP server ended the session")

    async def _serve(self, ready: "concurrent.futures.Future[None]") -> None:
        try:
            async with self._transport as (reading, writing):
                session_class = need("mcp", "fleet").ClientSession
                async with session_class(reading, writing) as session:
                    await session.initialize()
                    ready.set_result(None)
                    while (request := await self._requests.get()) is not None:
                        work, future = request
                        try:
                            future.set_result(await work(session))
                        except Exception as error:
                            future.set_exception(error)
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error if isinstance(error, Exception) else ConnectionError("the session was ended"))
            if isinstance(error, asyncio.CancelledError):
                raise


@asynccontextmanager
async def _http(url: str, headers: Mapping[str, str]) -> AsyncIterator[tuple[Any, Any]]:
    import httpx
    from mcp.client.streamable_http import streamable_http_client

    async with (
        httpx.AsyncClient(headers=dict(headers), timeout=httpx.Timeout(30.0, read=300.0)) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams[0], streams[1]


@asynccontextmanager
async def _process(command: list[str]) -> AsyncIterator[tuple[Any, Any]]:
    from mcp import StdioServerParameters
    from mcp.client.stdio import stdio_client

    parameters = StdioServerParameters(command=command[0], args=command[1:], env=ending_with_us({}))
    async with stdio_client(parameters) as streams:
        yield streams[0], streams[1]


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the loop that all sessions live in."""
    with _STARTING:  # several episodes may begin at once, and must find the same loop
        return _started()


@cache
def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop
