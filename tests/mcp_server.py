"""A real MCP server for tests: a shelf of notes, one for each session. Run with `http PORT` or on standard streams."""

import json
import os
import sys
import time

from mcp.server.fastmcp import Context, FastMCP

server = FastMCP("notes", host="127.0.0.1", port=int(sys.argv[2]) if len(sys.argv) > 2 else 0, log_level="ERROR")
NOTES: dict[int, dict[str, str]] = {}


def notes(context: Context) -> dict[str, str]:
    return NOTES.setdefault(id(context.session), {})


@server.tool()
def write_note(name: str, text: str, context: Context) -> str:
    """Write a note."""
    notes(context)[name] = text
    return f"wrote {name}"


@server.tool()
def read_note(name: str, context: Context) -> str:
    """Read a note."""
    if name not in notes(context):
        raise ValueError(f"no note {name}")
    return notes(context)[name]


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"


@server.tool()
def computer() -> str:
    """Show the screen."""
    return "a picture"


@server.resource("state://final")
def final() -> str:
    """What the verifier sees."""
    return json.dumps(notes(server.get_context()))


if __name__ == "__main__":
    server.run("streamable-http" if sys.argv[1:2] == ["http"] else "stdio")
