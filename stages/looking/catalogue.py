"""Everything that has a name: plug-ins, tools, presets."""

from pathlib import Path

from nanoskyrl.stages.core.config import Settings, read_file
from nanoskyrl.stages.core.errors import SettingsError, did_you_mean
from nanoskyrl.stages.core.registry import BUILTIN, names

PRESETS = Path(__file__).parent / "presets"


def catalogue(kind: str | None = None) -> dict[str, list[str]]:
    """Return the names of every kind, or of one.

    Raises:
        SettingsError: there is no such kind.
    """
    from nanoskyrl.envs.tools import TOOLS
    from nanoskyrl.envs.worlds.text_math.problems import FAMILIES, GENERATORS

    found = {name: names(name) for name in BUILTIN}
    found["tool"] = sorted(TOOLS)
    found["family"] = [*FAMILIES, *GENERATORS]
    found["preset"] = preset_names()
    if kind is None:
        return found
    if kind not in found:
        raise SettingsError(
            f"there is no kind `{kind}`", hint=did_you_mean(kind, found) or f"Choose one of {', '.join(found)}"
        )
    return {kind: found[kind]}


def preset_names() -> list[str]:
    """Return the names of the presets that ship with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset_settings(name: str) -> Settings:
    """Return the tables of a preset that ships with the package.

    Raises:
        SettingsError: there is none of this name.
    """
    known = preset_names()
    if name not in known:
        raise SettingsError(
            f"unknown preset `{name}`", hint=did_you_mean(name, known) or f"Choose one of {', '.join(known)}"
        )
    return read_file(PRESETS / f"{name}.toml")
