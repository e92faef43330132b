"""Who made what: which code and libraries made the outputs of a run, and which settings changed between its steps.

Nothing that a run names is imported: the digest of a reward function is that of its file.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.code import changed_modules, code_now, code_of
from nanoskyrl.stages.core.manifest import Manifest
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.safe_text import shortened
from nanoskyrl.stages.looking.proof.findings import Findings

OF_EACH_STEP = ("rollout.step",)
"""Settings that differ by what they are."""
OWN_CODE = ("plugins", "reward_code")
"""Tables of a manifest's settings that hold the digests of code of the user's."""


def folders_of(run: Run) -> list[str]:
    """Return where a run says that modules are; its other settings are not looked at, for they may name some."""
    try:
        named = tomllib.loads(run.settings_file.read_text(encoding="utf-8"))["run"]["folders"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [folder for folder in named if isinstance(folder, str)] if isinstance(named, list) else []


def note_origin(folder: Path, manifest: Manifest, findings: Findings, folders: Sequence[str] = ()) -> None:
    """Record which code made an output, and whether it is other code than there is now.

    Args:
        folder: Of the output.
        manifest: Its manifest.
        findings: Gets what is found.
        folders: Where modules of the user's are looked for, beside where Python looks.
    """
    libraries = " ".join(f"{name} {version}" for name, version in sorted(manifest.packages.items()))
    findings.made_by[f"nanoskyrl {manifest.code.get('version', 'unknown')}, {libraries}"] += 1
    if changed := changed_modules(code_of(manifest.stage, manifest.settings), manifest.code):
        more = " and more" * (len(changed) > 3)
        findings.other_code.append(f"{folder}: {', '.join(changed[:3])}{more} changed since")
    for name, digest in own_code(manifest.settings).items():
        now = code_now(name, folders)
        if now is None:
            _once(findings.recorded, f"the code of `{name}`, whose file is not found from here")
        elif now != digest:
            _once(findings.notes, f"`{name}` has other code now than when {folder} was made")
    for name in manifest.inputs:
        if name.rpartition(".")[2] in FILES_OF_THE_USER:
            _once(findings.recorded, f"the digest of the file `{name}` that {folder.name} read")


FILES_OF_THE_USER = ("data", "test_data", "actions", "corpus", "prompt", "judge_prompt", "shots_data")
"""Inputs that are files of the user's, which a run does not hold."""


def own_code(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the code of the user's that a manifest's settings record, by `module:attribute`."""
    tables = (settings.get(table) for table in OWN_CODE)
    return {name: str(digest) for table in tables if isinstance(table, Mapping) for name, digest in table.items()}


def note_changes(manifests: Mapping[tuple[int, str], Manifest], findings: Findings) -> None:
    """Note every setting that is another in a later step, with the steps from which it is."""
    for stage in dict.fromkeys(of for _, of in sorted(manifests)):
        steps = sorted(step for step, of in manifests if of == stage)
        values: dict[str, list[tuple[int, Any]]] = {}
        for step in steps:
            for name, value in _settings(manifests[step, stage].settings):
                of_name = values.setdefault(name, [])
                if not of_name or of_name[-1][1] != value:
                    of_name.append((step, value))
        for name, changes in values.items():
            if len(changes) > 1:
                told = ", ".join(f"{shortened(str(value), 40)} from step {step}" for step, value in changes)
                findings.notes.append(f"{stage}: `{name}` changed: {told}")


def _settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for table, keys in settings.items():
        if not isinstance(keys, Mapping):
            yield table, keys
            continue
        yield from ((f"{table}.{key}", value) for key, value in keys.items() if f"{table}.{key}" not in OF_EACH_STEP)


def _once(lines: list[str], line: str) -> None:
    if line not in lines:
        lines.append(line)
