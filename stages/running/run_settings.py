"""What `run.toml` holds: the settings of the run.

`skyrl init` and `skyrl set` write there, and the first command that says something for the run's own
output. A later flag holds for its command alone, and so does all that is said for output elsewhere. A
command that fails before its stage has begun leaves the file as it was.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from nanoskyrl.envs.graders.verdicts import JUDGE_REWARD
from nanoskyrl.stages.core.checked import metadata_of
from nanoskyrl.stages.core.config import Settings, build, config_class, merge, read_file, stage_config
from nanoskyrl.stages.core.errors import InputError, Notice, SettingsError
from nanoskyrl.stages.core.manifest import is_begun
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.storage import is_local, make_directory, write_whole
from nanoskyrl.stages.engines.task_order import weights_of
from nanoskyrl.stages.running.whole_paths import missing_paths, module_folders, whole_paths

F = TypeVar("F", bound=Callable[..., Any])


def kept_settings(run: Run) -> Settings:
    """Return what `run.toml` holds, paths as in `whole_in`."""
    return whole_in(run, read_file(run.settings_file) if run.settings_file.is_file() else {})


def whole_in(run: Run, settings: Mapping[str, Mapping[str, Any]]) -> Settings:
    """Return what a run has written down with whole paths: looked for in the run, then in the current folder."""
    here = [run.root.absolute()] if is_local(run.root) else []
    return whole_paths(settings, *here, Path.cwd())


def given_settings(*sources: Settings) -> Settings:
    """Return what a command was given, later sources first; a relative path counts from the current folder."""
    return whole_paths(merge(*sources), Path.cwd())


def settings_for(run: Run, given: Settings | None = None, *, told: bool = True) -> Settings:
    """Return the settings of a command in a run: those of the run, then those given now.

    Args:
        run: The run.
        given: As `given_settings` returns them.
        told: Warn, as a Notice, of what differs from the run's: it holds for this command alone.
    """
    kept, given = kept_settings(run), given or {}
    other = {
        f"{table}.{key}": (value, kept[table][key])
        for table, keys in given.items()
        for key, value in keys.items()
        if key in kept.get(table, {}) and _plain(kept[table][key]) != _plain(value)
    }
    if other and told:
        here = ", ".join(f"{name} = {now!r} (the run has {then!r})" for name, (now, then) in other.items())
        warnings.warn(Notice(f"for this command alone: {here}; `skyrl set` changes the run"), stacklevel=2)
    return merge(kept, given)


def names_lost_settings(stage: F) -> F:
    """Return a stage of a session whose errors name the run's setting of a path that is not there."""

    @functools.wraps(stage)
    def run(session: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stage(session, *args, **kwargs)
        except (InputError, SettingsError) as error:
            if (remedy := _lost_setting(session.run, str(error))) is None:
                raise
            raise type(error)(str(error), hint=remedy) from error

    return cast(F, run)


def _lost_setting(run: Run, message: str) -> str | None:
    """Return what to do where an error names a path of the run's settings that is not there; None: it names none."""
    for name, path in missing_paths(kept_settings(run), message):
        table, _, key = name.rpartition(".")
        written = read_file(run.settings_file)[table][key]
        looked = "" if path in str(written) else f", looked for in `{run.root}` and `{Path.cwd()}`"
        return (
            f"`{name}` in `{run.settings_file}` is {written!r}{looked}; "
            f"if it was moved, `skyrl set {run.root} {name}=...`"
        )
    return None


def begin_run(run: Run, settings: Settings) -> None:
    """Create the run directory, and keep the settings that made it."""
    make_directory(run.root)
    if not run.settings_file.exists():
        write_whole(run.settings_file.resolve(), as_toml(with_folders(_lasting(settings))).encode())


def remember(run: Run, settings: Settings, given: Settings) -> None:
    """Begin a run, and keep the settings given now that it does not hold yet, for its next steps."""
    begin_run(run, settings)
    held = read_file(run.settings_file)
    new: Settings = {
        table: {key: value for key, value in keys.items() if value is not None and key not in held.get(table, {})}
        for table, keys in _lasting(given).items()
    }
    change_settings(run, new)


def replace_settings(run: Run, settings: Settings) -> None:
    """Keep these settings in place of those that a run has, and tell which differ."""
    begin_run(run, settings)
    held, new = read_file(run.settings_file), _lasting(settings)
    gone = {table: {key: None for key in keys if key not in new.get(table, {})} for table, keys in held.items()}
    gone.get("run", {}).pop("folders", None)
    changes = {
        table: {key: value for key, value in keys.items() if _plain(value) != held.get(table, {}).get(key)}
        for table, keys in merge(gone, new).items()
    }
    change_settings(run, changes)
    names = ", ".join(f"{table}.{key} {_said(value)}" for table, keys in changes.items() for key, value in keys.items())
    if names:
        warnings.warn(Notice(f"`{run.settings_file}` has from now on: {names}"), stacklevel=2)


def change_settings(run: Run, changes: Settings) -> None:
    """Write settings into `run.toml`, whose comments stay; None takes a setting out.

    Raises:
        InputError: the run has no such file.
        SettingsError: a table would hold what it cannot; the file stays as it was.
    """
    import tomlkit

    changes = {table: keys for table, keys in changes.items() if keys}
    if not changes:
        return
    if not run.settings_file.is_file():
        raise InputError(
            f"there is no run `{run.root}`: it has no `{run.settings_file.name}`",
            hint=f"Begin it with `skyrl init --run {run.root}`",
        )
    held = read_file(run.settings_file)
    merged = with_folders(merge(held, changes), changes)
    for table in changes:
        config = config_class(table)
        assert config is not None
        build(config, {key: value for key, value in merged[table].items() if value is not None}, table)
    if merged.get("run", {}).get("folders") != held.get("run", {}).get("folders"):
        changes = merge({"run": {"folders": merged["run"]["folders"]}}, changes)
    document = tomlkit.parse(run.settings_file.read_text(encoding="utf-8"))
    for table, keys in changes.items():
        section = document.setdefault(table, tomlkit.table())
        for key, value in keys.items():
            if value is None:
                section.pop(key, None)
            else:
                section[key] = _plain(value)
    write_whole(run.settings_file.resolve(), tomlkit.dumps(document).encode())


def with_folders(settings: Settings, named: Settings | None = None) -> Settings:
    """Return the settings with the folders of modules that they name, or that others do, in `run.folders`."""
    held = list(settings.get("run", {}).get("folders", ()))
    new = [folder for folder in module_folders(settings if named is None else named) if folder not in held]
    return merge(settings, {"run": {"folders": [*held, *new]}}) if new else settings


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
                write_whole(file.resolve(), before)
        raise
    if begun:  # perhaps under other settings, which would have been refused
        remember(run, settings, given)


def tables_in_use(settings: Settings) -> list[str]:
    """Return the names of the tables that a run has something of, in the order of its step."""
    rollout, train, evaluated = (stage_config(settings, stage) for stage in ("rollout", "train", "eval"))
    judge = ["judge"] if JUDGE_REWARD in stage_config(settings, "score").rewards else []
    critic = ["critic"] if lookup("algo", train.algo).needs_critic else []
    return [
        "run", "rollout", *weights_of(rollout.env), rollout.engine, "score", *judge,
        *stage_config(settings, "run").stages, "advantage", "train", train.algo, *critic, "off_policy", "sync", "eval",
        *filter(None, [evaluated.env]), *evaluated.bench, "loop", "code",
    ]  # fmt: skip


def as_toml(settings: Settings) -> str:
    """TOML has no null; a key that is not there means the default, which is None where None is allowed."""
    import tomlkit

    return tomlkit.dumps(
        {
            table: {key: _plain(value) for key, value in keys.items() if value is not None}
            for table, keys in settings.items()
            if keys
        }
    )


def _lasting(settings: Mapping[str, Mapping[str, Any]]) -> Settings:
    """Return the settings without those that hold for one command."""
    found: Settings = {}
    for table, keys in settings.items():
        config = config_class(table)
        once = metadata_of(config, "once") if config is not None else ()
        found[table] = {key: value for key, value in keys.items() if key not in once}
    return found


def _said(value: Any) -> str:
    return "at its default" if value is None else f"= {value!r}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
