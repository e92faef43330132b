"""Settings that mean the same from every folder: whole paths, and the folders that modules are imported from.

What a field names is in its metadata (`core/checked.py`): a file, a name that may be a file, a command, arguments.
`~` and `$HOME` stand for the home folder. An address (`s3://...`, `hub:...`) stays as it is.
"""

import importlib.util
import os
import re
import shlex
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoskyrl.envs.datasets import HUB
from nanoskyrl.stages.core.checked import path_kinds
from nanoskyrl.stages.core.config import Settings, config_class
from nanoskyrl.stages.core.storage import expanded

MODULE_ATTRIBUTE = re.compile(r"([A-Za-z_]\w*)(\.\w+)*:[A-Za-z_][\w.]*")
FOLDERS_OF_PYTHON = tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def whole_paths(settings: Mapping[str, Mapping[str, Any]], *folders: Path) -> Settings:
    """Return the settings with every path whole.

    Args:
        settings: Tables.
        folders: Where a relative path is looked for, in this order; one that is nowhere counts from the last.
    """
    found: Settings = {table: dict(keys) for table, keys in settings.items()}
    for keys, key, kind in _paths_in(found):
        keys[key] = _whole(keys[key], kind, folders)
    return found


def missing_paths(settings: Mapping[str, Mapping[str, Any]], text: str) -> Iterator[tuple[str, str]]:
    """Yield the settings, as `table.key` and path, whose path is not there and is named in a text."""
    for table, keys in settings.items():
        for inner, key, _ in _paths_in({table: dict(keys)}):
            for value in texts_in(inner[key]):
                for word in value.split(" "):
                    if word.startswith("/") and word in text and not Path(word).exists():
                        yield f"{table}.{key}", word


def module_folders(settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the folders that hold the modules which settings name, but for those of Python and of this package."""
    named = {match[1] for text in texts_in(settings) if (match := MODULE_ATTRIBUTE.fullmatch(text))}
    named |= {str(keys[key]).replace("-", "_") for keys, key, kind in _paths_in(settings) if kind == "module"}
    return sorted({str(folder) for name in named if (folder := _folder_of(name.partition(".")[0])) is not None})


def _paths_in(settings: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Any, str, str]]:
    """Yield table, key and kind of each setting that names a path or a module."""
    for table, keys in settings.items():
        config = config_class(table)
        for key, kind in path_kinds(config).items() if config else ():
            if keys.get(key):
                yield keys, key, kind


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a value, names of keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for part in pair for text in texts_in(part))
    elif isinstance(value, Sequence):
        yield from (text for part in value for text in texts_in(part))


def _whole(value: Any, kind: str, folders: Sequence[Path]) -> Any:
    if isinstance(value, Mapping):
        return {key: _whole(inner, kind, folders) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(inner, kind, folders) for inner in value]
    if not isinstance(value, str) or kind == "module":
        return value
    if kind == "file":
        return _place(value, folders, always=True)
    if kind == "name":  # `starter` is a policy, whatever folder has that name
        return value if value == "starter" else _place(value, folders, always=value.startswith((".", "~")))
    if kind == "arguments" or " " not in value:
        return _word(value, folders)
    split = _split(value)
    words = [_word(word, folders) for word in split]
    return value if words == split else shlex.join(words)


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quote that does not end; whoever runs it says so
        return [command]


def _word(word: str, folders: Sequence[Path]) -> str:
    """Return a word of a command, whole if it is a file: `server.py`, `./server`, `--template=chat.jinja`."""
    option, sign, value = word.partition("=") if word.startswith("-") else ("", "", word)
    is_path = "/" in value or "." in value
    return f"{option}{sign}{_place(value, folders, always=False)}" if is_path else word


def _place(text: str, folders: Sequence[Path], *, always: bool) -> str:
    """Return the whole path of a text; where nothing is there and not `always`, the text."""
    if "://" in text or text.startswith(HUB):
        return text
    path = Path(expanded(text))
    if path.is_absolute():
        return str(path)
    found = next((folder / path for folder in folders if (folder / path).exists()), None)
    if found is None and not always:
        return text
    return os.path.abspath(found or folders[-1] / path)


def _folder_of(module: str) -> Path | None:
    """Return the folder that a module is imported from; None if it is Python's, ours, or not there."""
    try:
        spec = None if module == "nanoskyrl" else importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    inside = next(iter(spec.submodule_search_locations or ()), None) if spec else None
    place = inside or (spec.origin if spec else None)
    folder = Path(os.path.abspath(place)).parent if place else None
    return None if folder is None or any(folder.is_relative_to(one) for one in FOLDERS_OF_PYTHON) else folder
