"""Which code made an output, and what happens where it is other code now."""

import json
import warnings

import pytest
from outputs import HEAD, PARTS, crash, edit, work

from nanoskyrl.stages.core import code
from nanoskyrl.stages.core.code import OtherCode, changed_modules, code_of, plugin_digests
from nanoskyrl.stages.core.errors import ConflictError
from nanoskyrl.stages.core.manifest import read_manifest

ROLLOUT = {"rollout": {"env": "text_math", "engine": "hf"}}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Put a copy of the package's sources where its code is looked for, and return their folder."""
    copied = tmp_path / "sources"
    for path in code.SOURCES.glob("*/**/*.py"):
        if path.relative_to(code.SOURCES).parts[0] in ("stages", "envs", "algos", "eval"):
            (copied / path.relative_to(code.SOURCES)).parent.mkdir(parents=True, exist_ok=True)
            (copied / path.relative_to(code.SOURCES)).write_bytes(path.read_bytes())
    monkeypatch.setattr(code, "SOURCES", copied)
    code._read.cache_clear()
    yield copied
    code._read.cache_clear()


def change(path, old="", new=""):
    """Change a source, as its author would between two commands."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1) if old else text + new)
    code._read.cache_clear()


@pytest.mark.parametrize(
    ("stage", "settings", "modules"),
    [
        ("rollout", ROLLOUT, "stages.rollout stages.engines.hf stages.models.kv_cache envs.worlds.text_math.problems"),
        ("rollout", {"tool_use": {}}, "envs.worlds.tool_use.calculator envs.sandbox.bwrap envs.graders.worker_main"),
        ("score", {"alfworld_lite": {}}, "stages.score envs.worlds.alfworld.world envs.graders.grade_math"),
        ("advantage", {"advantage": {"estimator": "rloo"}}, "stages.advantage stages.learning.learner algos.shaping"),
        ("train", {"train": {"algo": "sapo"}}, "stages.train stages.models.packing algos.surrogates.sapo"),
        ("sync", {"sync": {"engine": "vllm"}}, "stages.sync stages.engines.vllm.client"),
        ("eval", {"gsm8k": {}}, "stages.eval eval.benchmarks.gsm8k eval.metrics stages.engines.turns"),
    ],
)
def test_the_code_of_a_stage_is_what_it_imports_and_the_plug_ins_that_settings_name(stage, settings, modules):
    found = code_of(stage, settings)["modules"]
    assert {f"nanoskyrl.{name}" for name in modules.split()} <= set(found)
    assert not [name for name in found if name.startswith(("nanoskyrl.stages.looking", "nanoskyrl.stages.running"))]


def test_plug_ins_that_settings_do_not_name_are_no_part_of_it():
    found = code_of("train", {"train": {"algo": "sapo"}})["modules"]
    assert "nanoskyrl.algos.surrogates.gspo" not in found
    assert "nanoskyrl.envs.worlds.text_math.environment" not in found


@pytest.mark.parametrize("stage", ["train"])
def test_a_comment_in_any_module_changes_nothing(package, stage):
    before = code_of(stage, ROLLOUT)
    for path in package.rglob("*.py"):
        change(path, new="\n# A comment.\n")
    assert code_of(stage, ROLLOUT) == before
    assert changed_modules(before, before) == []


@pytest.mark.parametrize("path", ["stages/rollout.py", "stages/engines/turns.py", "envs/worlds/text_math/problems.py"])
def test_a_changed_line_of_an_imported_module_is_named(package, path):
    before = code_of("rollout", ROLLOUT)
    change(package / path, new="\nMORE = 1\n")
    name = "nanoskyrl." + path.removesuffix(".py").replace("/", ".")
    assert changed_modules(code_of("rollout", ROLLOUT), before) == [name]


def test_a_changed_line_elsewhere_is_not_told(package):
    before = code_of("rollout", ROLLOUT)
    change(package / "stages/looking/doctor.py", new="\nX = 1\n")
    change(package / "algos/surrogates/sapo.py", new="\nX = 1\n")
    assert code_of("rollout", ROLLOUT) == before


def test_a_finished_output_of_other_code_stays_and_is_told(tmp_path):
    work(tmp_path)
    edit(tmp_path / "_manifest.json", code={"version": "0.1.0", "digest": "0", "modules": {"nanoskyrl.gone": "0"}})
    before = (tmp_path / "_manifest.json").read_bytes()
    with pytest.warns(
        OtherCode, match=r"was made by other code, it stays: `nanoskyrl\..*` and \d+ more modules changed"
    ):
        assert work(tmp_path) is None
    assert (tmp_path / "_manifest.json").read_bytes() == before


def test_an_unfinished_output_of_other_code_is_begun_again(tmp_path):
    crash(tmp_path)
    started = json.loads((tmp_path / "_started.json").read_text())
    modules = {**started["code"]["modules"], "nanoskyrl.stages.rollout": "0"}
    edit(tmp_path / "_started.json", code={**started["code"], "digest": "0", "modules": modules})
    with pytest.warns(OtherCode, match=r"it is begun again: `nanoskyrl\.stages\.rollout` changed since"):
        assert work(tmp_path) == list(range(PARTS))
    assert read_manifest(tmp_path).code == code_of("rollout", HEAD.settings)


@pytest.mark.parametrize("finished", [True, False])
def test_under_strict_other_code_is_an_error(tmp_path, finished):
    work(tmp_path) if finished else crash(tmp_path)
    edit(tmp_path / ("_manifest.json" if finished else "_started.json"), code={"version": "0.0.1", "digest": "0"})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", OtherCode)
        with pytest.raises(ConflictError, match="`nanoskyrl` changed since") as error:
            work(tmp_path)
    assert error.value.exit_code == 2
    assert "code.strict" in error.value.hint
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_plug_in_of_the_user_s_is_its_module_and_what_that_imports_from_its_folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "mine_of_code"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "env.py").write_text(
        "import json\n\nfrom . import words\nfrom mine_of_code.more import X\n\n\nclass E:\n    pass\n"
    )
    (folder / "words.py").write_text("W = 1\n")
    (folder / "more.py").write_text("X = 1\n")
    (folder / "other.py").write_text("Y = 1\n")

    def found():
        code._read.cache_clear()
        return plugin_digests("text_math", "mine_of_code.env:E")["plugins"]["mine_of_code.env:E"]

    before = found()
    for name in ("env", "words", "other"):
        change(folder / f"{name}.py", new="# A comment.\n")
    change(folder / "other.py", "Y = 1", "Y = 2")
    assert found() == before
    for name, old in (("words", "W = 1"), ("more", "X = 1")):
        last = found()
        change(folder / f"{name}.py", old, "X = 2")
        assert found() != last
    assert plugin_digests("text_math") == {}
