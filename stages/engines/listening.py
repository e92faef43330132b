"""What was written by a model whose chat template is not seen: an endpoint's, or a script's."""

from collections.abc import Mapping, Sequence
from typing import Any

from nanoskyrl.envs.base import Message
from nanoskyrl.envs.tool_formats import hermes
from nanoskyrl.envs.tool_formats.base import Piece, ToolFormat, calls_in, in_own_tags
from nanoskyrl.stages.core.registry import BUILTIN, lookup
from nanoskyrl.stages.models.chat_template import AUTO


class Listener:
    """Reads turns in one format, or in the one in which most of it can be read."""

    def __init__(self, tool_format: str = AUTO, arguments: Mapping[str, Any] | None = None) -> None:
        """Look the format up.

        Args:
            tool_format: Its name; auto: any.
            arguments: What the endpoint's chat template is given, where it takes that.

        Raises:
            SettingsError: there is no format of this name.
        """
        self.arguments = dict(arguments or {})
        # Our own tags first: what is in them may look like anything.
        names = ["own", *BUILTIN["tool_format"]] if tool_format == AUTO else [tool_format]
        self._forms: list[ToolFormat] = [lookup("tool_format", name) for name in names]

    def heard(self, text: str, tools: Sequence[Mapping[str, Any]] = (), calls: int = 0) -> tuple[str, Message]:
        """Return a turn as environments read it, and as the conversation keeps it, which is the same."""
        best, names = 0, {tool["function"]["name"] for tool in tools}
        pieces: Sequence[Piece] = [text]
        for form in self._forms:
            found = form.read(text, tools) if tools or not form.offered_only else [text]
            good = sum(2 if call.error is None and call.tool in names else 1 for call in calls_in(found))
            if good > best or (form.channels and len(self._forms) == 1):
                best, pieces = good, [text] if form.read is hermes.read else found  # these are ours already
        action = in_own_tags(pieces)
        return action, {"role": "assistant", "content": action}
