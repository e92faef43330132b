"""Rollouts with a real engine under chat templates that refuse what policies bring about."""

import shutil

import pytest

from nanoskyrl.stages.core.config import parse_set, stage_config
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.rows import from_table
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.models.policy import STARTER_DIRECTORY
from nanoskyrl.stages.rollout import rollout

TAKES_TURNS = (
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE_QUESTION = (
    "{% for m in messages %}{% if 'error' in m.content %}{{ raise_exception('no errors, please') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def rows_under(template, folder, **settings):
    shutil.copytree(STARTER_DIRECTORY, folder / "policy")
    (folder / "policy" / "chat_template.jinja").write_text(template)
    config = RolloutConfig(
        env="tool_use", train_batch_size=4, n_samples_per_prompt=4, max_generate_length=128, **settings
    )
    manifest = rollout(folder / "policy", folder / "out", config, settings={"hf": {"device": "cpu"}})
    return [row for table in read_parts(folder / "out", manifest, None) for row in from_table(table)]


def test_a_template_without_a_tool_role_whose_turns_alternate_carries_a_rollout_with_calls(tmp_path):
    rows = rows_under(TAKES_TURNS, tmp_path, max_turns=2)
    assert {row.status for row in rows} <= {"completed", "truncated", "max_turns"}
    assert sum(call.ok for row in rows for turn in row.turns for call in turn.tool_calls) >= 3
    assert any("<tool_response>" in row.response for row in rows)


def test_what_a_template_refuses_fails_attempts_and_never_the_rollout(tmp_path):
    rows = rows_under(ONE_QUESTION, tmp_path)
    failed = [row for row in rows if row.status == "failed"]
    assert 0 < len(failed) < len(rows)
    assert all("no errors, please" in row.error and len(row.turns) for row in failed)
    assert len(rows) == 16


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{enable_thinking = false}", {"enable_thinking": False}),
        (
            '{"enable_thinking": false, "budget": {"steps": [1, {"n": 2}]}}',
            {"enable_thinking": False, "budget": {"steps": [1, {"n": 2}]}},
        ),
        ("{budget = {steps = [1, {n = 2}]}}", {"budget": {"steps": [1, {"n": 2}]}}),
    ],
)
def test_arguments_of_the_template_are_set_as_toml_or_json(text, value):
    settings = parse_set(f"rollout.chat_template_kwargs={text}")
    assert stage_config(settings, "rollout").chat_template_kwargs == value
    settings = parse_set(f"eval.chat_template_kwargs={text}")
    assert stage_config(settings, "eval").chat_template_kwargs == value


@pytest.mark.parametrize("table", ["rollout", "eval"])
@pytest.mark.parametrize(("text", "why"), [("{tools = []}", "has `tools`"), ('{"a": {"b": [null]}}', "a null in `a`")])
def test_arguments_that_are_not_a_templates_are_refused(table, text, why):
    with pytest.raises(SettingsError, match=why):
        stage_config(parse_set(f"{table}.chat_template_kwargs={text}"), table)


def test_an_unknown_format_is_refused_before_anything_runs(tmp_path):
    for name, why in (("qwenxml", "unknown tool_format"), ("json:dumps", "no ToolFormat")):
        with pytest.raises(SettingsError, match=why):
            rollout(STARTER_DIRECTORY, tmp_path / "out", RolloutConfig(env="tool_use", tool_format=name))
    assert not (tmp_path / "out").exists()
