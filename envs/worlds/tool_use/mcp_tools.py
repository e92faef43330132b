"""Tools of MCP servers that the settings name: a command that speaks on its standard streams, or an address.

A server is started, or connected to, only because `tool_use.mcp` says so; no data set and no policy can name one.
Each episode has sessions of its own, opened with the first call, so that no episode sees what another one left. A
server that is gone fails the attempt: that is nothing that the policy did.
"""

import shlex
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from nanoskyrl.envs.outside.mcp_session import McpSession
from nanoskyrl.envs.tools import Tool
from nanoskyrl.stages.core.errors import SettingsError, told_as
from nanoskyrl.stages.core.trajectory import ToolCall


class ServerTool(Tool):
    """A tool that a server carries out, and whose arguments it checks."""

    def __init__(self, schema: Mapping[str, Any], session: Callable[[], McpSession]) -> None:
        """Take the schema as the server gave it.

        Args:
            schema: `{"type": "function", "function": {name, description, parameters}}`.
            session: Returns the episode's session with the server.
        """
        super().__init__(schema["function"]["name"], session)
        self.__dict__["schema"] = dict(schema)

    def call(self, args: Mapping[str, Any]) -> ToolCall:
        """Ask the server; its errors are results, a lost connection raises."""
        answer = self.function().call_tool(self.name, dict(args))
        error = "tool_error" if answer.is_error else None
        return ToolCall(tool=self.name, args=dict(args), result=answer.text, ok=not answer.is_error, error=error)


class Sessions:
    """The sessions of one episode."""

    def __init__(self, servers: tuple[str, ...], timeout_seconds: float) -> None:
        """Open none yet."""
        self._servers, self._timeout = servers, timeout_seconds
        self._open: dict[str, McpSession] = {}

    def tools(self) -> dict[str, Tool]:
        """Return the tools of all servers by name; raises as `listed` does."""
        return {
            schema["function"]["name"]: ServerTool(schema, lambda server=server: self._session(server))
            for server, schema in listed(self._servers, self._timeout)
        }

    def _session(self, server: str) -> McpSession:
        if server not in self._open:
            self._open[server] = _connected(server, self._timeout)
        return self._open[server]

    def close(self) -> None:
        """End all sessions."""
        for session in self._open.values():
            session.close()
        self._open.clear()


def _connected(server: str, timeout_seconds: float) -> McpSession:
    if "://" in server:
        return McpSession(url=server, timeout_seconds=timeout_seconds)
    return McpSession(command=shlex.split(server), timeout_seconds=timeout_seconds)


@cache  # a command makes its environment several times
def listed(servers: tuple[str, ...], timeout_seconds: float) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return every tool of these servers: which one has it, and its schema.

    Raises:
        SettingsError: a server cannot be started or reached, or two of their tools have one name.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for server in servers:
        with told_as(
            SettingsError,
            f"the MCP server `{server}` in `tool_use.mcp` cannot be used",
            Exception,
            hint="Name a command or an http address; `pip install 'nanoskyrl[mcp]'` brings the client",
        ):  # the package raises whatever its transports do
            session = _connected(server, timeout_seconds)
            try:
                schemas = session.list_tools()
            finally:
                session.close()
        for schema in schemas:
            name = schema["function"]["name"]
            if name in found:
                raise SettingsError(
                    f"`{server}` and `{found[name][0]}` both have a tool `{name}`", hint="Leave one of them out"
                )
            found[name] = (server, schema)
    return tuple(found.values())
