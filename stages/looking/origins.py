"""The settings that hold in a run, and where each comes from."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from nanoskyrl.stages.core.config import Settings, build, config_class, merge
from nanoskyrl.stages.running.run_settings import tables_in_use

DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingOrigin:
    """One setting that holds."""

    name: str
    """As `table.key`."""
    value: Any
    """None: unset."""
    source: str
    """default, run.toml, a preset, a file, or flag."""


def origins(sources: Sequence[tuple[str, Settings]]) -> list[SettingOrigin]:
    """Return every setting of the tables that are in use, or that a source names.

    Args:
        sources: Tables by where they come from; later ones win.

    Raises:
        SettingsError: a value is outside its type.
    """
    settings = merge(*(tables for _, tables in sources))
    found = []
    for table in dict.fromkeys([*tables_in_use(settings), *settings]):
        config = config_class(table)
        if config is None:
            continue
        made: Any = build(config, settings.get(table, {}), table)
        for field in (field for field in fields(config) if "of_run" not in field.metadata):
            last = (name for name, tables in reversed(sources) if field.name in tables.get(table, {}))
            source = next(last, DEFAULT)
            found.append(SettingOrigin(name=f"{table}.{field.name}", value=getattr(made, field.name), source=source))
    return found
