"""Options that several commands share, and what they are made into."""

import contextlib
import functools
import json
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from nanoskyrl.stages.core.errors import EXIT_OK, EXIT_SHORT, SettingsError
from nanoskyrl.stages.core.safe_text import printable
from nanoskyrl.stages.core.storage import as_path

if TYPE_CHECKING:
    from nanoskyrl.stages.running.session import Session, StageResult

RunOption = Annotated[
    str | None, typer.Option("--run", help="Run directory; default $SKYRL_RUN, then runs/default.", show_default=False)
]
ConfigOption = Annotated[
    str | None, typer.Option("--config", help="TOML or YAML file of settings.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="One setting, as table.key=value; may be repeated.", show_default=False),
]
OutOption = Annotated[
    str | None, typer.Option("--out", help="Output directory; default: its place in the run.", show_default=False)
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an output made under other settings.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout: of a stage its manifest.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of the run.", show_default=False)]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", help="`starter`, a model directory, or a hub id.", show_default=False)
]
EnvOption = Annotated[
    str | None,
    typer.Option(
        "--env",
        help="Environment: text_math, tool_use, ... (see skyrl list), or several by weight: text_math=1,tool_use=2.",
        show_default=False,
    ),
]
AlgoOption = Annotated[
    str | None, typer.Option("--algo", help="ppo, grpo, sapo, gspo, dapo, ...: see skyrl list.", show_default=False)
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would come out, and change nothing.")]
SourceArgument = Annotated[
    str | None,
    typer.Argument(help="Input directory; default: the newest that is ready in the run.", show_default=False),
]


_DATA: ContextVar[IO[str] | None] = ContextVar("data", default=None)
"""Where `emit` prints while a command runs: the process's stdout."""


def stdout_for_data(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command during which `print` writes to stderr: plug-ins may print, and must not spoil the data."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _DATA.set(sys.stdout)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                return command(*args, **kwargs)
        finally:
            _DATA.reset(token)

    return run


def data_stream() -> IO[str]:
    """Return the stream that carries only what was asked for."""
    return _DATA.get() or sys.stdout


def emit(text: str) -> None:
    """Print a line of data, or of what a person asked to see, on stdout."""
    from nanoskyrl.stages.core.runs import is_main

    if is_main():
        print(printable(text), file=data_stream())


def path(name: str | None) -> Path | None:
    """Return a path or URL, or None where none was given."""

    return None if name is None else as_path(name)


def policy_path(name: str | None) -> Path | None:
    """Return the directory of a policy, or None where none was given.

    Raises:
        InputError: nothing is there, or it is no policy.
    """
    from nanoskyrl.stages.models.policy import resolve_policy

    return None if name is None else resolve_policy(name)


def open_session(
    run: str | None,
    config: str | None = None,
    assignments: list[str] | None = None,
    flags: dict[str, dict[str, Any]] | None = None,
    *,
    of_env: dict[str, Any] | None = None,
    ahead: bool = False,
) -> "Session":
    """Return the run with its settings.

    Args:
        run: Its directory.
        config: A file of settings.
        assignments: Single settings.
        flags: Settings that came as flags.
        of_env: What is given of it goes to the table of the environment that is asked for.
        ahead: Training stays up, and does not wait for `sync`.
    """
    from nanoskyrl.stages.engines.rollout_config import RolloutConfig
    from nanoskyrl.stages.running.session import Session

    found, settings, given = settings_of(run, config, assignments, flags)
    wanted = {key: value for key, value in (of_env or {}).items() if value is not None}
    if wanted:
        env = settings.get("rollout", {}).get("env", RolloutConfig().env)
        if not isinstance(env, str):
            raise SettingsError(
                f"the run has several environments, and `{next(iter(wanted))}` is of one",
                hint=f"Set it in the table of one, such as `--set {next(iter(env))}.{next(iter(wanted))}=...`",
            )
        for tables in (settings, given):
            tables.setdefault(env, {}).update(wanted)
    return Session(found, settings, given=given, keep_up=ahead, ahead=ahead)


def environments(env: str | None) -> str | dict[str, float] | None:
    """Return what `--env` names: one environment, or the weight of each of several."""
    if env is None or not ("=" in env or "," in env):
        return env
    return weights([part.strip() for part in env.split(",") if part.strip()], flag="--env")


def weights(rewards: list[str], flag: str = "--reward") -> dict[str, float]:
    """Return the weight of each name in `env`, `module:function=0.5`, ...; 1 where there is none."""

    found = {}
    for reward in rewards:
        name, _, weight = reward.partition("=")
        try:
            found[name] = float(weight or 1)
        except ValueError as error:
            raise SettingsError(
                f"`{flag} {reward}` has no number after the sign", hint=f"Write, for instance, {name}=0.5"
            ) from error
    return found


def settings_of(
    run: str | None,
    config: str | None = None,
    assignments: list[str] | None = None,
    flags: dict[str, dict[str, Any]] | None = None,
    *,
    preset: str | None = None,
) -> tuple[Any, dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the run, its merged settings, and those of them that were given now."""
    from nanoskyrl.stages.core.config import merge, parse_set, read_file
    from nanoskyrl.stages.core.runs import Run, default_run
    from nanoskyrl.stages.looking.catalogue import preset_settings
    from nanoskyrl.stages.running.run_settings import settings_for

    found = Run(as_path(run or default_run()))
    flagged = {
        table: {key: value for key, value in keys.items() if value is not None} for table, keys in (flags or {}).items()
    }
    sources = [
        preset_settings(preset) if preset else {},
        read_file(as_path(config)) if config else {},
        *(parse_set(assignment) for assignment in assignments or ()),
        flagged,
    ]
    given = merge(*sources)
    return found, settings_for(found, given), given


def say(text: str) -> None:
    """Print a message to people: on stderr, for stdout carries data."""
    from nanoskyrl.stages.core.runs import is_main

    if is_main():
        print(printable(text), file=sys.stderr)


def finish(outcome: "StageResult", session: "Session", following: str | None, as_json: bool) -> int:
    """Say what was done and what to type next, or print the manifest; return 3 if rows fell short."""
    from nanoskyrl.stages.core.runs import DEFAULT_RUN
    from nanoskyrl.stages.looking.show import headline

    if as_json:
        emit(outcome.manifest.to_bytes().decode().removesuffix("\n"))
    say(f"{'Up to date: ' if outcome.up_to_date else ''}{headline(outcome.manifest, outcome.output)}")
    if following and outcome.output.resolve().is_relative_to(session.run.root.resolve()):
        place = "" if str(session.run.root) == DEFAULT_RUN else f" --run {session.run.root}"
        say(f"Next: skyrl {following}{place}")
    short = outcome.manifest.fell_short
    if short:
        say(f"{short} of {outcome.manifest.rows_out} rows fell short: see `skyrl show {outcome.output}`")
    return EXIT_SHORT if short else EXIT_OK


def print_json(value: Any) -> None:
    """Print data on stdout."""
    emit(json.dumps(value, indent=2))


def print_numbers(numbers: dict[str, Any], as_json: bool) -> None:
    """Print named numbers, one a line, or as JSON."""
    if as_json:
        print_json(numbers)
        return
    width = max(map(len, numbers))
    for name, value in numbers.items():
        emit(f"{name:<{width}}  {value if isinstance(value, str | int | None) else f'{value:.6g}'}")
