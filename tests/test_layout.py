"""The shape of the repository: packages, layers, and pages that must agree with the code."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from running import ROOT

PACKAGES = {
    "nanoskyrl.stages": "stages",
    "nanoskyrl.envs": "envs",
    "nanoskyrl.algos": "algos",
    "nanoskyrl.eval": "eval",
}
CORE = {"errors", "digests", "storage", "trajectory", "shards", "manifest", "config", "registry", "metrics", "runs"}
PLUMBING = {
    "rendering", "engines", "hf_engine", "scripted_engine", "kv_cache", "turns", "policy", "batching", "logprobs",
    "learner", "train_config", "critic", "objective", "episodes", "passes", "recipe", "update", "concurrent_turns",
    "gpus", "vllm_config", "vllm_client", "vllm_memory", "vllm_process", "vllm_tokens", "vllm_worker", "vllm_weights",
    "vllm_proof", "vllm_servers", "vllm_engine", "packing", "parallel", "optim", "adapters", "checkpointing", "trained",
    "throughput", "openai_engine", "chat_wire", "sources", "vocabulary", "marks", "rank_errors", "device",
}  # fmt: skip
STAGES = {"rollout", "score", "advantage", "advantage_config", "kl_in_reward", "train", "sync", "eval"}
ABOVE = {
    "session",
    "follow",
    "overlap",
    "unsynced",
    "stopping",
    "trainer_process",
    "placement",
    "trackers",
    "loop",
    "serve",
    "starter",
    "show",
    "verify",
    "plan",
    "footprint",
    "doctor",
    "catalogue",
    "template",
    "curve",
    "compare",
    "preview",
    "eval_report",
    "grade",
}


def level(module: str) -> int:
    """Return the layer of a module: upper ones may import lower ones, and their own."""
    package, _, name = module.rpartition(".")
    if module.startswith("nanoskyrl_cli"):
        return 4
    if package == "nanoskyrl.stages":
        return 0 if name in CORE else 1 if name in PLUMBING else 2 if name in STAGES else 3
    return 1


def imports(path: Path) -> set[str]:
    """Return every nanoskyrl module that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module in PACKAGES}
    return found


def modules() -> dict[str, Path]:
    folders = {**PACKAGES, "nanoskyrl_cli": "nanoskyrl_cli"}
    return {
        f"{name}.{path.stem}": path
        for name, folder in folders.items()
        for path in (ROOT / folder).glob("*.py")
        if path.stem != "__init__"
    }


def test_every_module_of_stages_has_a_layer():
    names = {path.stem for path in (ROOT / "stages").glob("*.py")} - {"__init__"}
    assert names == CORE | PLUMBING | STAGES | ABOVE


@pytest.mark.parametrize("module", sorted(modules()))
def test_upper_layers_import_lower_ones_only(module):
    known = modules()
    for imported in imports(known[module]) & set(known):
        assert level(imported) <= level(module), f"{module} imports {imported}"


@pytest.mark.parametrize("folder", ["envs", "eval"])
def test_environments_and_evaluations_know_neither_torch_nor_vllm_nor_plumbing(folder):
    for path in (ROOT / folder).glob("*.py"):
        for imported in imports(path):
            assert imported.split(".")[0] not in ("torch", "vllm", "transformers"), path
            assert imported not in modules() or level(imported) == 0 or not imported.startswith("nanoskyrl.stages"), (
                path
            )


def test_no_module_imports_vllm():
    assert [path for path in modules().values() if any(name.split(".")[0] == "vllm" for name in imports(path))] == []


def test_the_package_list_is_the_tree():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        name
        for name, folder in {**PACKAGES, "nanoskyrl_cli": "nanoskyrl_cli"}.items()
        if (ROOT / folder / "__init__.py").is_file()
    }
    assert set(settings["packages"]) == found
    assert settings["package-dir"] == {name: name.removeprefix("nanoskyrl.") for name in found}
    assert not [p for folder in PACKAGES.values() for p in (ROOT / folder).rglob("*/__init__.py")]


def test_typings_link_to_the_folders():
    for name in PACKAGES.values():
        assert (ROOT / "typings" / "nanoskyrl" / name).resolve() == ROOT / name


def test_init_files_are_empty():
    assert all((ROOT / folder / "__init__.py").read_text() == "" for folder in [*PACKAGES.values(), "nanoskyrl_cli"])


@pytest.mark.parametrize("page", ["docs/trajectory.md", "docs/cli.md", "docs/algorithms.md"])
def test_generated_parts_of_a_page_are_those_of_the_code(page):
    shown = subprocess.run(
        [sys.executable, ROOT / "docs" / "render.py", "--check", page], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr


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
