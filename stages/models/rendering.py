"""From messages to prompt tokens, once; afterwards tokens are only appended.

A conversation's first prompt is rendered by the tokenizer's chat template. Every later
prompt is the tokens so far, the glue between turns, and the observation's tokens. The
glue is found by rendering a probe, and the same probe shows whether the template keeps
earlier turns as they were (the prefix property). A template that rewrites them, as those
that strip earlier reasoning do, gets step-wise rows instead. What a policy wrote is read
in the format of its template, and given to environments in our own tags.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from nanoskyrl.envs.tool_formats import hermes
from nanoskyrl.envs.tool_formats.base import Aside, FoundCall, ParsedCall, Piece, in_own_tags
from nanoskyrl.envs.tool_formats.own import with_tools_told
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.models.chat_template import (
    AUTO,
    CLOSED,
    OPENED,
    RESULT,
    SAID,
    THOUGHT,
    USER,
    ChatTemplate,
    Message,
    call_id,
    calling,
    result,
    user,
)
from nanoskyrl.stages.models.control_tokens import ControlTokens

PROMPTS_KEPT = 1024
_TOOL_NAME = re.compile(r"[\w.:/-]{1,64}")


class Renderer:
    """A tokenizer's chat template, with the glue between turns."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None, tool_format: str = AUTO) -> None:
        """Keep the tokenizer; nothing is rendered yet.

        Args:
            tokenizer: Of the policy.
            arguments: Passed on to the chat template, such as `enable_thinking`.
            tool_format: How the policy's calls are read; auto: as its template writes them.
        """
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, arguments or {}, tool_format)
        self.control = ControlTokens(tokenizer)
        self._prompts: dict[Any, tuple[Any, list[int]]] = {}  # siblings of a group begin the same way
        self._decoded: tuple[list[int], str] = ([], "")
        self._others: dict[str, Renderer] = {}

    def under(self, arguments: Mapping[str, Any], tool_format: str) -> "Renderer":
        """Return the renderer of the same tokenizer under other settings; equal settings have one."""
        ours, key = (json.dumps(each, sort_keys=True, default=str) for each in (
            [self.template.arguments, self.template.tool_format], [dict(arguments), tool_format],
        ))  # fmt: skip
        if key == ours:
            return self
        return self._others.setdefault(key, Renderer(self.tokenizer, arguments, tool_format))

    # Prompts

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        """Return the text of a conversation up to where the assistant begins to write."""
        return self.control.unmark(self._marked(messages, tools))

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Return the tokens of `prompt`; control tokens in what others wrote are encoded as the words that they are."""
        # A tool is known by its place in memory, and kept so that the place stays its own.
        key = json.dumps(list(messages)), tuple(map(id, tools))
        if key not in self._prompts:
            if len(self._prompts) >= PROMPTS_KEPT:
                self._prompts.clear()
            self._prompts[key] = tools, [*self._beginning, *self.control.encode(self._marked(messages, tools))]
        return list(self._prompts[key][1])

    def _marked(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        shown, tools = self._foreign(messages), self.control.mark(list(tools))
        if tools and not self.template.shows_tools:
            shown, tools = with_tools_told(shown, tools, self.template.form), []
        return self.template.render(self.template.shown(shown), tools, generate=True)

    def _foreign(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the control tokens marked in all that no assistant wrote."""
        return [dict(each) if each["role"] == "assistant" else self.control.mark(each) for each in messages]

    @cached_property
    def _beginning(self) -> list[int]:
        """The token that begins a sequence, where no template writes it and the tokenizer would."""
        begin = self.tokenizer.bos_token_id
        if self.tokenizer.chat_template or begin is None:
            return []
        return [begin] if self.tokenizer.encode("a")[:1] == [begin] else []

    # Turns

    def heard(self, text: str, tools: Sequence[Mapping[str, Any]] = (), calls: int = 0) -> tuple[str, Message]:
        """Return what a policy wrote as environments read it, and as the conversation keeps it.

        Args:
            text: One turn, without the token that ended it.
            tools: Those on offer.
            calls: How many the attempt has made before, from which ids count on.
        """
        form = self.template.form
        plain = {"role": "assistant", "content": text}
        if form.read is hermes.read or (form.offered_only and not tools):
            return text, plain
        pieces = form.read(text, tools)
        found = [piece.call for piece in pieces if isinstance(piece, FoundCall)]
        action = in_own_tags(pieces)
        if all(call.error is None and _TOOL_NAME.fullmatch(call.tool or "") for call in found) and (
            self.template.shape is not None
        ):
            return action, self._as_message(pieces, found, calls)
        return action, {**plain, "content": action} if form.channels else plain

    def _as_message(self, pieces: Sequence[Piece], found: Sequence[ParsedCall], calls: int) -> Message:
        """Return a turn with its reasoning and its calls apart, as the template wants them."""
        key = self.template.reasoning_key
        thoughts = [piece.reasoning for piece in pieces if isinstance(piece, Aside) and piece.reasoning is not None]
        said = (piece for piece in pieces if not isinstance(piece, FoundCall))
        words = "".join(
            piece if isinstance(piece, str) else "" if key and piece.reasoning is not None else piece.text
            for piece in said
        )
        message: Message = {"role": "assistant", "content": words.strip() if found or thoughts else words}
        if found:
            message["tool_calls"] = [
                {
                    "id": call_id(calls + place), "type": "function",
                    "function": {"name": call.tool, "arguments": call.args},
                }
                for place, call in enumerate(found)
            ]  # fmt: skip
        if found and key and self.template.form.channels:  # there, what is said beside a call is thought
            thoughts, message["content"] = [*thoughts, message["content"]], ""
        if key and any(thoughts):
            message[key] = "\n".join(thought.strip("\n") for thought in thoughts if thought)
        return message

    def continuation_ids(self, observations: Sequence[Message], last_id: int, said: Message | None = None) -> list[int]:
        """Return the tokens from the end of a sampled turn to where the next one begins.

        Args:
            observations: what the environment answered.
            last_id: the last sampled token; the end of turn is not written twice.
            said: the turn as `heard` gave it; its calls tell whose results the observations are.
        """
        names = [call["function"]["name"] for call in (said or {}).get("tool_calls") or ()]
        if names and not self.template.several_calls:
            names = names[-1:]
        answer = calling(*names) if names else {"role": "assistant", "content": SAID}
        text = self._render([user(), answer, *self._foreign(observations)], generate=True)
        begun = self._render([user(), answer])
        end = self._end(begun, answer)  # by itself: what was observed may look like anything
        if not text.startswith(begun[:end]):
            end = self._end(text, answer)
        ids = self.control.encode(text[end:])
        return ids[1:] if ids and ids[0] == last_id else ids

    def _render(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        return self.template.render(self.template.shown(messages), generate=generate)

    def _end(self, text: str, answer: Message, *, last: bool = False) -> int:
        """Return where the first answer of a rendered probe ends, or the last, before what ends its turn.

        Raises:
            InputError: the template does not write the answer.
        """
        find = text.rfind if last else text.find
        begin = find(USER) + len(USER)
        calls = answer.get("tool_calls")
        if not calls and (place := find(SAID, begin)) >= 0:
            return place + len(SAID)
        if calls:
            pieces = self.template.form.read(text[begin:], ())
            ends = [piece.end for piece in pieces if isinstance(piece, FoundCall)]
            if len(ends) >= len(calls):
                return begin + ends[-1 if last else len(calls) - 1]
        raise InputError(
            "the chat template does not write what an assistant said", hint="Use a policy with another chat template"
        )

    @cached_property
    def turn_end_ids(self) -> frozenset[int]:
        """The special tokens that end a turn: one of words, and one with a call, where a template tells them apart."""
        found = {self.turn_end_id}
        if self.template.shape is not None and self.template.result_after_call:
            found.add(self._end_of(calling("probe_tool", args={"text": SAID}), result()))
        return frozenset(token for token in found if token is not None)

    @cached_property
    def turn_end_id(self) -> int | None:
        """The token that ends an assistant's turn: the first special one behind its words, if there is any."""
        return self._end_of({"role": "assistant", "content": SAID}, user("more"))

    def _end_of(self, answer: Message, following: Message) -> int | None:
        for more in ([], [following]):  # some templates end a turn with what begins the next
            try:
                text = self._render([user(), answer, *more], generate=bool(more))
                ids = self.encode(text[self._end(text, answer) :])
            except InputError:
                continue
            if special := [token for token in ids if token in self.control.special_ids]:
                return special[0]
        return None

    @cached_property
    def keeps_prefix(self) -> bool:
        """Whether each prompt of a conversation extends the tokens of the one before."""
        key = self.template.reasoning_key
        said: Message = {"role": "assistant", "content": SAID}
        turns: list[tuple[Message, Message]] = [(said, user()), (said, {"role": "tool", "content": RESULT})]
        if self.template.shape is not None:
            turns.append((calling("probe_tool", args={"text": SAID}), result()))
        thought = {key: THOUGHT} if key else {"content": f"<think>{THOUGHT}</think>{SAID}"}
        thinking = [({**said, **thought}, then) for said, then in turns if key or not said.get("tool_calls")]
        opening = self._render([user()], generate=True).rstrip()
        turns = [
            *([] if opening.endswith(OPENED) else turns),  # where no turn is without reasoning
            *([] if opening.endswith(CLOSED) else thinking),  # where none has any
        ]
        return all(self._grows(answer, then) for answer, then in turns)

    def _grows(self, answer: Message, then: Message) -> bool:
        """Say whether a conversation of two such turns is written on and never over."""
        messages = [user()]
        try:
            prompt = self._render(messages, generate=True)
            for _ in range(2):
                messages = [*messages, answer]
                said = self._render(messages)
                said = said[: self._end(said, answer, last=True)]
                messages = [*messages, then]
                following = self._render(messages, generate=True)
                if not (said.startswith(prompt) and following.startswith(said)):
                    return False
                prompt = following
        except InputError:
            return False
        return True

    # Tokens

    def encode(self, text: str) -> list[int]:
        """Return the tokens of rendered text; the template has written every special token itself."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        if fast is not None:  # the same without transformers' look at every element's type
            return fast.decode(list(ids), skip_special_tokens=False)
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_prompt(self, ids: list[int]) -> str:
        """As `decode`; siblings of a group, which follow one another, begin the same way and are decoded once."""
        kept, text = self._decoded
        if kept != ids:
            text = self.decode(ids)
            self._decoded = list(ids), text
        return text


def answering(said: Message, observations: Sequence[Message]) -> list[Message]:
    """Return observations in which each tool's result names the call that it answers, in order."""
    calls, place, found = said.get("tool_calls") or (), 0, []
    for message in observations:
        if message["role"] == "tool" and calls:
            call = calls[min(place, len(calls) - 1)]
            message = {"tool_call_id": call["id"], "name": call["function"]["name"], **message}
            place += 1
        found.append(message)
    return found
