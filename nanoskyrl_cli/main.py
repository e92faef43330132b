"""The command `skyrl`: one subcommand a stage, and the tools to look at what they wrote.

Nothing imported here, or by the modules of single commands, loads torch or transformers:
`skyrl --help` answers at once.
"""

import dataclasses
import gc
import importlib
import io
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from nanoskyrl.stages.core.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    NanoskyrlError,
    Notice,
    is_out_of_memory,
)
from nanoskyrl.stages.core.registry import names
from nanoskyrl.stages.core.safe_text import printable, struck
from nanoskyrl.stages.learning import rank_errors
from nanoskyrl_cli.options import say, stdout_for_data

TRACEBACK = "SKYRL_TRACEBACK"
"""Set in the environment, errors keep their traceback: for those who write plug-ins."""
OUT_OF_MEMORY = (
    "Lower `train.max_tokens_per_micro_batch`, or what is sampled at once; `skyrl plan` says what each stage needs"
)
STAGES, LOOK, SETUP = "Stages", "Looking", "Setting up"
COMMANDS = (
    ("rollout", STAGES, "rollout:rollout", "Attempt tasks with a policy and write every token down."),
    ("score", STAGES, "score:score", "Give every trajectory its reward, or say why it has none."),
    ("advantage", STAGES, "advantage:advantage", "Turn rewards into an advantage for every sampled token."),
    (
        "train",
        STAGES,
        "train:train",
        "Update the policy once; with --follow, which takes a run in place of shards, again and again.",
    ),
    ("sync", STAGES, "sync:sync", "Publish the trained policy, and prove that the engine holds it."),
    (
        "eval",
        STAGES,
        "eval:evaluate",
        "Measure a policy or an endpoint on benchmarks or held-out tasks: success with its interval, pass@k, cost.",
    ),
    (
        "loop",
        STAGES,
        "loop:loop",
        "Run rollout, score, advantage, train and sync, step after step; resume where a killed run stopped.",
    ),
    (
        "serve",
        STAGES,
        "serve:serve",
        "Keep vLLM servers up for a run until Ctrl-C; its commands find them and bring them to their policies.",
    ),
    (
        "show",
        LOOK,
        "show:show",
        "Look at a run, a step, shards, policies, evaluations, or one trajectory.",
    ),
    (
        "browse",
        LOOK,
        "browse:browse",
        "Walk through a run in the whole terminal: steps, trajectories, turns and tokens, with search and keys.",
    ),
    (
        "report",
        LOOK,
        "report:report",
        "Write one HTML page of a run, or of several: curves, errors, evaluations, trajectories, settings, lineage.",
    ),
    (
        "diff",
        LOOK,
        "diff:diff",
        "Say what differs between two runs, outputs or policies, in the order in which it came about.",
    ),
    ("sql", LOOK, "sql:sql", "Ask a run in SQL: all stages as tables, which are only read; or a saved question."),
    (
        "compare",
        LOOK,
        "compare:compare",
        "Set algorithms side by side on the same shard and policy: loss, gradient, what is clipped, who is pushed.",
    ),
    ("verify", LOOK, "verify:verify", "Check every digest, and that each stage's inputs are what its parents wrote."),
    (
        "replay",
        LOOK,
        "replay:replay",
        "Play the recorded actions of a trajectory in its environment again, and say what no longer matches.",
    ),
    (
        "grade",
        LOOK,
        "grade:grade",
        "Grade answers by the graders of every environment and benchmark; print each row with `correct` and `why`.",
    ),
    (
        "export",
        LOOK,
        "export:export",
        "Write a policy as a Hugging Face directory with a model card, or trajectories for other programs.",
    ),
    (
        "import",
        LOOK,
        "import_rows:import_rows",
        "Take trajectories with token ids from JSON lines as the next step's rollout, and their rewards as its score.",
    ),
    (
        "init",
        SETUP,
        "init:init",
        "Write a run.toml with every setting and what it means; or with --env an environment to begin from.",
    ),
    ("set", SETUP, "set:set_settings", "Change the settings of a run: run.toml, whose comments stay."),
    (
        "settings",
        SETUP,
        "settings:show_settings",
        "Say which settings hold in a run, and where each comes from: default, lag, run.toml, preset, file or flag.",
    ),
    ("list", SETUP, "list:list_names", "List what can be named: environments, engines, algorithms and the like."),
    (
        "plan",
        SETUP,
        "plan:plan",
        "Say what the next stages would do, where, and how much memory they need; start nothing.",
    ),
    (
        "doctor",
        SETUP,
        "doctor:doctor",
        "Say what this machine can do, and what to install for the rest; or try an engine.",
    ),
)
"""Name, panel, function and first line of each command, so that listing them imports none."""


class Commands(TyperGroup):
    """The commands, each imported when it is called; those of stages of somebody's own among them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, panel, _, summary in COMMANDS:
            self.add_command(TyperCommand(name, help=summary, rich_help_panel=panel))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*super().list_commands(ctx), *names("stage")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, not imported yet; None if there is none of this name."""
        found = super().get_command(ctx, cmd_name)
        if found is None and (":" in cmd_name or cmd_name in names("stage")):
            found = TyperCommand(cmd_name, help="A stage where `run.stages` names it.", rich_help_panel=STAGES)
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command that the arguments begin with, imported."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and loaded(str(name)), rest


def loaded(name: str) -> Any:
    """Return a command with its options."""
    target = next((function for known, _, function, _ in COMMANDS if known == name), "own_stage:command")
    module, _, function = target.partition(":")
    # In columns, a narrow terminal would cut the names of options; lines below each other it does not.
    narrow = shutil.get_terminal_size().columns < NARROW
    alone = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None if narrow else "rich"
    )
    found = getattr(importlib.import_module(f"nanoskyrl_cli.{module}"), function)
    found = found(name) if module == "own_stage" else found
    alone.command(name, context_settings=HELP_OPTIONS)(stdout_for_data(found))
    return _with_defaults(name, typer.main.get_command(alone))


def _with_defaults(name: str, command: Any) -> Any:
    """Return a command whose options tell the defaults of the settings that they stand for."""
    from nanoskyrl.stages.core.config import config_class

    configs = filter(None, map(config_class, SETTINGS_OF.get(name, ())))
    defaults = [{field.name: field.default for field in dataclasses.fields(config)} for config in configs]
    for param in command.params:
        default = next((one[param.name] for one in defaults if one.get(param.name) is not None), None)
        text = getattr(param, "help", None)
        if text and param.default is None and isinstance(default, str | int | float) and "efault" not in text:
            param.help = f"{text} Default {default}."
    return command


NARROW = 80
SETTINGS_OF = {
    "rollout": ("rollout", "run", "train"), "advantage": ("advantage", "train"), "train": ("train",),
    "eval": ("eval", "rollout"), "loop": ("loop", "run", "rollout", "train"), "plan": ("run",),
}  # fmt: skip
"""Tables of settings that a command's options stand for, by their names; of several the first that has one."""
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    cls=Commands,
    name="skyrl",
    help="Agentic reinforcement learning of language models, one Parquet stage at a time.",
    epilog="First steps: skyrl rollout, score, advantage, train, sync; or all of it: skyrl loop --preset quickstart.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP_OPTIONS,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("nanoskyrl"))
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Print it and end.")
    ] = False,
) -> None:
    """Agentic reinforcement learning of language models, one Parquet stage at a time."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors that a user can fix are printed, not raised."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a model may write what no terminal can show
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return _tell("the current directory is gone", "Change to one that is there", EXIT_USAGE)
    if here not in sys.path:
        sys.path.append(here)  # so that `module:attribute` finds what lies here
    told, show = set(), warnings.showwarning

    def tell(message: Any, *place: Any) -> None:
        """Print notices for users; that outputs were made by other code, once for the same modules."""
        from nanoskyrl.stages.core.code import OtherCode

        if isinstance(message, OtherCode):
            if message.says in told:
                return
            told.add(message.says)
        elif not isinstance(message, Notice):
            show(type(message)(printable(struck(str(message)))), *place)
            return
        say(f"note: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", Notice)
        warnings.showwarning = tell
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = app(args=list(arguments) if arguments is not None else None, prog_name="skyrl", standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # what typer makes of Ctrl-C, silently
            print("interrupted", file=sys.stderr)
        return code if isinstance(code, int) else 0
    except NanoskyrlError as error:
        if os.environ.get(TRACEBACK):
            raise
        return _tell(str(error), error.hint, error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except typer.Exit as done:
        return done.exit_code
    except BrokenPipeError:
        # Whoever read our output has gone; say nothing more to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        place = f"`{error.filename}`: " if error.filename else ""
        hint = "Check the path, its permissions and the free space"
        return _tell(f"{place}{error.strerror or error}", hint, EXIT_FAILED)
    except Exception as error:
        if hasattr(error, "format_message"):  # what typer raises for wrong usage
            return _usage_error(error)
        if is_out_of_memory(error) and not os.environ.get(TRACEBACK):
            words = " ".join(str(error).split()) or "Python could allocate no more"
            return _tell(f"out of memory: {words}", OUT_OF_MEMORY, EXIT_FAILED)
        raise


def _tell(message: str, hint: str | None, exit_code: int) -> int:
    """Print an error, or leave it to the process that started this one beside others; return its exit code."""
    if rank_errors.is_watched():
        rank_errors.leave(message, hint, exit_code)
        return exit_code
    print(printable(f"error: {struck(message)}"), file=sys.stderr)
    if hint:
        print(printable(f"\nhint: {struck(hint)}"), file=sys.stderr)
    return exit_code


def _usage_error(error: Exception) -> int:
    """Print a usage error as ours are printed."""
    message, exit_code = error.format_message(), getattr(error, "exit_code", 2)  # type: ignore[attr-defined]
    if not message:  # the help was shown because nothing was asked for
        return exit_code
    context = getattr(error, "ctx", None)
    hint = None if context is None else f"`{context.command_path} --help` shows what it takes"
    return _tell(message[:1].lower() + message[1:].rstrip("."), hint, exit_code)


def main() -> NoReturn:
    """Entry point of the command `skyrl`."""
    # Imports make a million objects that stay, and rows of a part many that go: looking through them after each 700
    # took a second of a loop's start.
    gc.set_threshold(50_000)
    try:
        sys.exit(run())
    except Exception:
        told = struck(traceback.format_exc())
        if rank_errors.is_watched():
            rank_errors.leave(told, None, EXIT_FAILED, is_bug=True)
        else:
            print(printable(told), end="", file=sys.stderr)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":  # in processes that train together
    main()
