"""Chat templates for tests: those in trl's wheel, ours for formats that it has none of, on the starter's tokenizer."""

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from nanoskyrl.stages.models.loading import load_tokenizer
from nanoskyrl.stages.models.policy import resolve_policy

MARKS = re.compile(
    r"<\|\"\|>|<\|[^<>|\s'\"]+\|?>|<[^<>|\s/'\"]+\|>|<｜[^<>｜\s]+｜>|<(?:start|end)_of_\w+>|</s>|\[/?[A-Z_]+\]"
)
"""What represents tokens in templates."""

OURS = {
    # Mistral's templates, old and new: a list of objects, or a name and its arguments; ids have nine letters.
    "our_mistral": (
        "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('Only user and assistant roles') }}"
        "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.tool_calls is defined %}[TOOL_CALLS][{% for c in m.tool_calls %}"
        "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
        "{{ ', ' if not loop.last }}{% endfor %}]</s>"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
    ),
    "our_mistral_named": (
        "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
        "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
    ),
    # DeepSeek 3.1: a name and JSON, and no reasoning opened by the prompt.
    "our_deepseek_31": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
        "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
        "{% else %}{{ '<｜Assistant｜></think>' if messages[loop.index0 - 1].role == 'user' }}{{ m.content }}"
        "{% if m.tool_calls is defined %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>"
        "{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments }}<｜tool▁call▁end｜>{% endfor %}"
        "<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role == 'user' %}<｜Assistant｜></think>{% endif %}"
    ),
    # Qwen 3 Coder: no reasoning, XML in tags.
    "our_qwen_coder": (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
        "</tool_response>{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% endif %}"
        "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
"""Written for these tests after what the models' own templates do."""


@cache
def shipped() -> dict[str, str]:
    """Return the templates of trl's wheel by name; {} where it is not installed."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return {}
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


@cache
def _tokenizer() -> Any:
    """Return the starter's tokenizer with the tokens of all templates, which is made once."""
    tokenizer = load_tokenizer(resolve_policy("starter"))
    marks = sorted({mark for text in (*shipped().values(), *OURS.values()) for mark in MARKS.findall(text)} | {"<bos>"})
    known = set(tokenizer.get_vocab())
    new = [AddedToken(mark, special=True, normalized=False) for mark in marks if mark not in known]
    tokenizer.add_tokens(new, special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = "<bos>", "<|endoftext|>"
    return tokenizer


def tokenizer_with(template: str | None) -> Any:
    """Return the tokenizer with this template; there is one tokenizer, so the last template holds."""
    tokenizer = _tokenizer()
    tokenizer.chat_template = template
    return tokenizer
