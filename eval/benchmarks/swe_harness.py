"""The official SWE-bench harness (extra `swebench`): run where Docker does, its saved logs graded anywhere.

A log is graded by the harness's own code, forged "PASSED" lines included in what it looks
for. A log says nothing about another patch: where the harness kept the patch beside the
log, it must be the prediction's.
"""

import importlib
import importlib.util
import json
import pkgutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nanoskyrl.eval.benchmarks.patches import predictions, tidy
from nanoskyrl.eval.rows import Row
from nanoskyrl.stages.core.children import ending_with_us, temporary_directory
from nanoskyrl.stages.core.errors import EngineError, SettingsError

LOG, PATCH = "test_output.txt", "patch.diff"
"""What the harness leaves of an instance, in a directory of the instance's id."""
INSTALL = "`pip install 'nanoskyrl[swebench]'`"
NEW_LAYOUT = ("image", "eval_script", "log_parser", "eval_type")
"""Columns without which swebench 5 starts no container."""
RUN_ID = "nanoskyrl"


@cache
def why_not_docker() -> str | None:
    """Return why no container can be started here, or None where one can."""
    try:
        asked = subprocess.run(
            ["docker", "info", "--format", "{{.ServerVersion}}"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env=ending_with_us(),
        )
    except FileNotFoundError:
        return "docker is not installed"
    except subprocess.TimeoutExpired:
        return "the Docker daemon does not answer"
    if asked.returncode:
        return "the Docker daemon does not run"  # what it says besides names this machine
    return None if _installed() else f"the harness is not installed: {INSTALL}"


def _installed() -> bool:
    return importlib.util.find_spec("swebench") is not None


def require_docker() -> None:
    """Raise unless the harness can run here.

    Raises:
        EngineError: no Docker, or no harness.
    """
    if (why := why_not_docker()) is not None:
        raise EngineError(
            f"the SWE-bench harness cannot run here: {why}",
            hint="Evaluate with `harness=never`, run the harness on predictions.jsonl where Docker runs, "
            "and grade its logs with `skyrl grade predictions.jsonl --logs DIR --data ROWS`",
        )


def evaluate_patch(row: Row, patch: str, model: str, timeout_seconds: int) -> dict[str, Any]:
    """Run one instance's tests in its container and return the official report.

    Raises:
        EngineError: no Docker here, or the harness left no log.
        SettingsError: the row is of the old layout, which names no image.
    """
    require_docker()
    check_layout(row)
    name = row["instance_id"]
    with temporary_directory("skyrl-swebench-") as place:
        (place / "rows.json").write_text(json.dumps([row], default=str), encoding="utf-8")
        (place / "predictions.jsonl").write_bytes(predictions([(name, patch)], model))
        command = [
            sys.executable, "-m", "swebench.cli.cli", "eval", "rows.json", "-p", "predictions.jsonl", "-i", name,
            "--run-id", RUN_ID, "-j", "1", "-t", str(timeout_seconds),
        ]  # fmt: skip
        ran = subprocess.run(command, cwd=place, capture_output=True, text=True, env=ending_with_us(), check=False)
        found = find_log(place / "logs", name)
        if found is None:
            raise EngineError(
                f"the harness left no log of {name}: {ran.stderr.strip()[-300:]}", hint="Look at what Docker says"
            )
        return report(row, patch, model, found)


def check_layout(row: Row) -> None:
    """Raise unless the harness can start a container for a row.

    Raises:
        SettingsError: the row is of the old layout, which names no image.
    """
    if missing := [column for column in NEW_LAYOUT if not row.get(column)]:
        raise SettingsError(
            f"{row.get('instance_id')} has no `{missing[0]}`: the harness needs rows of the new layout",
            hint="Take the rows from SWE-bench's own page on the hub, or set `harness=never`",
        )


def find_log(folder: Path, instance_id: str) -> Path | None:
    """Return the log of an instance below a folder, or None.

    Raises:
        SettingsError: there are several; which one counts is not ours to guess.
    """
    found = sorted(folder.rglob(f"{instance_id}/{LOG}"))
    if len(found) > 1:
        raise SettingsError(f"`{folder}` holds {len(found)} logs of {instance_id}", hint="Name the folder of one run")
    return found[0] if found else None


def report(row: Row, patch: str | None, model: str, log: Path) -> dict[str, Any]:
    """Return the official report on an instance from its log.

    Raises:
        SettingsError: the harness is not installed, does not know the repository, or the log is of another patch.
    """
    if not _installed():
        raise SettingsError("grading SWE-bench's logs needs its harness", hint=INSTALL)
    from swebench.harness.grading import get_eval_report

    kept = log.parent / PATCH
    if patch is not None and kept.is_file() and tidy(kept.read_text(encoding="utf-8", errors="replace")) != tidy(patch):
        raise SettingsError(f"`{log}` is of another patch than the prediction", hint="Run the harness on this one")
    prediction: dict[str, Any] = {
        "instance_id": row["instance_id"], "model_name_or_path": model, "model_patch": patch,
    }  # fmt: skip
    return get_eval_report(_spec(row), prediction, str(log), include_tests_status=True)[row["instance_id"]]


def _spec(row: Row) -> Any:
    from swebench.types import TestSpec

    return TestSpec(
        instance_id=row["instance_id"],
        image=row.get("image") or "",
        eval_script_list=[],
        repo=row["repo"],
        version=str(row.get("version") or ""),
        FAIL_TO_PASS=as_list(row["FAIL_TO_PASS"]),
        PASS_TO_PASS=as_list(row["PASS_TO_PASS"]),
        log_parser=row.get("log_parser") or _parser_of(row["repo"]),
        eval_type=row.get("eval_type") or "pass_and_fail",
    )


def _parser_of(repo: str) -> str:
    """Return the name of the harness's log parser for a repository, for rows that do not say."""
    import swebench.harness.log_parsers as parsers

    names = {function: name for name, function in parsers.PARSER_REGISTRY.items()}
    for module in pkgutil.iter_modules(parsers.__path__):
        for name, table in vars(importlib.import_module(f"{parsers.__name__}.{module.name}")).items():
            if name.startswith("MAP_REPO_TO_PARSER") and isinstance(table, Mapping) and repo in table:
                return names[table[repo]]
    raise SettingsError(f"the harness knows no log parser for `{repo}`", hint="Take rows of the new layout")


def as_list(value: Any) -> list[str]:
    """Return a list of test names, which the old layout keeps as JSON in a string.

    Raises:
        ValueError, TypeError: it is neither.
    """
    found = json.loads(value) if isinstance(value, str) else list(value)
    if not all(isinstance(item, str) for item in found):
        raise TypeError("test names must be text")
    return found
