"""Patches as SWE-bench takes them: found in a reply, tidied, checked, written as predictions."""

import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from nanoskyrl.envs.data_files import json_rows
from nanoskyrl.stages.core.children import ending_with_us, temporary_directory
from nanoskyrl.stages.core.errors import InputError

_FENCED = re.compile(r"^```(?:diff|patch)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_BEGIN = re.compile(r"^(?:diff --git |--- (?:a/|/dev/null))", re.MULTILINE)
_COMMIT = re.compile(r"[0-9a-fA-F]{7,64}")
GIT_SECONDS = 120


def patch_in(text: str) -> str:
    """Return the last fenced diff of a reply, or what follows the first line of a bare one; nothing without."""
    found = _FENCED.findall(text)
    if found:
        return tidy(found[-1])
    begin = _BEGIN.search(text)
    return tidy(text[begin.start() :]) if begin and "```" not in text else ""


def tidy(patch: str) -> str:
    """Return a patch that ends in one newline, which `git apply` insists on; an empty one stays empty."""
    return patch.strip("\n") + "\n" if patch.strip() else ""


def parses(patch: str) -> bool:
    """Say whether a text is a unified diff of at least one file, its line counts right."""
    import unidiff

    try:
        files = unidiff.PatchSet.from_string(patch)
    except (unidiff.UnidiffParseError, ValueError, IndexError, TypeError, AttributeError):
        return False
    return len(files) > 0 and all(len(file) or file.is_rename or file.is_binary_file for file in files)


def commit_of(text: str) -> str:
    """Return a commit's name, which goes to git and must be no option of git's.

    Raises:
        InputError: it is none.
    """
    if not _COMMIT.fullmatch(text):
        raise InputError(f"{text[:60]!r} is no commit", hint="Give its name of 7 to 64 hexadecimal digits")
    return text


def applies(patch: str, repository: Path, commit: str) -> bool:
    """Say whether a patch applies to a commit, without touching the repository's files or index.

    Raises:
        InputError: the repository does not have the commit.
    """
    with temporary_directory("skyrl-patch-") as folder:
        # An index of its own: what is checked out does not matter, and stays.
        env = {**os.environ, "GIT_INDEX_FILE": str(folder / "index")}
        read = _git(repository, ["read-tree", commit_of(commit)], env)
        if read.returncode:
            raise InputError(
                f"`{repository}` has no commit {commit[:12]}: {read.stderr.strip()[:200]}", hint="Fetch it there"
            )
        return _git(repository, ["apply", "--cached", "--check", "-"], env, patch).returncode == 0


def _git(
    repository: Path, words: list[str], env: Mapping[str, str], stdin: str = ""
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["git", "-C", str(repository), *words], input=stdin, capture_output=True, text=True, env=ending_with_us(env),
        timeout=GIT_SECONDS, check=False, errors="replace",
    )  # fmt: skip


def predictions(patches: Iterable[tuple[str, str]], model: str) -> bytes:
    """Return the official JSONL: one line a task, in the order given.

    Args:
        patches: instance id and patch.
        model: Whose they are.
    """
    lines = [
        json.dumps({"instance_id": name, "model_name_or_path": model, "model_patch": patch}, ensure_ascii=False)
        for name, patch in patches
    ]
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


def read_predictions(path: Path) -> dict[str, str | None]:
    """Return each instance's patch from a file of predictions; None where it says null.

    Raises:
        InputError: the file is missing, a line is no prediction, or an instance comes twice.
    """
    if not path.is_file():
        raise InputError(f"there is no file of predictions `{path}`", hint="Name a .jsonl file")
    found: dict[str, str | None] = {}
    for place, row in json_rows(path):
        name, patch = row.get("instance_id"), row.get("model_patch")
        if not isinstance(name, str) or "model_patch" not in row or not isinstance(patch, str | None):
            raise InputError(
                f"{place} is no prediction",
                hint="Write JSON objects of instance_id, model_name_or_path and model_patch",
            )
        if name in found:
            raise InputError(f"{place} has `{name}` again", hint="One prediction an instance")
        found[name] = patch
    return found
