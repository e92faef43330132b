"""A run.toml with every setting, what it means, and what it is if left alone."""

import dataclasses
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.config import Settings, build, config_class, field_docs, tables
from nanoskyrl.stages.core.errors import ConflictError
from nanoskyrl.stages.core.registry import BENCHES
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.storage import make_directory, write_whole

HIDDEN = {"rollout": ("step", "seed", "tasks", "split")}
"""Settings that the run sets, step by step."""
ORDER = (
    "run",
    "rollout",
    "score",
    "judge",
    "advantage",
    "train",
    "critic",
    "off_policy",
    "sync",
    "loop",
    "eval",
    "code",
)


def write_settings(run: Run, settings: Settings, *, force: bool = False) -> Path:
    """Write the run's settings file and return its path.

    Raises:
        ConflictError: there is one already.
    """
    path = run.settings_file
    if path.exists() and not force:
        raise ConflictError(
            f"`{path}` is there already", hint="Name another run with `--run`, or replace it with `--force`"
        )
    make_directory(run.root)
    write_whole(path, settings_text(settings).encode())
    return path


def settings_text(settings: Settings) -> str:
    """Return the file's text: values that were given stand, defaults are commented out."""
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment("Settings of a nanoskyrl run. A line that is commented out shows the default."))
    for table in dict.fromkeys([*ORDER, *(name for name in tables() if name not in BENCHES), *settings]):
        found = config_class(table)
        if found is None:
            continue
        values = settings.get(table, {})
        config: Any = build(found, values, table)
        docs = _all_docs(found)
        section = tomlkit.table()
        for field in dataclasses.fields(found):
            if field.name in HIDDEN.get(table, ()):
                continue
            if text := docs.get(field.name):
                section.add(tomlkit.comment(text))
            if field.name in values:
                section.add(field.name, values[field.name])
            elif getattr(config, field.name) is None:
                section.add(tomlkit.comment(f"{field.name} is unset"))
            else:
                section.add(tomlkit.comment(f"{field.name} = {_shown(getattr(config, field.name))}"))
        document.add(tomlkit.nl())
        document.add(table, section)
    return tomlkit.dumps(document)


def _all_docs(config: type) -> dict[str, str]:
    """Return the texts of a dataclass's fields, those it inherits included."""
    docs: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= field_docs(base)
    return docs


def _shown(value: Any) -> str:
    """Return a value as it is written in TOML, on one line."""
    import tomlkit

    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update(value)
        return table.as_string()
    return tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string()
