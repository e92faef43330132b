"""The shape of the repository: packages, layers, and pages that must agree with the code."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from running import ROOT

PACKAGES = {
    "nanoskyrl.stages": "stages",
    "nanoskyrl.envs": "envs",
    "nanoskyrl.algos": "algos",
    "nanoskyrl.eval": "eval",
}
ORDER = ("core", "models", "engines", "learning", "", "running", "looking")
"""Folders of stages/, each of which may import those before it; "" is the top of the folder: the stages themselves."""


def rank(module: str) -> int | None:
    """Return the place of a module in the order of layers; None for one below all but core."""
    top, _, rest = module.removeprefix("nanoskyrl.").partition(".")
    if top != "stages":
        return len(ORDER) if top == "nanoskyrl_cli" else None
    return ORDER.index(rest.rpartition(".")[0].partition(".")[0])


def may_import(module: str, imported: str) -> bool:
    """Say whether a module may import another."""
    ours, theirs = rank(module), rank(imported)
    if ours is not None:
        return ours > 0 if theirs is None else theirs <= ours
    if theirs is not None:
        return theirs == 0
    ours, theirs = module.split(".")[1], imported.split(".")[1]
    return ours == theirs or (ours, theirs) == ("eval", "envs")


def imports(path: Path) -> set[str]:
    """Return every module that a file may import, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def modules() -> dict[str, Path]:
    return {
        ".".join([name, *path.relative_to(ROOT / folder).with_suffix("").parts]): path
        for name, folder in {**PACKAGES, "nanoskyrl_cli": "nanoskyrl_cli"}.items()
        for path in (ROOT / folder).rglob("*.py")
        if path.stem != "__init__"
    }


def test_every_folder_of_stages_has_a_place_in_the_order():
    assert {path.parent.name for path in (ROOT / "stages").glob("*/__init__.py")} == set(ORDER) - {""}


@pytest.mark.parametrize("module", sorted(modules()))
def test_upper_layers_import_lower_ones_only(module):
    known = modules()
    assert [name for name in imports(known[module]) & set(known) if not may_import(module, name)] == []


@pytest.mark.parametrize("folder", ["envs", "eval"])
def test_environments_and_evaluations_know_neither_torch_nor_vllm_nor_transformers(folder):
    for path in (ROOT / folder).rglob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & {"torch", "vllm", "transformers"}, path


def test_a_class_name_has_one_meaning():
    found = [
        node.name
        for path in modules().values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [name for name, count in Counter(found).items() if count > 1] == []


def test_no_module_imports_vllm():
    assert [path for path in modules().values() if any(name.split(".")[0] == "vllm" for name in imports(path))] == []


def test_the_package_list_is_the_tree():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {**PACKAGES, "nanoskyrl_cli": "nanoskyrl_cli"}
    found = {
        ".".join([name, *path.parent.relative_to(ROOT / folder).parts])
        for name, folder in folders.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(settings["packages"]) == found
    assert settings["package-dir"] == folders
    assert {path.parent for path in modules().values()} <= {
        ROOT / folder / Path(*name.removeprefix(package).split("."))
        for package, folder in folders.items()
        for name in found
        if name == package or name.startswith(f"{package}.")
    }


def test_typings_link_to_the_folders():
    for name in PACKAGES.values():
        assert (ROOT / "typings" / "nanoskyrl" / name).resolve() == ROOT / name


def test_init_files_are_empty():
    folders = (*PACKAGES.values(), "nanoskyrl_cli")
    assert not [path for folder in folders for path in (ROOT / folder).rglob("__init__.py") if path.read_text()]


@pytest.mark.parametrize(
    "page", ["docs/trajectory.md", "docs/cli.md", "docs/algorithms.md", "docs/settings.md", "SECURITY.md"]
)
def test_generated_parts_of_a_page_are_those_of_the_code(page):
    shown = subprocess.run(
        [sys.executable, ROOT / "docs" / "render.py", "--check", page], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr


def test_what_contributing_names_is_there_and_little_is_to_be_touched():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| a")]
    assert len(rows) == 9
    for what, code, besides in rows:
        named = re.findall(r"`([\w/]+(?:/|\.\w+))`", code)
        assert all((ROOT / name).exists() for name in named if "/" in name), what
        assert all((ROOT / name).exists() for name in re.findall(r"`((?:tests|docs)/[\w/.]+)`", besides)), what
        touched = [name for name in named if name.endswith("/") or f"line in `{name}`" in code]
        assert len(touched) <= 2, what


def test_the_changelog_begins_with_the_version_that_is_built():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = [line for line in (ROOT / "docs" / "changelog.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].startswith(f"## {version}")


def test_no_registry_host_and_no_path_of_a_machine_is_named():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    words = ("pypi." + "org", "debian." + "org", "npmjs." + "org", "/work" + "/main", "." + "library/")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".sh", ".yml") or name in ("Makefile", ".ci/run"):
            assert not [word for word in words if word in path.read_text()], name
