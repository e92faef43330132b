import pytest

from nanoskyrl.stages.core.config import config_class
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.registry import BUILTIN, load_attribute, lookup, names

ALL = [(kind, name) for kind, of_kind in BUILTIN.items() for name in of_kind]


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Install a package that offers the environment `maze`, and whose module can also be named."""
    (tmp_path / "labyrinth.py").write_text("class Maze:\n    doors = 4\n")
    info = tmp_path / "labyrinth-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: labyrinth\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nanoskyrl.envs]\nmaze = labyrinth:Maze\ntext_math = labyrinth:Maze\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_built_in_name_leads_to_something(kind, name):
    assert lookup(kind, name) is not None


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(SettingsError, match="unknown algo `sappo`") as error:
        lookup("algo", "sappo")
    assert error.value.hint == "Did you mean `sapo`?"
    assert error.value.exit_code == 2


def test_a_name_like_no_other_gets_the_list():
    with pytest.raises(SettingsError, match="unknown env `xyzzy`") as error:
        lookup("env", "xyzzy")
    assert "text_math" in error.value.hint
    assert "module:attribute" in error.value.hint


def test_a_name_of_another_kind_is_unknown():
    with pytest.raises(SettingsError, match="unknown algo `text_math`"):
        lookup("algo", "text_math")


def test_a_module_and_attribute_need_no_registration(plug_in):
    assert lookup("env", "labyrinth:Maze").doors == 4


def test_an_installed_package_adds_a_name(plug_in):
    assert lookup("env", "maze").doors == 4
    assert "maze" in names("env")
    assert "maze" not in names("algo")


def test_an_installed_package_cannot_take_a_built_in_name(plug_in):
    assert not hasattr(lookup("env", "text_math"), "doors")
    assert names("env").count("text_math") == 1


def test_a_name_that_is_built_in_or_a_module_reads_no_installed_package(plug_in, monkeypatch):
    def read(**_):
        raise AssertionError("reads a file of every package")

    monkeypatch.setattr("importlib.metadata.distributions", read)
    assert lookup("algo", "sapo").name == "sapo"
    assert lookup("env", "gsm8k") is not None
    assert lookup("env", "labyrinth:Maze").doors == 4
    assert config_class("sapo") is not None
    with pytest.raises(AssertionError):
        lookup("env", "maze")


def test_a_missing_attribute_gets_a_suggestion(plug_in):
    with pytest.raises(SettingsError, match="module `labyrinth` has no `Mase` to use as env") as error:
        lookup("env", "labyrinth:Mase")
    assert error.value.hint == "Did you mean `Maze`?"


def test_a_module_alone_is_not_enough(plug_in):
    with pytest.raises(SettingsError, match="module `labyrinth` has no ``"):
        lookup("env", "labyrinth:")


def test_a_module_that_is_not_installed_is_named():
    with pytest.raises(SettingsError, match="cannot import `no_such_module:Maze` as env: No module named") as error:
        lookup("env", "no_such_module:Maze")
    assert "install" in error.value.hint


def test_a_bug_in_a_plug_in_is_named_and_kept_as_the_cause(plug_in, tmp_path):
    (tmp_path / "collapsed.py").write_text("1 / 0\n")
    with pytest.raises(SettingsError, match="importing `collapsed` failed: ZeroDivisionError") as error:
        lookup("env", "collapsed:Maze")
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert "SKYRL_TRACEBACK" in error.value.hint


def test_the_error_says_what_the_attribute_was_for():
    with pytest.raises(SettingsError, match="as settings"):
        load_attribute("json:Missing", what="settings")


@pytest.mark.parametrize("name", [":Maze", ".maze:Maze"])
def test_a_name_without_a_module_is_a_settings_error(name):
    with pytest.raises(SettingsError):
        lookup("env", name)
