"""The code that a run names and that is not ours: modules, commands, and what installed packages offer.

It is found without importing any of it, so that somebody can be asked before it runs.
"""

from collections.abc import Iterable

from nanoskyrl.stages.core.checked import path_kinds
from nanoskyrl.stages.core.code import source_of
from nanoskyrl.stages.core.config import CONFIGS, Settings, load_attribute
from nanoskyrl.stages.core.manifest import Manifest
from nanoskyrl.stages.core.registry import BUILTIN, entry_points
from nanoskyrl.stages.running.whole_paths import MODULE_ATTRIBUTE, texts_in


def named_code(manifests: Iterable[Manifest], kept: Settings) -> list[str]:
    """Return what is named in the settings of a run or of its outputs, each once, with the file where one is found."""
    offered = {name: target for kind in BUILTIN for name, target in entry_points(kind).items()}
    found: dict[str, None] = {}
    for settings in (kept, *(manifest.settings for manifest in manifests)):
        for text in texts_in(settings):
            target = offered.get(text, text)
            if MODULE_ATTRIBUTE.fullmatch(target) and not target.startswith("nanoskyrl."):
                found[_with_file(target)] = None
    for table, keys in kept.items():
        for key, kind in _kinds(table).items():
            if kind in ("command", "module") and keys.get(key):
                values = keys[key] if isinstance(keys[key], list | tuple) else [keys[key]]
                found |= dict.fromkeys(f"{table}.{key}: {value}" for value in values)
    return sorted(found)


def _with_file(target: str) -> str:
    file = source_of(target.partition(":")[0])
    return f"{target} ({file or 'its file is not found from here'})"


def _kinds(table: str) -> dict[str, str]:
    """Return which settings of one of our tables name commands or modules."""
    if table in CONFIGS:
        return path_kinds(load_attribute(CONFIGS[table], what="settings"))
    for kind, plugins in BUILTIN.items():
        if table in plugins:
            config = getattr(load_attribute(plugins[table], what=kind), "Config", None)
            return path_kinds(config) if config is not None else {}
    return {}
