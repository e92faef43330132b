import ast
import subprocess
import sys

import pytest

from nanoskyrl_cli.main import app, run

COMMANDS = [
    "rollout",
    "score",
    "advantage",
    "train",
    "sync",
    "eval",
    "loop",
    "serve",
    "show",
    "verify",
    "export",
    "grade",
    "compare",
    "init",
    "list",
    "plan",
    "doctor",
]


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


def test_every_command_is_listed():
    assert sorted(command.name for command in app.registered_commands) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys):
    assert run([command, "--help"]) == 0
    assert f"skyrl {command}" in capsys.readouterr().out.split("Example:")[1]


def test_without_a_command_the_help_is_shown(capsys):
    assert run([]) == 2
    assert "rollout" in "".join(capsys.readouterr())
