"""What was written by a model whose chat template is not seen: an endpoint's, or a script's."""

from collections.abc import Mapping, Sequence
from typing import Any

from nanoskyrl.envs.base import Message
from nanoskyrl.envs.tool_formats.base import ToolFormat, calls_in, in_own_tags
from nanoskyrl.envs.tool_formats.own import OWN
from nanoskyrl.stages.core.registry import BUILTIN, lookup
from nanoskyrl.stages.models.chat_template import AUTO


class Listener:
    """Reads turns in one format, or in the first in which there is a call."""

    def __init__(self, tool_format: str = AUTO, arguments: Mapping[str, Any] | None = None) -> None:
        """Look the format up.

        Args:
            tool_format: Its name; auto: any.
            arguments: What the endpoint's chat template is given, where it takes that.

        Raises:
            SettingsError: there is no format of this name.
        """
        self.arguments = dict(arguments or {})
        self._insisted = tool_format != AUTO
        names = [tool_format] if self._insisted else [name for name in BUILTIN["tool_format"] if name != "own"]
        self._forms: list[ToolFormat] = [lookup("tool_format", name) for name in names]

    def heard(self, text: str, tools: Sequence[Mapping[str, Any]] = (), calls: int = 0) -> tuple[str, Message]:
        """Return a turn as environments read it, and as the conversation keeps it, which is the same."""
        action = text
        # Our own tags first: what stands in them may look like anything.
        if self._insisted or not calls_in(OWN.read(text, tools)):
            for form in self._forms:
                pieces = form.read(text, tools) if tools or not form.offered_only else []
                if calls_in(pieces) or (pieces and form.channels and self._insisted):
                    action = in_own_tags(pieces)
                    break
        return action, {"role": "assistant", "content": action}
