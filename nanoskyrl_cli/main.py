"""The command `skyrl`: one subcommand a stage, and the tools to look at what they wrote.

Nothing imported here, or by the modules of single commands, loads torch or transformers:
`skyrl --help` answers at once.
"""

import io
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from nanoskyrl.stages.core.code import OtherCode
from nanoskyrl.stages.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, NanoskyrlError, Notice
from nanoskyrl.stages.core.safe_text import printable, struck
from nanoskyrl.stages.learning import rank_errors
from nanoskyrl_cli import (
    advantage,
    compare,
    doctor,
    eval,
    export,
    grade,
    init,
    list as list_command,
    loop,
    plan,
    rollout,
    score,
    serve,
    show,
    sync,
    train,
    verify,
)
from nanoskyrl_cli.options import say, stdout_for_data

app = typer.Typer(
    name="skyrl",
    help="Agentic reinforcement learning of language models, one Parquet stage at a time.",
    epilog="First steps: skyrl rollout, score, advantage, train, sync; or all of it: skyrl loop --preset quickstart.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)

TRACEBACK = "SKYRL_TRACEBACK"
"""Set in the environment, errors keep their traceback: for those who write plug-ins."""
STAGES, LOOK, SETUP = "Stages", "Looking", "Setting up"
for panel, command, name in (
    (STAGES, rollout.rollout, "rollout"),
    (STAGES, score.score, "score"),
    (STAGES, advantage.advantage, "advantage"),
    (STAGES, train.train, "train"),
    (STAGES, sync.sync, "sync"),
    (STAGES, eval.evaluate, "eval"),
    (STAGES, loop.loop, "loop"),
    (STAGES, serve.serve, "serve"),
    (LOOK, show.show, "show"),
    (LOOK, compare.compare, "compare"),
    (LOOK, verify.verify, "verify"),
    (LOOK, grade.grade, "grade"),
    (LOOK, export.export, "export"),
    (SETUP, init.init, "init"),
    (SETUP, list_command.list_names, "list"),
    (SETUP, plan.plan, "plan"),
    (SETUP, doctor.doctor, "doctor"),
):
    app.command(name, rich_help_panel=panel)(stdout_for_data(command))


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("nanoskyrl"))
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it and end.")
    ] = False,
) -> None:
    """Agentic reinforcement learning of language models, one Parquet stage at a time."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors that a user can mend are printed, not raised."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a model may write what no terminal can show
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # so that `module:attribute` finds what lies here
    told, show = set(), warnings.showwarning

    def tell(message: Any, *place: Any) -> None:
        """Print what users are told; that outputs were made by other code, once for the same modules."""
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
        if code == EXIT_INTERRUPTED:  # what typer makes of Ctrl-C, without a word
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
