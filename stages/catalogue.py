"""Everything that has a name: plug-ins, tools, presets."""

from pathlib import Path

from nanoskyrl.stages.errors import SettingsError, did_you_mean
from nanoskyrl.stages.registry import BUILTIN, names


def catalogue(kind: str | None = None) -> dict[str, list[str]]:
    """Return the names of every kind, or of one.

    Raises:
        SettingsError: there is no such kind.
    """
    from nanoskyrl.envs.problems import FAMILIES, GENERATORS
    from nanoskyrl.envs.tools import TOOLS

    found = {name: names(name) for name in BUILTIN}
    found["tool"] = sorted(TOOLS)
    found["family"] = [*FAMILIES, *GENERATORS]
    found["preset"] = sorted(path.stem for path in (Path(__file__).parent / "presets").glob("*.toml"))
    if kind is None:
        return found
    if kind not in found:
        raise SettingsError(
            f"there is no kind `{kind}`", hint=did_you_mean(kind, found) or f"Choose one of {', '.join(found)}"
        )
    return {kind: found[kind]}
