import dataclasses
from dataclasses import dataclass, field

import pytest

from nanoskyrl.stages.core.checked import field_docs
from nanoskyrl.stages.core.config import (
    build,
    check_keys,
    config_class,
    merge,
    parse_set,
    plugin_config,
    read_file,
    stage_config,
    tables,
    to_plain,
)
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl.stages.looking.catalogue import preset_settings

STAGES = ("rollout", "score", "advantage", "train", "sync", "eval", "loop", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class OvenConfig:
    """Settings of an oven.

    This text is no field's.
    """

    degrees: int = 180
    """Celsius, in the
    middle of the oven."""
    fan: bool = False
    shelf: str | None = None
    """None: the middle one."""
    minutes: float = 30.0
    """Until it is done."""
    """Not of the field either."""
    dishes: tuple[str, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        """Refuse a furnace."""
        if self.degrees > 300:
            raise SettingsError("`oven.degrees` must be at most 300")


class Oven:
    Config = OvenConfig


@pytest.fixture
def oven(tmp_path, monkeypatch):
    """Return the name of an environment in the user's own module, with settings."""
    (tmp_path / "kitchen.py").write_text(
        "from dataclasses import dataclass\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass OvenConfig:\n    degrees: int = 180\n\n"
        "class Oven:\n    Config = OvenConfig\n\nclass Plain:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "kitchen:Oven"


@pytest.fixture
def settings_file(tmp_path):
    """Return a maker of settings files from their text."""

    def make(text, name="run.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return make


def given(value, key):
    """Return what `build` makes of one value of the oven."""
    return getattr(build(OvenConfig, {key: value}, "oven"), key)


# Files


def test_a_toml_file_is_its_tables(settings_file):
    path = settings_file('[rollout]\nenv = "tool_use"\ntemperature = 0.7\n\n[tool_use]\ntools = ["calculator"]\n')
    assert read_file(path) == {
        "rollout": {"env": "tool_use", "temperature": 0.7},
        "tool_use": {"tools": ["calculator"]},
    }


@pytest.mark.parametrize("name", ["run.yaml", "run.yml"])
def test_a_yaml_file_says_the_same(settings_file, name):
    path = settings_file("rollout:\n  env: tool_use\n  temperature: 0.7\ntool_use:\n  tools: [calculator]\n", name)
    assert read_file(path) == {
        "rollout": {"env": "tool_use", "temperature": 0.7},
        "tool_use": {"tools": ["calculator"]},
    }
    assert stage_config(read_file(path), "rollout").temperature == 0.7


@pytest.mark.parametrize("name", ["run.toml", "run.yaml"])
def test_an_empty_file_changes_nothing(settings_file, name):
    assert read_file(settings_file("# nothing\n", name)) == {}


def test_a_settings_file_may_lie_behind_a_url(tmp_path):
    path = as_path(f"memory:/{tmp_path}/run.toml")
    path.parent.mkdir(parents=True)
    path.write_text("[loop]\nsteps = 3\n")
    assert read_file(path) == {"loop": {"steps": 3}}


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"there is no settings file `.*/run\.toml`"):
        read_file(tmp_path / "run.toml")


@pytest.mark.parametrize(("name", "kind"), [("run.toml", "TOML"), ("run.yaml", "YAML")])
def test_a_file_that_cannot_be_parsed_names_the_line(settings_file, name, kind):
    with pytest.raises(InputError, match=rf"run\.\w+` is not {kind}: .*line 2"):
        read_file(settings_file("\n[rollout\n", name))


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "run.toml", tmp_path):
        with pytest.raises(InputError, match="is not a text file"):
            read_file(path)


def test_a_file_without_tables_is_refused(settings_file):
    with pytest.raises(SettingsError, match="holds no tables"):
        read_file(settings_file("- rollout\n", "run.yaml"))


def test_a_setting_outside_a_table_is_sent_to_its_own(settings_file):
    with pytest.raises(SettingsError, match=r"`lr` in `.*` stands outside a table") as error:
        read_file(settings_file("lr = 1e-4\n\n[rollout]\n"))
    assert "[train]" in error.value.hint


def test_an_unknown_table_in_a_file_gets_a_suggestion(settings_file):
    with pytest.raises(SettingsError, match="unknown table `rolout`") as error:
        read_file(settings_file("[rolout]\n"))
    assert error.value.hint == "Did you mean `rollout`?"


def test_an_unknown_key_in_a_file_gets_a_suggestion(settings_file):
    with pytest.raises(SettingsError, match=r"unknown key `rollout\.tempratur`") as error:
        read_file(settings_file("[rollout]\ntempratur = 0.7\n"))
    assert error.value.hint == "Did you mean `rollout.temperature`?"


# Presets


@pytest.mark.parametrize("preset", ["quickstart", "alfworld"])
def test_every_setting_of_a_preset_can_be_used(preset):
    for table, values in preset_settings(preset).items():
        config = build(config_class(table), values, table)
        assert {key: getattr(config, key) for key in values} == values


def test_an_unknown_preset_gets_a_suggestion():
    with pytest.raises(SettingsError, match="unknown preset `quikstart`") as error:
        preset_settings("quikstart")
    assert error.value.hint == "Did you mean `quickstart`?"
    with pytest.raises(SettingsError, match=r"unknown preset `\.\./secrets`"):
        preset_settings("../secrets")


# --set


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-1", -1),
        ("1e-4", 1e-4),
        ("0.5", 0.5),
        ("true", True),
        ("false", False),
        ("null", None),
        ("none", None),
        ("None", None),
        ("sapo", "sapo"),
        ('"sapo"', "sapo"),
        ("'3'", "3"),
        ("", ""),
        ("runs/a=b.jsonl", "runs/a=b.jsonl"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("[1, 2]", [1, 2]),
        ('["calculator", "search"]', ["calculator", "search"]),
        ("[]", []),
        ("{ env = 0.5, judge = 1 }", {"env": 0.5, "judge": 1}),
    ],
)
def test_a_value_of_set_is_toml_or_else_text(text, value):
    found = parse_set(f"run.policy={text}")
    assert found == {"run": {"policy": value}}
    assert type(found["run"]["policy"]) is type(value)


def test_spaces_round_the_name_do_not_count():
    assert parse_set(" loop.steps = 3") == {"loop": {"steps": 3}}


@pytest.mark.parametrize("assignment", ["", "train.lr", "=3", "train.=3", "."])
def test_what_is_no_assignment_is_refused(assignment):
    with pytest.raises(SettingsError, match=r"is not `table\.key=value`"):
        parse_set(assignment)


def test_a_key_without_its_table_is_sent_to_it():
    with pytest.raises(SettingsError, match="`n_samples_per_prompt` needs its table") as error:
        parse_set("n_samples_per_prompt=8")
    assert error.value.hint == "Write `--set rollout.n_samples_per_prompt=8`"


def test_a_table_of_the_users_own_module_can_be_set(oven):
    assert parse_set(f"{oven}.degrees=200") == {oven: {"degrees": 200}}
    with pytest.raises(SettingsError, match=r"unknown key `kitchen:Oven\.degres`"):
        parse_set(f"{oven}.degres=200")


# Unknown names


def test_every_built_in_table_has_settings():
    assert set(STAGES) <= set(tables())
    assert len(tables()) == len(set(tables()))
    for table in tables():
        config = config_class(table)
        assert dataclasses.is_dataclass(config), table
        assert build(config, {}, table) == config()
        check_keys(table, [found.name for found in dataclasses.fields(config) if "of_run" not in found.metadata])


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        # The table "Names users know" of pitfalls.md.
        ("rollout.num_generations", "rollout.n_samples_per_prompt"),
        ("rollout.n", "rollout.n_samples_per_prompt"),
        ("rollout.group_size", "rollout.n_samples_per_prompt"),
        ("rollout.generation_batch_size", "rollout.train_batch_size"),
        ("rollout.rollout_batch_size", "rollout.train_batch_size"),
        ("train.ppo_mini_batch_size", "train.policy_mini_batch_size"),
        ("train.global_batch_size", "train.policy_mini_batch_size"),
        ("train.ppo_epochs", "train.update_epochs_per_batch"),
        ("train.num_iterations", "train.update_epochs_per_batch"),
        ("grpo.clip_ratio_low", "grpo.eps_clip_low"),
        ("grpo.clip_ratio_high", "grpo.eps_clip_high"),
        ("grpo.epsilon", "grpo.eps_clip_low"),
        ("grpo.epsilon_high", "grpo.eps_clip_high"),
        ("train.loss_agg_mode", "train.loss_reduction"),
        ("train.loss_type", "train.loss_reduction"),
        ("rollout.max_completion_length", "rollout.max_generate_length"),
        ("rollout.max_response_length", "rollout.max_generate_length"),
        ("rollout.max_assistant_turns", "rollout.max_turns"),
        ("rollout.max_tool_calling_iterations", "rollout.max_turns"),
        # Others that the same users type.
        ("train.learning_rate", "train.lr"),
        ("train.lora_r", "train.lora_rank"),
        ("rollout.max_new_tokens", "rollout.max_generate_length"),
        ("rollout.max_prompt_length", "rollout.max_input_length"),
        ("grpo.clip_ratio", "grpo.eps_clip_low"),
    ],
)
def test_a_rivals_word_is_answered_with_ours(word, ours):
    with pytest.raises(SettingsError, match=f"unknown key `{word}`") as error:
        parse_set(f"{word}=1")
    assert ours in error.value.hint
    assert error.value.hint.startswith("Did you mean `")


@pytest.mark.parametrize("table", ["train", "grpo", "loop", "text_math"])
def test_a_rivals_word_in_the_wrong_table_is_sent_to_the_right_one(table):
    with pytest.raises(SettingsError, match=f"unknown key `{table}.num_generations`") as error:
        parse_set(f"{table}.num_generations=8")
    assert error.value.hint == "Did you mean `rollout.n_samples_per_prompt`?"


def test_our_word_in_the_wrong_table_is_sent_to_the_right_one():
    with pytest.raises(SettingsError, match=r"unknown key `train\.temperature`") as error:
        parse_set("train.temperature=0.7")
    assert error.value.hint == "Did you mean `rollout.temperature`?"


def test_a_key_like_no_other_gets_the_list():
    with pytest.raises(SettingsError, match=r"unknown key `loop\.xyzzy`") as error:
        parse_set("loop.xyzzy=1")
    assert error.value.hint.startswith("[loop] has steps, ")


def test_a_table_like_no_other_gets_the_list():
    with pytest.raises(SettingsError, match="unknown table `xyzzy`") as error:
        parse_set("xyzzy.steps=1")
    assert all(name in error.value.hint for name in ("rollout", "text_math", "grpo"))


# Values


def test_no_values_are_the_defaults():
    assert build(OvenConfig, {}, "oven") == OvenConfig()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("degrees", 200, 200),
        ("fan", True, True),
        ("shelf", None, None),
        ("shelf", "top", "top"),
        ("minutes", 20, 20.0),
        ("dishes", ["pie", "bread"], ("pie", "bread")),
        ("weights", {"pie": 1}, {"pie": 1.0}),
    ],
)
def test_a_value_becomes_its_type(key, value, expected):
    found = given(value, key)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("degrees", "ten", "`oven.degrees` must be int, not 'ten'"),
        ("degrees", "10", "`oven.degrees` must be int, not '10'"),
        ("degrees", 180.5, "`oven.degrees` must be int, not 180.5"),
        ("degrees", True, "`oven.degrees` must be int, not True"),
        ("degrees", None, "`oven.degrees` must be int, not None"),
        ("fan", 1, "`oven.fan` must be bool, not 1"),
        ("fan", "yes", "`oven.fan` must be bool, not 'yes'"),
        ("shelf", 2, r"`oven.shelf` must be str \| None, not 2"),
        ("minutes", "1e1", "`oven.minutes` must be float, not '1e1'"),
        ("minutes", False, "`oven.minutes` must be float, not False"),
        ("dishes", "pie", r"`oven.dishes` must be tuple\[str, ...\], not 'pie'"),
        ("dishes", ["pie", 1], r"`oven.dishes` must be tuple\[str, ...\], not \['pie', 1\]"),
        ("weights", {"pie": "much"}, r"`oven.weights` must be dict\[str, float\], not \{'pie': 'much'\}"),
    ],
)
def test_a_value_of_the_wrong_type_names_key_type_and_value(key, value, message):
    with pytest.raises(SettingsError, match=f"^{message}$"):
        given(value, key)


def test_an_unknown_key_is_also_noticed_where_a_dataclass_is_filled():
    with pytest.raises(SettingsError, match=r"unknown key `oven\.degres`") as error:
        build(OvenConfig, {"degres": 200}, "oven")
    assert error.value.hint == "Did you mean `oven.degrees`?"


def test_a_dataclass_may_refuse_what_the_type_allows():
    with pytest.raises(SettingsError, match="at most 300"):
        given(400, "degrees")


# Sources


def test_later_sources_win_key_by_key():
    merged = merge(
        {"rollout": {"env": "text_math", "temperature": 1.0}},
        {"rollout": {"temperature": 0.7}, "train": {"lr": 1e-4}},
        {"train": {"lr": None}},
    )
    assert merged == {"rollout": {"env": "text_math", "temperature": 0.7}, "train": {"lr": None}}


def test_merging_leaves_the_sources_as_they_were():
    first, second = {"rollout": {"env": "text_math"}}, {"rollout": {"env": "tool_use"}}
    merge(first, second)["rollout"]["env"] = "other"
    assert (first, second) == ({"rollout": {"env": "text_math"}}, {"rollout": {"env": "tool_use"}})
    assert merge() == {}


def test_a_flag_wins_over_the_table_and_none_is_no_flag():
    settings = {"loop": {"steps": 3, "eval_every": 2}}
    config = stage_config(settings, "loop", steps=5, eval_every=None)
    assert (config.steps, config.eval_every) == (5, 2)
    assert stage_config({}, "loop") == config_class("loop")()


def test_a_plug_in_takes_the_table_of_its_name(oven):
    assert plugin_config({"text_math": {"level": 2}, "tool_use": {"level": 3}}, "env", "text_math").level == 2
    assert plugin_config({oven: {"degrees": 200}}, "env", oven).degrees == 200
    assert plugin_config({}, "env", oven).degrees == 180


def test_a_plug_in_may_have_no_settings(oven):
    assert plugin_config({}, "env", "kitchen:Plain") is None
    assert to_plain(None) == {}


def test_settings_become_plain_values():
    assert to_plain(OvenConfig(dishes=("pie",)))["dishes"] == ("pie",)
    assert list(to_plain(OvenConfig())) == ["degrees", "fan", "shelf", "minutes", "dishes", "weights"]


# What a field says of itself


def test_the_text_below_a_field_is_its_own():
    assert field_docs(OvenConfig) == {
        "degrees": "Celsius, in the middle of the oven.",
        "shelf": "None: the middle one.",
        "minutes": "Until it is done.",
    }


# Where a name or a number is easily mistaken


def test_a_number_without_a_point_is_a_number_in_yaml_too(settings_file):
    assert stage_config(read_file(settings_file("train:\n  lr: 1e-4\n", "run.yaml")), "train").lr == 1e-4


@pytest.mark.parametrize("text", ["1:\n  lr: 1\n", "on:\n  lr: 1\n", "train:\n  1: 2\n"])
def test_a_yaml_name_that_is_no_text_is_a_settings_error(settings_file, text):
    with pytest.raises(SettingsError):
        read_file(settings_file(text, "run.yaml"))


def test_a_misspelt_key_in_the_wrong_table_gets_a_key_that_exists():
    with pytest.raises(SettingsError) as error:
        parse_set("train.temperatur=0.7")
    assert error.value.hint == "Did you mean `rollout.temperature`?"


def test_a_rivals_word_without_a_table_is_answered_with_ours(settings_file):
    with pytest.raises(SettingsError) as error:
        parse_set("num_generations=8")
    assert "rollout.n_samples_per_prompt" in error.value.hint
    with pytest.raises(SettingsError) as error:
        read_file(settings_file("num_generations = 8\n"))
    assert "n_samples_per_prompt" in error.value.hint


def test_an_installed_plug_in_has_a_table(oven, tmp_path):
    info = tmp_path / "kitchen-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kitchen\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[nanoskyrl.envs]\noven = {oven}\n")
    assert parse_set("oven.degrees=200") == {"oven": {"degrees": 200}}


def test_a_setting_that_is_not_a_number_is_refused():
    with pytest.raises(SettingsError):
        given(float("nan"), "minutes")


def test_every_built_in_setting_says_what_it_is_for():
    for table in tables():
        config = config_class(table)
        assert {found.name for found in dataclasses.fields(config)} == set(field_docs(config)), table
