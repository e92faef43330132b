"""Which code makes an output: the modules behind a stage, by their syntax trees, so that a comment changes nothing.

A stage's code is its own module, the built-in plug-ins that its settings name, and all that
these import from the package, inside functions too. A module that is only named in a text, as
in `"nanoskyrl.envs.graders.grade_math:equal"`, counts as imported; the tables of names in core do
not, for settings choose from them. Code of the user's is a setting: see `registry.plugin_digests`.
"""

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.digests import digest_json, digest_text
from nanoskyrl.stages.core.errors import ConflictError
from nanoskyrl.stages.core.pipeline import OURS
from nanoskyrl.stages.core.registry import BUILTIN, package_version

SOURCES = Path(__file__).parents[2]
"""Folder of the package's folders, in a checkout as where it is installed."""
IN_TEXT = re.compile(r"(nanoskyrl(?:\.\w+)+)(?::\w+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeConfig:
    """What happens where an output was made by other code than there is now."""

    strict: bool = False
    """Refuse it. False: a finished output stays and the difference is reported; an unfinished one is begun again."""


class OtherCode(ConflictError, UserWarning):
    """An output was made by other code than there is now: a warning, or under `code.strict` an error."""

    def __init__(self, place: Path, modules: list[str], does: str) -> None:
        """Say which modules differ.

        Args:
            place: The output.
            modules: Those that changed since, or came or went.
            does: What follows, as `it stays`.
        """
        rest = len(modules) - 1
        more = f" and {rest} more module{'s' * (rest > 1)}" * (rest > 0)
        super().__init__(
            f"`{place}` was made by other code, {does}: `{modules[0]}`{more} changed since",
            hint="Take `code.strict` out of the settings, or make it again with `--force`",
        )
        self.says = (does, *modules)
        """The same of all outputs that differ in the same modules: enough to be reported once."""


def code_of(stage: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a manifest says of the code behind a stage under these settings.

    Returns:
        version of the package; digest of all modules; modules, by name the head of the digest of each.
    """
    begins = f"nanoskyrl.stages.{stage}" if stage in OURS else "nanoskyrl.stages.core.own_stage"
    modules = imported([begins, *_plugins(settings)], functools.partial(_source_in, SOURCES))
    return {
        "version": package_version("nanoskyrl") or "unknown",
        "digest": digest_json(modules),
        "modules": {name: digest[:12] for name, digest in modules.items()},
    }


def plugin_digests(*names: str) -> dict[str, dict[str, str]]:
    """Return the digests of the code of those plug-ins that are the user's, for a manifest; {} if there are none."""
    found = {}
    for name in names:
        module = name.partition(":")[0]
        if ":" in name and (file := getattr(importlib.import_module(module), "__file__", None)):
            found[name] = digest_json(imported([module], functools.partial(_source_beside, Path(file), module)))
    return {"plugins": found} if found else {}


def changed_modules(now: Mapping[str, Any], then: Any) -> list[str]:
    """Return the modules in which two records of code differ, none if they are one; `then` may be no record at all."""
    ours, theirs = now["modules"], then.get("modules") if isinstance(then, Mapping) else None
    if not isinstance(theirs, Mapping):  # schema 1 recorded the package as a whole
        return ["nanoskyrl"]
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))


def _plugins(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the modules of built-in plug-ins that settings name, by a table or under a key such as `engine`."""
    tables = [table for table in settings.values() if isinstance(table, Mapping)]
    named = {kind: {table[kind] for table in tables if isinstance(table.get(kind), str)} for kind in BUILTIN}
    # Which one `auto` is shows when it runs.
    names = {*settings, *(n for kind, of in named.items() for n in (BUILTIN[kind] if "auto" in of else of))}
    for plugins in BUILTIN.values():
        yield from (plugins[name].partition(":")[0] for name in names if name in plugins)


@functools.cache
def _source_in(sources: Path, module: str) -> Path | None:
    """Return the file of a module of the package in a folder of sources; None for others. Each is looked for once."""
    package, _, rest = module.partition(".")
    path = sources.joinpath(*rest.split(".")).with_suffix(".py")
    return path if package == "nanoskyrl" and rest and path.is_file() else None


def _source_beside(file: Path, plugin: str, module: str) -> Path | None:
    """Return the file of a module in the folder of a plug-in's file, or below it; None for others."""
    top = file.parents[plugin.count(".") + (file.stem == "__init__")]
    place = top.joinpath(*module.split("."))
    found = next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)
    return found if found is not None and found.is_relative_to(file.parent) else None


def imported(modules: Iterable[str], source: Callable[[str], Path | None]) -> dict[str, str]:
    """Return the digest of each of these modules and of all that they import, by name.

    Args:
        modules: Where to begin.
        source: Returns a module's file, or None where it is not looked into.
    """
    found: dict[str, str] = {}
    left = list(modules)
    while left:
        module = left.pop()
        if module not in found and (path := source(module)) is not None:
            found[module], names = _read(path)
            package = module if path.stem == "__init__" else module.rpartition(".")[0]
            left += [importlib.util.resolve_name(name, package) if package else name.lstrip(".") for name in names]
    return dict(sorted(found.items()))


@functools.cache
def _read(path: Path) -> tuple[str, frozenset[str]]:
    """Return the digest of a file's syntax tree, and the names that it imports; a process reads each file once."""
    written: list[str] = []
    names: set[str] = set()
    texts = path.parent != SOURCES / "stages" / "core"
    nodes: list[Any] = [ast.parse(path.read_bytes())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            written.append(str(len(node)))
            nodes += node
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            nodes.append(node.orelse)  # the rest is for type checkers and never runs
        elif isinstance(node, ast.AST):
            written.append(type(node).__name__)
            names.update(_named(node, texts=texts))
            nodes += [getattr(node, name, None) for name in node._fields if name != "ctx"]
        else:
            written.append(repr(node))
    return digest_text("\n".join(written)), frozenset(names)


def _named(node: ast.AST, *, texts: bool) -> Iterator[str]:
    """Yield the modules that a node imports, or names in a text."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        yield from (base, *(f"{base}{'' if base.endswith('.') else '.'}{alias.name}" for alias in node.names))
    elif texts and isinstance(node, ast.Constant) and (match := IN_TEXT.fullmatch(str(node.value))):
        yield match[1]


def source_of(module: str, folders: Sequence[str] = ()) -> Path | None:
    """Return the file that a module would be imported from, or is found in these folders; none is imported for that."""
    path: Sequence[str] | None = [*sys.path, *folders]
    spec = None
    for place in range(1, module.count(".") + 2):
        name = ".".join(module.split(".")[:place])
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


def code_now(plugin: str, folders: Sequence[str] = ()) -> str | None:
    """Return the digest that `plugin_digests` would record of a plug-in of the user's; None: its file is not found.

    Args:
        plugin: `module:attribute`.
        folders: Where it is looked for besides.
    """
    module = plugin.partition(":")[0]
    file = source_of(module, folders)
    if file is None or file.suffix != ".py":
        return None
    return digest_json(imported([module], functools.partial(_source_beside, file, module)))
