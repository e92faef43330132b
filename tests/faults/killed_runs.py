"""Runs that are killed at drawn file events again and again until they come to their end, and what is left of that.

A file event is an opening for writing, a rename, a link, a removal, a directory made or removed, below the run or the
temporary folder: Python tells of each before it happens. The child that runs is forked from a process that has all
modules loaded, so that a kill costs what the run itself costs.
"""

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from killing import FORKS
from running import SMALL, differing_rows, same_bytes

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.manifest import is_finished, read_manifest
from nanoskyrl.stages.core.metrics import latest, read_metrics
from nanoskyrl.stages.core.runs import STAGES, Run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.engines.vllm.process import MODULE

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "os.symlink")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
EVALUATED = {"eval": {"limit": 4, "max_generate_length": 8}}
KINDS: dict[str, dict[str, Any]] = {
    "scripted": {"rollout": {**SMALL["rollout"], "engine": "scripted"}, **EVALUATED},
    "hf": merge(SMALL, EVALUATED, {"loop": {"eval_every": 1, "keep_states": 1}, "rollout": {"max_generate_length": 8}}),
    "overlapped": merge(
        SMALL, EVALUATED, {"run": {"lag": 1}, "loop": {"gpus_generate": "cpu", "gpus_train": "cpu", "eval_every": 1}},
        {"rollout": {"max_generate_length": 8}},
    ),
    "vllm": merge(
        SMALL, EVALUATED, {"loop": {"eval_every": 1}, "rollout": {"engine": "vllm", "max_generate_length": 8}},
        {"vllm": {"gpus": "cpu", "max_num_seqs": 64, "kv_cache_gib": 0.25}},
    ),
}  # fmt: skip
SECONDS_TO_GO = 15.0
"""After which what a killed process started must be gone."""


def work(kind: str, place: str, settings: dict[str, Any]) -> None:
    """Do all that a run of this kind does; what is done already stays."""
    from nanoskyrl.stages.running.loop import loop
    from nanoskyrl.stages.running.session import Session

    run = Run(Path(place))
    if kind != "scripted":
        loop(run, settings)
        return
    session = Session(run, settings, keep_up=True)
    for step in range(2):
        for stage in ("rollout", "score", "advantage"):
            getattr(session, stage)(step)
    session.eval("text_math")
    session.close()


def _child(kind: str, place: str, scratch: str, settings: dict[str, Any], count: int, told: str) -> None:
    os.environ["TMPDIR"] = scratch
    tempfile.tempdir = scratch  # found out by no trial file
    sys.stderr = open(f"{place}.log", "a")  # noqa: SIM115 (to the end of this process)
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in EVENTS or not arguments or (event == "open" and not (arguments[2] or 0) & WRITING):
            return
        path = os.fspath(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        path = path.decode() if isinstance(path, bytes) else path
        if path != told and path.startswith((place, scratch)):
            seen += 1
            if seen == count:
                with open(told, "w") as file:
                    json.dump([event, path, _has_server()], file)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    work(kind, place, settings)


def _has_server() -> bool:
    """Say whether this process has a vLLM server."""
    return any(MODULE in child.cmdline() for child in psutil.Process().children())


@dataclass
class Found:
    """What a killed run came to."""

    kills: int = 0
    with_server: int = 0
    """Kills while a vLLM server of the run was up, or was coming up."""
    places: Counter[str] = field(default_factory=Counter)
    """Kills by what was about to be written."""
    problems: list[str] = field(default_factory=list)


def killed_run(
    kind: str, folder: Path, reference: Path, seed: int, *, gap: int = 60, settings: dict[str, Any] | None = None
) -> Found:
    """Run until the end, killed after so many file events at most each time, and compare with an unbroken run."""
    draw, found = random.Random(seed), Found()
    place, scratch, told = folder / "run", folder / "tmp", folder / "told.json"
    scratch.mkdir(parents=True)
    for attempt in range(200):
        count = draw.randint(1, gap) + 2 * attempt  # a stage begun again must come further in the end
        told.unlink(missing_ok=True)
        process = FORKS.Process(
            target=_child, args=(kind, str(place), str(scratch), settings or KINDS[kind], count, str(told))
        )
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        if process.exitcode != -signal.SIGKILL or not told.exists():
            words = Path(f"{place}.log").read_text()[-300:] if Path(f"{place}.log").exists() else ""
            found.problems.append(f"seed {seed}: ended with {process.exitcode}: {words}")
            return found
        found.kills += 1
        event, path, served = json.loads(told.read_text())
        found.with_server += served
        found.places[f"{event} {generic(path, place, scratch)}"] += 1
        if kind in ("overlapped", "vllm"):  # what the killed loop started is gone before another one comes
            _await_end(scratch, found)
    else:
        found.problems.append(f"seed {seed}: it never came to its end")
    _await_end(scratch, found)
    found.problems += [f"seed {seed}: {problem}" for problem in problems(kind, place, scratch, reference)]
    return found


def generic(path: str, place: Path, scratch: Path) -> str:
    """Return a path without its numbers and random parts."""
    import re

    text = path.replace(str(place), "RUN").replace(str(scratch), "TMP")
    text = re.sub(r"nanoskyrl-\d+-[0-9a-f]+\.lock", "LOCK", text)
    text = re.sub(r"(nanoskyrl|skyrl|policy|tmp)[-\w]*-?[\w]{8}(?=[/.]|$)", r"\1-X", text)
    return re.sub(r"-[0-9a-f]{8}", "-X", re.sub(r"\d{6,8}", "N", text))


def with_environment(scratch: Path) -> list[psutil.Process]:
    """Return the processes whose temporary folder this is."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TMPDIR") == str(scratch):
                found.append(process)
    return found


def _await_end(scratch: Path, found: Found) -> None:
    """Wait until what a run started is gone; what is not is a problem, and ended."""
    end = time.monotonic() + SECONDS_TO_GO
    while left := with_environment(scratch):
        if time.monotonic() > end:
            found.problems += [f"left running: {' '.join(process.cmdline())[:120]}" for process in left]
            for process in left:
                process.kill()
            return
        time.sleep(0.1)


def problems(kind: str, place: Path, scratch: Path, reference: Path) -> list[str]:
    """Return how a finished run differs from an unbroken one, and what lies about."""
    run = Run(place)
    if kind == "vllm":  # its log-probs differ in their last digits with what else is in a batch
        found = differing_rows(Run(reference), run, 2)
    else:
        found = [f"differs: {name}" for name in same_bytes(reference, place)]
    found += [
        f"left: {path.relative_to(place)}"
        for path in place.rglob("*")
        if path.name.startswith(".") or path.name.endswith((".tmp", ".owner")) or path.name == "_started.json"
    ]
    left = (path.relative_to(scratch) for path in scratch.rglob("*"))
    # torch keeps what it compiled for the next process.
    found += [
        f"left in the temporary folder: {path}" for path in left if not path.parts[0].startswith("torchinductor_")
    ]
    for output in place.rglob("_manifest.json"):
        manifest = read_manifest(output.parent)
        if manifest.stage in ("rollout", "score", "advantage"):
            names = [
                row for part in read_parts(output.parent, manifest) for row in part.column("trajectory_id").to_pylist()
            ]
            if len(names) != len(set(names)) or len(names) != manifest.rows_out:
                found.append(f"rows lost or doubled in {output.parent}")
    if kind != "scripted":
        lines = read_metrics(run.metrics)
        wanted = set(run.steps())
        found += (
            [f"no line of `loop` for steps {wanted - set(latest(lines, 'loop'))}"]
            if wanted - set(latest(lines, "loop"))
            else []
        )
        found += [f"step {step} lacks `{s}`" for step in wanted for s in STAGES if not is_finished(run.stage(step, s))]
    return found


def reference(kind: str, folder: Path) -> Path:
    """Make an unbroken run."""
    scratch = folder / "tmp"
    scratch.mkdir(parents=True)
    process = FORKS.Process(
        target=_child, args=(kind, str(folder / "run"), str(scratch), KINDS[kind], 0, str(folder / "told.json"))
    )
    process.start()
    process.join()
    assert process.exitcode == 0, Path(f"{folder / 'run'}.log").read_text()
    return folder / "run"
