"""From messages to prompt tokens, once; afterwards tokens are only appended.

A conversation's first prompt is rendered by the tokenizer's chat template. Every later
prompt is the tokens so far, the glue between turns, and the observation's tokens. The
glue is found once per tokenizer by rendering a probe, and the same probe shows whether
the template keeps earlier turns as they were (the prefix property). A template that
rewrites them, as those that strip earlier reasoning do, gets step-wise rows instead.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from nanoskyrl.stages.core.errors import InputError, told_as

Message = dict[str, Any]

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role.capitalize() }}:"
    "{% if message.role != 'assistant' %} {% endif %}{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For tokenizers that bring no chat template, as those of many base models."""

TOOLS_PROMPT = """You may call these tools:
<tools>
{schemas}
</tools>
To call one, write <tool_call>{{"tool": NAME, "args": {{...}}}}</tool_call>"""

PROMPTS_KEPT = 1024
_PROBE_REASONING = "<think>r</think>a"


class Renderer:
    """A tokenizer's chat template, with the glue between turns."""

    def __init__(self, tokenizer: Any) -> None:
        """Keep the tokenizer; nothing is rendered yet."""
        self.tokenizer = tokenizer
        self.template = tokenizer.chat_template or PLAIN_TEMPLATE
        self._prompts: dict[Any, tuple[Any, list[int]]] = {}  # siblings of a group begin alike

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the template has a place of its own for tool schemas."""
        return "tools" in self.template

    @cached_property
    def renders_tool_role(self) -> bool:
        """Whether the template shows messages of role `tool`."""
        try:
            text = self._text(
                [
                    {"role": "user", "content": "u"},
                    {"role": "assistant", "content": "a"},
                    {"role": "tool", "content": "probe"},
                ]
            )
        except InputError:
            return False
        return "probe" in text

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        """Return the text of a conversation up to where the assistant begins to write."""
        return self._text(self.prepare(messages, tools), tools if self.renders_tools else (), generate=True)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Return the tokens of `prompt`."""
        # A tool is told by its place in memory, and kept so that the place stays its own.
        key = json.dumps(list(messages)), tuple(map(id, tools))
        if key not in self._prompts:
            if len(self._prompts) >= PROMPTS_KEPT:
                self._prompts.clear()
            self._prompts[key] = tools, self.encode(self.prompt(messages, tools))
        return list(self._prompts[key][1])

    def prepare(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[Message]:
        """Return the messages as this template can show them: tools and tool messages spelt out where it cannot."""
        shown = [self._as_shown(message) for message in messages]
        if tools and not self.renders_tools:
            schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
            words = TOOLS_PROMPT.format(schemas=schemas)
            if shown and shown[0]["role"] == "system":
                shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n{words}"}
            else:
                shown.insert(0, {"role": "system", "content": words})
        return shown

    def _as_shown(self, message: Message) -> Message:
        if message["role"] != "tool" or self.renders_tool_role:
            return dict(message)
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}

    @cached_property
    def _turn_end(self) -> str:
        """What the template writes after an assistant's words, such as `<|im_end|>` and a line break."""
        user = [{"role": "user", "content": "u"}]
        before = self._text(user, generate=True)
        after = self._text([*user, {"role": "assistant", "content": "a"}])
        return after[len(before) + 1 :] if after.startswith(before + "a") else ""

    @cached_property
    def turn_end_id(self) -> int | None:
        """The token that ends an assistant's turn, if the template ends it with a special one."""
        ids = self.encode(self._turn_end)
        return ids[0] if ids and ids[0] in self.tokenizer.all_special_ids else None

    def continuation_ids(self, observations: Sequence[Message], last_id: int) -> list[int]:
        """Return the tokens from the end of a sampled turn to where the next one begins.

        Args:
            observations: what the environment answered.
            last_id: the last sampled token; the end of turn is not written twice.
        """
        head: list[Message] = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
        base = self._text(head)
        full = self._text([*head, *map(self._as_shown, observations)], generate=True)
        ids = self.encode(self._turn_end + full[len(base) :])
        return ids[1:] if ids and ids[0] == last_id else ids

    @cached_property
    def keeps_prefix(self) -> bool:
        """Whether each prompt of a conversation extends the tokens of the one before."""
        role = "tool" if self.renders_tool_role else "user"
        for reply in ("a", _PROBE_REASONING):
            messages: list[Message] = [{"role": "user", "content": "u"}]
            so_far = self._text(messages, generate=True)
            for observation_role in (role, "user"):
                messages = [*messages, {"role": "assistant", "content": reply}]
                if not self._text(messages).startswith(so_far + reply):
                    return False
                base = self._text(messages)
                messages = [*messages, {"role": observation_role, "content": "o"}]
                full = self._text(messages, generate=True)
                if not full.startswith(base):
                    return False
                so_far = full
        return True

    def encode(self, text: str) -> list[int]:
        """Return the tokens of rendered text; the template has written every special token itself."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        if fast is not None:  # the same without transformers' look at every element's type
            return fast.decode(list(ids), skip_special_tokens=False)
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generate: bool = False
    ) -> str:
        with told_as(
            InputError,
            "the chat template refuses this conversation",
            Exception,
            hint="Use a policy whose template takes these roles",
        ):  # a template is code: jinja's own errors, and all that Python raises
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self.template,
                add_generation_prompt=generate,
                tokenize=False,
            )
