"""What `run.toml` holds: the settings that a run began with, and those that it was given since.

Later commands in the run start from them. A command that fails before its stage has begun
leaves the file as it was.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from nanoskyrl.stages.core.config import Settings, merge, read_file
from nanoskyrl.stages.core.manifest import is_begun
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.storage import make_directory, write_whole

NOT_REMEMBERED = ("rollout.tasks",)
"""Settings that are meant for one command, as all of the tables eval and loop are."""


def settings_for(run: Run, *sources: Settings) -> Settings:
    """Return the settings of a command in a run: those that the run remembers, then those given now."""
    kept = read_file(run.settings_file) if run.settings_file.is_file() else {}
    return merge(kept, *sources)


def begin_run(run: Run, settings: Settings, *, replace: bool = False) -> None:
    """Create the run directory, and keep the settings that made it; with `replace`, these in their place."""
    make_directory(run.root)
    if replace or not run.settings_file.exists():
        write_whole(run.settings_file, as_toml(settings).encode())


def remember(run: Run, settings: Settings, given: Settings) -> None:
    """Begin a run, and keep the settings given now that it does not hold yet, for its next steps."""
    import tomlkit

    begin_run(run, settings)
    if not given:
        return
    document = tomlkit.parse(run.settings_file.read_text(encoding="utf-8"))
    new = [
        (table, key, value)
        for table, keys in given.items()
        for key, value in keys.items()
        if value is not None
        and table not in ("eval", "loop")
        and f"{table}.{key}" not in NOT_REMEMBERED
        and key not in document.get(table, {})
    ]
    for table, key, value in new:
        document.setdefault(table, tomlkit.table()).add(key, list(value) if isinstance(value, tuple) else value)
    if new:
        write_whole(run.settings_file, tomlkit.dumps(document).encode())


@contextlib.contextmanager
def remembering(run: Run, settings: Settings, given: Settings, output: Path) -> Iterator[None]:
    """Keep what was given before a stage's work, so that a killed one resumes without being given it again.

    Where the work does not even begin, nothing is kept.
    """
    file = run.settings_file
    before = file.read_bytes() if file.is_file() else None
    begun = is_begun(output)
    if not begun:
        remember(run, settings, given)
    try:
        yield
    except BaseException:
        if not is_begun(output):
            if before is None:
                file.unlink(missing_ok=True)
            else:
                write_whole(file, before)
        raise
    if begun:  # perhaps under other settings, which would have been refused
        remember(run, settings, given)


def as_toml(settings: Settings) -> str:
    """TOML has no null; a key that is not there means the default, which is None where None is allowed."""
    import tomlkit

    return tomlkit.dumps(
        {
            table: {k: list(v) if isinstance(v, tuple) else v for k, v in keys.items() if v is not None}
            for table, keys in settings.items()
            if keys
        }
    )
