"""What a chat template can show, found by rendering probes: roles, turns, tools, calls, results, reasoning.

Whatever it cannot show is brought into a form that it can: system words open the first user's message, a tool's
result becomes the user's words, neighbours of one role become one message, calls become text. Nothing is lost in
silence: a template that shows nothing of a user's words is an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from nanoskyrl.envs.messages import with_text_arguments
from nanoskyrl.envs.tool_formats.base import ParsedCall, ToolFormat, calls_in
from nanoskyrl.envs.tool_formats.own import OWN, calls_in_words, result_in_words
from nanoskyrl.stages.core.errors import InputError, SettingsError, told_as
from nanoskyrl.stages.core.registry import BUILTIN, entry_points, lookup, plugin_errors

Message = dict[str, Any]

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role.capitalize() }}:"
    "{% if message.role != 'assistant' %} {% endif %}{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For tokenizers that bring no chat template, as those of many base models."""

AUTO = "auto"
USER, SYSTEM, SAID, THOUGHT, RESULT = "probed-user", "probed-system", "probed-words", "probed-thought", "probed-result"
"""Words of the probes, which no template writes by itself."""
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "Words."},
                "count": {"type": "integer", "description": "A number."},
            },
            "required": ["text", "count"],
        },
    },
}
PROBE_CALL = ParsedCall("probe_tool", {"text": "two words", "count": 3})
OPENED, CLOSED = ("<think>", "[THINK]"), ("</think>", "[/THINK]")
"""What a generation prompt ends with where every reply begins with reasoning, and where none does."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """How a template takes a message with calls."""

    arguments_as_text: bool = False
    """Whether arguments are JSON text, not an object."""
    no_content: str | None = ""
    """What stands for no words beside the calls."""


SHAPES = (CallShape(), CallShape(True), CallShape(False, None), CallShape(True, None))


def user(text: str = USER) -> Message:
    """Return a user's message."""
    return {"role": "user", "content": text}


def calling(*names: str, args: Mapping[str, Any] | None = None) -> Message:
    """Return an assistant's message that calls tools and says nothing besides."""
    calls = [
        {"id": call_id(place), "type": "function", "function": {"name": name, "arguments": dict(args or {})}}
        for place, name in enumerate(names)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def call_id(place: int) -> str:
    """Return the id of an attempt's call; some templates insist on nine letters and digits."""
    return f"call{place:05d}"


def check_tool_format(name: str) -> None:
    """Refuse a name of no format.

    Raises:
        SettingsError: it is neither auto, a known name, nor the name of a ToolFormat in a module.
    """
    if name != AUTO and not isinstance(lookup("tool_format", name), ToolFormat):
        raise SettingsError(f"`{name}` is no ToolFormat", hint="nanoskyrl.envs.tool_formats.base says what one is")


class ChatTemplate:
    """A tokenizer's chat template with the arguments that are given to it."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any], tool_format: str) -> None:
        """Keep what is needed to render; nothing is rendered yet."""
        self.tokenizer, self.arguments, self.tool_format = tokenizer, dict(arguments), tool_format
        self.source = tokenizer.chat_template or PLAIN_TEMPLATE

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, generate: bool = False
    ) -> str:
        """Return what the template makes of messages as they are.

        Raises:
            InputError: it refuses them.
        """
        with told_as(
            InputError,
            "the chat template refuses this conversation",
            Exception,
            hint="Use a policy whose template takes these roles",
        ):  # a template is code: jinja's own errors, and all that Python raises
            return self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, chat_template=self.source, add_generation_prompt=generate,
                tokenize=False, **self.arguments,
            )  # fmt: skip

    def _shows(self, messages: Sequence[Message], *words: str, tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Say whether the template takes these messages and writes all of these words."""
        try:
            text = self.render(self._in_parts(messages), tools)
        except InputError:
            return False
        return all(word in text for word in words)

    # What it takes

    @cached_property
    def wants_parts(self) -> bool:
        """Whether content must be a list of parts.

        Raises:
            InputError: the template shows a user's words in neither way.
        """
        for parts in (False, True):
            message = _parted(user()) if parts else user()
            try:
                if USER in self.render([message]):
                    return parts
            except InputError:
                if parts:
                    raise
        raise InputError(
            "the chat template writes nothing of a user's message", hint="Use a policy with another chat template"
        )

    def _in_parts(self, messages: Sequence[Message]) -> list[Message]:
        return [_parted(message) for message in messages] if self.wants_parts else list(messages)

    @cached_property
    def takes_system(self) -> bool:
        """Whether a conversation may begin with a system message."""
        return self._shows([{"role": "system", "content": SYSTEM}, user()], SYSTEM, USER)

    @cached_property
    def alternates(self) -> bool:
        """Whether user and assistant must take turns."""
        turns = [user(), {"role": "assistant", "content": SAID}, user(RESULT), user("probed-more")]
        return not self._shows(turns, RESULT, "probed-more")

    # Tools

    @cached_property
    def _form(self) -> tuple[ToolFormat, CallShape | None]:
        """The format that is read, and how the template takes calls that it writes in this format, if it does."""

        def installed() -> Iterator[str]:
            yield from entry_points("tool_format")  # late: it reads a file of every installed package

        if self.tool_format != AUTO:
            form = lookup("tool_format", self.tool_format)
            return form, self._shape(form)
        for name in chain(BUILTIN["tool_format"], installed()):
            form = lookup("tool_format", name)
            if (shape := self._shape(form)) is not None:
                return form, shape
        return OWN, None

    @property
    def form(self) -> ToolFormat:
        """The format that the policy's calls are read in."""
        return self._form[0]

    @property
    def shape(self) -> CallShape | None:
        """How the template takes calls apart from the words; None: it writes them in no way that can be read."""
        return self._form[1]

    def _shape(self, form: ToolFormat) -> CallShape | None:
        return next((shape for shape, text in self._called.items() if _calls(form, text) == [PROBE_CALL]), None)

    @cached_property
    def _called(self) -> dict[CallShape, str]:
        """What the template writes behind the user's words when a tool is called, by the shape that it takes."""
        message = calling("probe_tool", args=PROBE_CALL.args)
        texts = {shape: self._behind_user(_shaped(message, shape)) for shape in SHAPES}
        return {shape: text for shape, text in texts.items() if text is not None}

    def _behind_user(self, message: Message) -> str | None:
        """Return what the template writes of a message behind the user's words; None: it refuses it."""
        try:
            return self.render(self._in_parts([user(), message]), [PROBE_TOOL]).rpartition(USER)[2]
        except InputError:
            return None

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template tells of tools, and of calls in a format that can be read."""
        return self.shape is not None and self._shows([user()], "probe_tool", tools=[PROBE_TOOL])

    @cached_property
    def several_calls(self) -> bool:
        """Whether a message may hold more than one call."""
        if self.shape is None:
            return False
        message = calling("probe_tool", "probe_tool", args=PROBE_CALL.args)
        text = self._behind_user(_shaped(message, self.shape))
        return text is not None and _calls(self.form, text) == [PROBE_CALL, PROBE_CALL]

    @cached_property
    def _words_beside_calls(self) -> bool:
        """Whether a message with calls may say something, too."""
        if self.shape is None:
            return False
        message = {**_shaped(calling("probe_tool", args=PROBE_CALL.args), self.shape), "content": SAID}
        return self._shows([user(), message], SAID, "probe_tool")

    @cached_property
    def result_after_call(self) -> bool:
        """Whether a message of role `tool` is shown behind a call."""
        if self.shape is None:
            return self.result_alone
        call = _shaped(calling("probe_tool", args=PROBE_CALL.args), self.shape)
        return self._shows([user(), call, result()], RESULT, tools=[PROBE_TOOL])

    @cached_property
    def result_alone(self) -> bool:
        """Whether a message of role `tool` is shown behind an assistant's plain words."""
        return self._shows([user(), {"role": "assistant", "content": SAID}, result()], RESULT)

    @cached_property
    def reasoning_key(self) -> str | None:
        """Where a message's reasoning stands apart from its words; None: in front of them, as it was written."""
        for key in ("reasoning_content", "thinking"):
            if self._shows([user(), {"role": "assistant", "content": SAID, key: THOUGHT}], THOUGHT, SAID):
                return key
        return None

    # Messages as it can show them

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in a form that the template can show."""
        found: list[Message] = []
        called = False
        for message in self._one_call_each(messages):
            if message.get("tool_calls"):
                called = self.shape is not None
                found.append(self._with_calls(message))
            elif message["role"] == "tool" and not (self.result_after_call if called else self.result_alone):
                found.append(user(result_in_words(message["content"])))
            else:
                called = called and message["role"] == "tool"
                found.append(dict(message))
        if not self.takes_system:
            found = _without_system(found)
        return self._in_parts(_joined(found) if self.alternates else found)

    def _with_calls(self, message: Message) -> Message:
        shape = self.shape
        if shape is not None and (not message.get("content") or self._words_beside_calls):
            return _shaped(message, shape)
        others = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**others, "content": calls_in_words(message.get("content"), message["tool_calls"], self.form)}

    def _one_call_each(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with calls of one message apart, each before its result, where a template wants that."""
        has_several = any(len(message.get("tool_calls") or ()) > 1 for message in messages)
        if self.shape is None or not has_several or self.several_calls:
            return list(messages)
        found: list[Message] = []
        waiting: list[Message] = []
        for message in messages:
            if message["role"] == "tool" and waiting:
                found += [waiting.pop(0), message]
                continue
            found += waiting
            calls = message.get("tool_calls") or ()
            waiting = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in calls[1:]]
            if waiting:
                waiting.insert(0, {**message, "tool_calls": calls[:1]})
            else:
                found.append(message)
        return [*found, *waiting]


def _calls(form: ToolFormat, text: str) -> list[ParsedCall]:
    with plugin_errors("a format of tool calls"):
        return calls_in(form.read(text, [PROBE_TOOL]))


def result() -> Message:
    """Return what the tool of `calling("probe_tool")` says."""
    return {"role": "tool", "content": RESULT, "tool_call_id": call_id(0), "name": "probe_tool"}


def _shaped(message: Message, shape: CallShape) -> Message:
    """Return a message with calls as a template takes it."""
    sent = with_text_arguments(message) if shape.arguments_as_text else message
    return {**sent, "content": message.get("content") or shape.no_content}


def _parted(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with system words in front of the first user's, or as a user's where there is none."""
    words = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    others = [message for message in messages if message["role"] != "system"]
    first = next((place for place, message in enumerate(others) if message["role"] == "user"), None)
    if not words:
        return others
    if first is None:
        return [user(words), *others]
    opened = {**others[first], "content": f"{words}\n\n{others[first]['content']}"}
    return [*others[:first], opened, *others[first + 1 :]]


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with neighbours of one role as one, but for calls and results."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        plain = message["role"] in ("user", "assistant") and not message.get("tool_calls")
        if last is not None and plain and last["role"] == message["role"] and not last.get("tool_calls"):
            found[-1] = {**last, "content": f"{last['content']}\n{message['content']}"}
        else:
            found.append(message)
    return found
