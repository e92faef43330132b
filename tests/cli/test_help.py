import ast
import subprocess
import sys

import pytest
from rich.markup import render

from nanoskyrl_cli.main import COMMANDS, loaded, run

NAMES = [name for name, *_ in COMMANDS]


def loaded_by(arguments):
    """Return which heavy packages a command loads, in a new process."""
    program = (
        "import sys; from nanoskyrl_cli.main import run; run(sys.argv[1:]); "
        "print([m for m in ('torch', 'transformers', 'pyarrow', 'numpy', 'vllm') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return ast.literal_eval(found.stdout.splitlines()[-1])


def test_help_loads_nothing_heavy():
    assert loaded_by(["--help"]) == []


@pytest.mark.parametrize("command", ["score", "advantage", "show", "verify", "init"])
def test_commands_that_need_no_model_do_not_load_torch(command, tmp_path):
    assert not {"torch", "transformers"} & set(loaded_by([command, "--run", str(tmp_path)]))


def test_help_lists_each_command_by_its_first_line_and_imports_none(capsys):
    program = (
        "import sys; from nanoskyrl_cli.main import run; run(['--help']); "
        "print(sorted(m for m in sys.modules if m.startswith('nanoskyrl_cli.')))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in NAMES)
    assert ast.literal_eval(shown.splitlines()[-1]) == ["nanoskyrl_cli.main", "nanoskyrl_cli.options"]
    for name, _, _, summary in COMMANDS:
        assert " ".join(loaded(name).help.partition("\n\n")[0].split()) == summary


@pytest.mark.parametrize("command", NAMES)
def test_every_command_has_help_with_an_example(command, capsys):
    assert run([command, "--help"]) == 0
    assert f"skyrl {command}" in capsys.readouterr().out.split("Example:")[1]


@pytest.mark.parametrize("command", NAMES)
def test_help_shows_all_that_its_options_say(command):
    said = [option.help for option in loaded(command).params if getattr(option, "help", None)]
    assert [render(text).plain for text in said] == said  # words in brackets would be markup


def test_without_a_command_the_help_is_shown(capsys):
    assert run([]) == 2
    assert "rollout" in "".join(capsys.readouterr())
