"""Options that several commands share, and what they are made into."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from nanoskyrl.stages.manifest import Manifest
    from nanoskyrl.stages.session import Session

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
JsonOption = Annotated[bool, typer.Option("--json", help="Print the manifest as JSON on stdout.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of the run.", show_default=False)]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", help="`starter`, a model directory, or a hub id.", show_default=False)
]
SourceArgument = Annotated[
    str | None,
    typer.Argument(help="Input directory; default: the newest that is ready in the run.", show_default=False),
]


def path(name: str | None) -> Path | None:
    """Return a path or URL, or None where none was given."""
    from nanoskyrl.stages.storage import as_path

    return None if name is None else as_path(name)


def open_session(
    run: str | None,
    config: str | None = None,
    assignments: list[str] | None = None,
    flags: dict[str, dict[str, Any]] | None = None,
    *,
    preset: str | None = None,
) -> "Session":
    """Return the run and its settings: the run's own, preset, file, `--set`, then flags; later ones win."""
    from nanoskyrl.stages.session import Session

    found, settings = settings_of(run, config, assignments, flags, preset=preset)
    return Session(found, settings)


def settings_of(
    run: str | None,
    config: str | None = None,
    assignments: list[str] | None = None,
    flags: dict[str, dict[str, Any]] | None = None,
    *,
    preset: str | None = None,
) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Return the run and its merged settings."""
    from nanoskyrl.stages.config import parse_set, preset_settings, read_file
    from nanoskyrl.stages.runs import Run, default_run
    from nanoskyrl.stages.session import settings_for
    from nanoskyrl.stages.storage import as_path

    found = Run(as_path(run or default_run()))
    given = {
        table: {key: value for key, value in keys.items() if value is not None} for table, keys in (flags or {}).items()
    }
    sources = [
        preset_settings(preset) if preset else {},
        read_file(as_path(config)) if config else {},
        *(parse_set(assignment) for assignment in assignments or ()),
        given,
    ]
    return found, settings_for(found, *sources)


def say(text: str) -> None:
    """Print a message to people: on stderr, for stdout carries data."""
    print(text, file=sys.stderr)


def finish(manifest: "Manifest", output: Path, line: str, following: str | None, as_json: bool) -> None:
    """Say what was done and what to type next, or print the manifest; end with code 3 if rows fell short."""
    if as_json:
        print(manifest.to_bytes().decode(), end="")
    say(line)
    if following:
        say(f"Next: {following}")


def print_json(value: Any) -> None:
    """Print data on stdout."""
    print(json.dumps(value, indent=2))
