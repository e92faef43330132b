"""Settings that are checked by their types, and what follows from the metadata of their fields."""

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from nanoskyrl.stages.core import config
from nanoskyrl.stages.core.checked import (
    COMMAND,
    FILE,
    PLACE,
    Checked,
    FinitePositive,
    NonEmptyText,
    PositiveInt,
    Share,
    field_docs,
    range_text,
    type_text,
)
from nanoskyrl.stages.core.config import (
    build,
    config_class,
    parse_set,
    read_file,
    row_settings,
    stage_config,
    with_later_keys,
)
from nanoskyrl.stages.core.errors import Notice, SettingsError
from nanoskyrl.stages.learning.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KettleConfig(Checked):
    """Settings of a kettle."""

    litres: FinitePositive = 1.5
    """How much it holds."""
    cups: PositiveInt | None = None
    fill: Share = 0.5
    lid: Literal["open", "shut"] = "shut"
    """Whether steam can leave."""
    words: tuple[NonEmptyText, ...] = ()
    teas: Annotated[tuple[Literal["green", "black"], ...], Meta(min_length=1)] = ("green",)
    shelf: str = field(default="left", metadata=PLACE)
    recipe: str | None = field(default=None, metadata=FILE)
    servers: tuple[str, ...] = field(default=(), metadata=COMMAND)

    def check(self) -> None:
        """Refuse to boil over."""
        if self.fill > 0.9 and self.lid == "shut":
            raise SettingsError("`kettle.fill` boils over", hint="Open `kettle.lid`")


WRONG = [
    (
        {"litres": 0},
        "`kettle.litres` must be above 0 and finite, not 0",
        "The default is 1.5. How much it holds.",
    ),
    ({"litres": math.inf}, "`kettle.litres` must be above 0 and finite, not inf", "How much"),
    ({"litres": math.nan}, "`kettle.litres` must be above 0 and finite, not nan", "How much"),
    ({"cups": 0}, "`kettle.cups` must be at least 1, not 0", ""),
    ({"cups": "two"}, "`kettle.cups` must be int | None, not 'two'", "Expected"),
    ({"fill": 2}, "`kettle.fill` must be at least 0 and at most 1, not 2", "The default is 0.5."),
    ({"lid": "shot"}, "`kettle.lid` must be open or shut, not 'shot'", "Did you mean `shut`?"),
    (
        {"lid": "xyz"},
        "`kettle.lid` must be open or shut, not 'xyz'",
        "The default is shut. Whether steam can leave.",
    ),
    ({"words": ["", "a"]}, "`kettle.words` must be at least 1 character, not", ""),
    ({"teas": []}, "`kettle.teas` must be at least 1 of green or black, not", ""),
    ({"teas": ["red"]}, "`kettle.teas` must be at least 1 of green or black, not", ""),
    ({"fill": 1.0}, "`kettle.fill` boils over", "Open"),
]


@pytest.mark.parametrize(("values", "message", "hint"), WRONG)
@pytest.mark.parametrize("made", [lambda values: build(KettleConfig, values, "kettle"), lambda v: KettleConfig(**v)])
def test_a_value_outside_its_type_is_refused_in_a_file_and_in_python(values, message, hint, made):
    with pytest.raises(SettingsError) as error:
        made(values)
    assert str(error.value).startswith(message)
    assert hint in (error.value.hint or "")


def test_a_changed_copy_is_checked_too():
    with pytest.raises(SettingsError, match=r"`train\.lora_dropout` must be at least 0 and below 1, not 1"):
        replace(TrainConfig(), lora_dropout=1.0)


def test_bounds_themselves_count_as_the_type_says():
    assert build(KettleConfig, {"fill": 0, "cups": 1}, "kettle") == KettleConfig(fill=0.0, cups=1)
    assert KettleConfig(fill=1.0, lid="open").fill == 1.0


@pytest.mark.parametrize(
    ("of", "type_", "range_"),
    [
        (int, "int", ""),
        (PositiveInt | None, "int | None", "at least 1"),
        (tuple[Share, Share], "tuple[float, float]", "at least 0 and at most 1"),
        (dict[str, Any], "dict[str, Any]", ""),
        (Literal[0, 1], "int", "0 or 1"),
        (str | dict[str, FinitePositive], "str | dict[str, float]", "above 0 and finite"),
    ],
)
def test_a_type_is_put_into_words(of, type_, range_):
    assert (type_text(of), range_text(of)) == (type_, range_)


def test_a_settings_class_of_a_plug_in_needs_neither_our_base_nor_evaluated_annotations(tmp_path, monkeypatch):
    (tmp_path / "late.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass(frozen=True)\nclass OvenConfig:\n    degrees: int = 180\n\nclass Oven:\n    Config = OvenConfig\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert parse_set("late:Oven.degrees=200") == {"late:Oven": {"degrees": 200}}
    found = config_class("late:Oven")
    assert found is not None
    with pytest.raises(SettingsError, match=r"`late:Oven\.degrees` must be int, not 'hot'"):
        build(found, {"degrees": "hot"}, "late:Oven")


def test_a_class_without_a_source_file_has_no_texts():
    assert field_docs(dataclass(type("Bare", (), {"__annotations__": {"a": int}, "a": 1}))) == {}


def test_a_manifest_holds_neither_places_nor_files_and_of_programs_the_names():
    made = KettleConfig(shelf="right", recipe="/tea/recipe.txt", servers=("python /tea/server.py --hot", "http://a/b"))
    assert row_settings(made) == {
        "litres": 1.5, "cups": None, "fill": 0.5, "lid": "shut", "words": (), "teas": ("green",),
        "servers": ("python server.py --hot", "http://a/b"),
    }  # fmt: skip


# Settings that are gone


@pytest.fixture
def gone(monkeypatch):
    monkeypatch.setattr(config, "GONE", {"train.magic": 7})
    monkeypatch.setattr(config, "_told", set())


def test_a_setting_that_is_gone_is_ignored_and_named_once(gone, tmp_path):
    (tmp_path / "run.toml").write_text("[train]\nmagic = 7\nlr = 0.1\n")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert read_file(tmp_path / "run.toml") == {"train": {"lr": 0.1}}
        assert parse_set("train.magic=8") == {"train": {}}
    assert [(str(one.message), one.category) for one in told] == [
        ("`train.magic` is no setting any more and is ignored: 7 holds", Notice)
    ]
    assert stage_config({"train": {}}, "train") == TrainConfig()


def test_an_output_made_under_a_setting_that_is_gone_is_up_to_date_where_its_value_holds(gone):
    now = {"train": {"lr": 0.1}}
    assert with_later_keys({"train": {"lr": 0.1, "magic": 7}}, now) == now
    assert with_later_keys({"train": {"lr": 0.1, "magic": 8}}, now) == {"train": {"lr": 0.1, "magic": 8}}


def test_every_setting_that_is_gone_names_a_table_and_no_setting():
    for name in config.GONE:
        table, _, key = name.rpartition(".")
        found = config_class(table)
        assert found is not None
        assert key not in field_docs(found)
