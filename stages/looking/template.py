"""A run.toml with every setting, what it means, and what it is if left alone."""

import dataclasses
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.checked import field_docs, hints_of, range_text
from nanoskyrl.stages.core.config import Settings, build, config_class, tables
from nanoskyrl.stages.core.errors import ConflictError
from nanoskyrl.stages.core.registry import BENCHES
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.storage import make_directory, write_whole
from nanoskyrl.stages.running.run_settings import with_folders

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
    write_whole(path, settings_text(with_folders(settings)).encode())
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
        docs = field_docs(found)
        section = tomlkit.table()
        for field in dataclasses.fields(found):
            if "of_run" in field.metadata or ("once" in field.metadata and field.name not in values):
                continue
            wanted = range_text(hints_of(found)[field.name])
            if text := " ".join(text for text in (docs.get(field.name), wanted and f"Range: {wanted}.") if text):
                section.add(tomlkit.comment(text))
            if field.name in values:
                section.add(field.name, values[field.name])
            elif getattr(config, field.name) is None:
                section.add(tomlkit.comment(f"{field.name} is unset"))
            else:
                section.add(tomlkit.comment(f"{field.name} = {toml_text(getattr(config, field.name))}"))
        document.add(tomlkit.nl())
        document.add(table, section)
    return tomlkit.dumps(document)


def toml_text(value: Any) -> str:
    """Return a value as it is written in TOML, on one line."""
    import tomlkit

    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update(value)
        return table.as_string()
    return tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string()
