"""Options that several commands share, and what they are made into."""

import contextlib
import functools
import json
import shlex
import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from nanoskyrl.stages.core.errors import EXIT_OK, EXIT_SHORT, SettingsError
from nanoskyrl.stages.core.safe_text import printable
from nanoskyrl.stages.core.storage import as_path

if TYPE_CHECKING:
    from nanoskyrl.stages.core.runs import Run
    from nanoskyrl.stages.running.interface import OpenRun
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
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON: of a stage output, numbers, manifest.")]
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
EngineOption = Annotated[
    str | None, typer.Option("--engine", help="hf, vllm, openai, scripted or your own.", show_default=False)
]
DataOption = Annotated[
    str | None,
    typer.Option("--data", help="JSONL or Parquet file of prompts and ground truths.", show_default=False),
]
ToolsOption = Annotated[
    str | None,
    typer.Option("--tools", help="Tools on offer: names or module:function, separated by commas.", show_default=False),
]
RewardOption = Annotated[
    list[str] | None,
    typer.Option(
        "--reward",
        help="`env`, `judge` or module:function (rewards.py here is `rewards:function`), with =weight if not 1; may be "
        "repeated.",
        show_default=False,
    ),
]
BatchOption = Annotated[int | None, typer.Option("--train-batch-size", help="Prompts in the step.", show_default=False)]
SamplesOption = Annotated[
    int | None, typer.Option("--n-samples-per-prompt", help="Attempts at each.", show_default=False)
]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", help="0 is greedy.", show_default=False)]
TurnsOption = Annotated[int | None, typer.Option("--max-turns", help="Turns of an attempt.", show_default=False)]
LengthOption = Annotated[
    int | None, typer.Option("--max-generate-length", help="Tokens of a turn.", show_default=False)
]
LrOption = Annotated[float | None, typer.Option("--lr", help="Learning rate.", show_default=False)]
LoraOption = Annotated[int | None, typer.Option("--lora-rank", help="0 trains the whole model.", show_default=False)]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would come out, and change nothing.")]
ExecutorOption = Annotated[
    str | None,
    typer.Option("--executor", help="local, or ray: workers on a cluster, as table `ray` says.", show_default=False),
]
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


def emit(text: str, file: IO[str] | None = None) -> None:
    """Print a line of data, or of what a person asked to see, on stdout, or into a file."""
    from nanoskyrl.stages.core.runs import is_main

    if is_main():
        print(printable(text), file=file or data_stream())


def path(name: str | None) -> Path | None:
    """Return a path or URL, or None where none was given."""

    return None if name is None else as_path(name)


def run_at(name: str | None) -> "Run":
    """Return a run by its directory; the default one where none was given."""
    from nanoskyrl.stages.core.runs import Run, default_run

    return Run(as_path(name or default_run()))


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
    preset: str | None = None,
    ahead: bool = False,
    lasts: bool = False,
) -> "OpenRun":
    """Return the run with its settings.

    Args:
        run: Its directory.
        config: A file of settings.
        assignments: Single settings.
        flags: Settings that came as flags; None is none.
        of_env: The same of the environment that is asked for, whichever it is.
        preset: Settings that ship with the package.
        ahead: Training stays up, and does not wait for `sync`.
        lasts: The run takes what is given as its own.
    """
    from nanoskyrl.stages.running.interface import open_run

    given = given_to(run, config, assignments, flags, of_env=of_env, preset=preset)
    return open_run(run, given, keep_up=ahead, ahead=ahead, lasts=lasts)


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
        if ".py:" in name:
            module = name.replace(".py:", ":").rpartition("/")[2]
            raise SettingsError(
                f"`{flag} {reward}` names a file, and a module is wanted",
                hint=f"Write `{module}`: modules are found in the current folder, and in those of `run.folders`",
            )
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
    lasts: bool = False,
) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Return the run and its merged settings, for what needs no session; arguments as in `open_session`."""
    from nanoskyrl.stages.running.run_settings import given_settings, settings_for

    given = given_settings(given_to(run, config, assignments, flags, preset=preset))
    found = run_at(run)
    return found, settings_for(found, given, told=not lasts)


def given_to(
    run: str | None,
    config: str | None,
    assignments: list[str] | None,
    flags: dict[str, dict[str, Any]] | None,
    *,
    of_env: dict[str, Any] | None = None,
    preset: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the settings that came with a command; arguments as in `open_session`."""
    from nanoskyrl.stages.core.config import merge
    from nanoskyrl.stages.running.run_settings import kept_settings

    kept = kept_settings(run_at(run))  # first: it says where modules are that others may name
    given = merge(*(settings for _, settings in sources_of(config, assignments, flags, preset)))
    wanted = {key: value for key, value in (of_env or {}).items() if value is not None}
    return merge(given, {_sole_environment(merge(kept, given), wanted): wanted}) if wanted else given


def _sole_environment(settings: dict[str, dict[str, Any]], wanted: dict[str, Any]) -> str:
    """Return the environment that settings are of which came as flags; raise SettingsError if there are several."""
    from nanoskyrl.stages.engines.rollout_config import RolloutConfig

    env = settings.get("rollout", {}).get("env", RolloutConfig().env)
    if not isinstance(env, str):
        name = next(iter(wanted))
        raise SettingsError(
            f"the run has several environments, and `{name}` is of one",
            hint=f"Set it in the table of one, such as `--set {next(iter(env))}.{name}=...`",
        )
    return env


def sources_of(
    config: str | None, assignments: list[str] | None, flags: dict[str, dict[str, Any]] | None, preset: str | None
) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """Return what a command was given, by where it comes from; later ones win."""
    from nanoskyrl.stages.core.config import merge, parse_set, read_file
    from nanoskyrl.stages.looking.catalogue import preset_settings

    flagged = {
        table: {key: value for key, value in keys.items() if value is not None} for table, keys in (flags or {}).items()
    }
    return [
        (f"preset {preset}", preset_settings(preset) if preset else {}),
        (str(config), read_file(as_path(config)) if config else {}),
        ("flag", merge(*(parse_set(assignment) for assignment in assignments or ()), flagged)),
    ]


def say(text: str) -> None:
    """Print a message to people: on stderr, for stdout carries data."""
    emit(text, sys.stderr)


def finish(outcome: "StageResult", session: "Session", made: str | None, as_json: bool) -> int:
    """Say what was done and what to type next, or print the manifest; return 3 if rows fell short.

    Args:
        outcome: What a stage left.
        session: Of the run.
        made: The stage, if the next one is to be named.
        as_json: Print the manifest.
    """
    from nanoskyrl.stages.core.runs import DEFAULT_RUN
    from nanoskyrl.stages.looking.headlines import headline

    if as_json:
        from nanoskyrl.stages.looking.numbers import numbers_of

        numbers = numbers_of(outcome.manifest, outcome.output)
        print_json({"output": str(outcome.output), "numbers": numbers, "manifest": asdict(outcome.manifest)})
    say(f"{'Up to date: ' if outcome.up_to_date else ''}{headline(outcome.manifest, outcome.output)}")
    if made and outcome.output.resolve().is_relative_to(session.run.root.resolve()):
        place = "" if str(session.run.root) == DEFAULT_RUN else f" --run {shlex.quote(str(session.run.root))}"
        stages = [*session.stages.values(), *session.stages.values()]
        following = stages[list(session.stages).index(made) + 1].command
        say(f"Next: skyrl {following}{place}")
    short = outcome.manifest.fell_short
    if short:
        place = shlex.quote(str(outcome.output))
        say(f"{short} of {outcome.manifest.rows_out} rows fell short: see `skyrl show {place}`")
    return EXIT_SHORT if short else EXIT_OK


def make(session: "Session", stage: str, as_json: bool, **named: Any) -> int:
    """Let a stage work on what is named, and say what it did; return the exit code."""
    from nanoskyrl_cli.progress import working

    with working(stage):
        outcome = session.make(stage, **named)
    return finish(outcome, session, stage, as_json)


def print_json(value: Any) -> None:
    """Print data on stdout."""
    emit(json.dumps(value, indent=2))


def print_data(plain: Any, lines: Iterable[str], as_json: bool) -> None:
    """Print data on stdout: as JSON, or line by line for people."""
    if as_json:
        print_json(plain)
        return
    for line in lines:
        emit(line)


def say_made(text: str, output: Path, as_json: bool, numbers: dict[str, Any] | None = None) -> None:
    """Say what a command made that is no stage; or print as JSON, too, where it lies, and numbers of it."""
    if as_json:
        print_json({"output": str(output), "numbers": numbers or {}})
    say(text)


def print_numbers(numbers: dict[str, Any], as_json: bool) -> None:
    """Print named numbers, one a line, or as JSON."""
    width = max(map(len, numbers), default=0)
    texts = {
        name: str(value) if isinstance(value, str | int | None) else f"{value:.6g}" for name, value in numbers.items()
    }
    print_data(numbers, (f"{name:<{width}}  {text}" for name, text in texts.items()), as_json)
