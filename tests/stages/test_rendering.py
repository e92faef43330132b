import pytest

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.models.loading import load_tokenizer
from nanoskyrl.stages.models.policy import resolve_policy
from nanoskyrl.stages.models.rendering import Renderer

STRIPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_TOOL_ROLE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('roles are user and assistant') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
WITH_TOOLS = (
    "{% if tools %}TOOLS{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}


def renderer(template="starter"):
    tokenizer = load_tokenizer(resolve_policy("starter"))
    if template != "starter":
        tokenizer.chat_template = template
    return Renderer(tokenizer)


@pytest.mark.parametrize("template", ["starter", NO_TOOL_ROLE, WITH_TOOLS, None])
def test_templates_that_keep_earlier_turns_are_found_to(template):
    assert renderer(template).keeps_prefix


def test_a_template_that_strips_earlier_reasoning_is_found_out():
    # Pitfall 12: the prompt of turn 2 is then no extension of the tokens of turn 1.
    assert not renderer(STRIPS_REASONING).keeps_prefix


def test_the_end_of_turn_token_is_found_and_not_written_twice():
    r = renderer()
    assert r.decode([r.turn_end_id]) == "<|im_end|>"
    after_end = r.continuation_ids([{"role": "tool", "content": "o"}], r.turn_end_id)
    after_other = r.continuation_ids([{"role": "tool", "content": "o"}], 0)
    assert after_other == [r.turn_end_id, *after_end]
    assert r.decode(after_end) == "\n<|im_start|>tool\no<|im_end|>\n<|im_start|>assistant\n"


def test_tools_are_spelt_out_where_the_template_has_no_place_for_them():
    text = renderer().prompt([{"role": "user", "content": "hi"}], [TOOL])
    assert '"name": "look"' in text
    assert "<tool_call>" in text
    assert text.index("look") < text.index("hi")


def test_a_template_with_a_place_for_tools_gets_them_there():
    text = renderer(WITH_TOOLS).prompt([{"role": "user", "content": "hi"}], [TOOL])
    assert text.startswith("TOOLS")
    assert "You may call" not in text


def test_tools_join_a_system_message_that_is_there():
    text = renderer().prompt([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}], [TOOL])
    assert text.count("<|im_start|>system") == 1
    assert "Be kind." in text


def test_a_template_without_a_tool_role_shows_observations_as_the_users():
    r = renderer(NO_TOOL_ROLE)
    assert not r.renders_tool_role
    assert "<tool_response>" in r.decode(r.continuation_ids([{"role": "tool", "content": "o"}], r.turn_end_id))


def test_a_conversation_that_the_template_refuses_is_an_error_of_the_input():
    with pytest.raises(InputError, match="roles are user and assistant"):
        renderer(NO_TOOL_ROLE)._text([{"role": "tool", "content": "o"}])


def test_a_tokenizer_without_a_template_gets_plain_words():
    assert renderer(None).prompt([{"role": "user", "content": "hi"}]) == "User: hi\nAssistant:"


@pytest.mark.parametrize(
    "text", ["5² = 25", "a\u0000b", "\u202eright to left", "日本語", " \n\t x", "12345678901234567890"]
)
def test_the_starter_tokenizer_gives_back_what_it_was_given(text):
    r = renderer()
    assert r.decode(r.encode(text)) == text


def test_every_tag_is_one_token_of_the_starter():
    r = renderer()
    for tag in ("<answer>", "</answer>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"):
        assert len(r.encode(tag)) == 1
