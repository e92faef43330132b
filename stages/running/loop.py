"""The whole loop: rollout, score, advantage, train, sync, step after step, resumable.

It calls the stages as a shell script would, in one process that keeps engine and learner
up. Killed anywhere, it resumes at the first step without a finished sync.
"""

import contextlib
import gc
import json
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nanoskyrl.eval.prices import read_prices
from nanoskyrl.stages.core.checked import Checked, NonNegativeInt, metadata_of
from nanoskyrl.stages.core.config import (
    Settings,
    build,
    config_class,
    merge,
    stage_config,
    to_plain,
    with_later_keys,
)
from nanoskyrl.stages.core.errors import CollapseError, ConflictError, InputError, Notice, OutputError, told_as
from nanoskyrl.stages.core.leftovers import remove_leftovers
from nanoskyrl.stages.core.manifest import first_difference
from nanoskyrl.stages.core.metrics import MetricsLog, latest, read_metrics, seconds_of_stages
from nanoskyrl.stages.core.output import discard, tidy
from nanoskyrl.stages.core.pipeline import STAGES, training_half
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.core.runs import EVALUATIONS, Run
from nanoskyrl.stages.core.stopping import terminated_as_interrupted
from nanoskyrl.stages.core.storage import TEMPORARY, locked, remove_tree, write_whole
from nanoskyrl.stages.learning.lag_defaults import described
from nanoskyrl.stages.learning.train_config import check_horizon
from nanoskyrl.stages.models.policy import model_name
from nanoskyrl.stages.running.collapse import Collapse, CollapseWatch, remedy
from nanoskyrl.stages.running.outdated_outputs import check_settings, outdated
from nanoskyrl.stages.running.overlap import overlapped
from nanoskyrl.stages.running.placement import Placement, placement_of
from nanoskyrl.stages.running.run_settings import (
    given_settings,
    remember,
    replace_settings,
    tables_in_use,
    whole_in,
)
from nanoskyrl.stages.running.session import Session
from nanoskyrl.stages.running.standing_trainer import STOP_FILE
from nanoskyrl.stages.running.trackers import Trackers, check_trackers
from nanoskyrl.stages.running.trainer_process import TrainerProcess

RESOLVED = "resolved.json"
TAIL = 1 << 16
"""Bytes of metrics.jsonl that surely hold the newest step: reading it all would slow long runs down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig(Checked):
    """How long the loop runs, and what it does besides."""

    steps: NonNegativeInt = 60
    """Policies to train, counted from the beginning of the run."""
    eval_every: NonNegativeInt = 0
    """Evaluate the first policy, every so many, and the last; 0: never."""
    keep_states: NonNegativeInt = 2
    """Optimizer states kept of the newest steps; older ones are deleted. 0 keeps all."""
    gpus_generate: str | None = None
    """0-3, 0,2 or cpu: where rollouts run. With `gpus_train`, training has a process of its own, and with a lag both
    work at once; on the same GPUs they take turns, and each is stopped for the other. None: both in turns in one
    process."""
    gpus_train: str | None = None
    """The same for training, one process a GPU."""
    trackers: tuple[str, ...] = ()
    """tensorboard, wandb: given the numbers of each step, besides metrics.jsonl."""
    stop_on_collapse: bool = False
    """End the loop where success falls for several steps; else that is reported, with the setting to try."""

    def check(self) -> None:
        """Refuse GPUs and trackers that do not exist."""
        placement_of(self.gpus_generate, self.gpus_train)
        check_trackers(self.trackers)

    @property
    def placement(self) -> Placement | None:
        """Where the two halves run; None: in turns in one process."""
        return placement_of(self.gpus_generate, self.gpus_train)


Report = Callable[[int, dict[str, Any]], None]
Begins = Callable[[int, str], None]


def resolve(session: Session) -> dict[str, dict[str, Any]]:
    """Return all settings that can change the rows of a loop, defaults and what the algorithm decides included.

    Raises:
        SettingsError: a table is invalid, or the algorithm lacks a setting.
    """
    settings, train = session.settings, stage_config(session.settings, "train")
    check_horizon(train.loss_reduction or lookup("algo", train.algo).loss_reduction, train.horizon)
    decided = {"rollout": session.rollout_config(), "advantage": session.advantage_config()}
    # The others change no row, or what is compared says so elsewhere.
    configs = {name: config_class(name) for name in tables_in_use(settings) if name not in ("judge", "loop", "code")}
    return {
        name: _compared(decided.get(name) or (config and build(config, settings.get(name, {}), name)))
        for name, config in configs.items()
    }


def _compared(config: Any) -> dict[str, Any]:
    """Return the settings that must stay; which servers generate may change from one call to the next."""
    places = metadata_of(type(config), "place") if config is not None else ()
    return {key: value for key, value in to_plain(config).items() if key not in places}


def loop(
    run: Run,
    settings: Settings,
    *,
    given: Settings | None = None,
    report: Report = lambda step, numbers: None,
    begins: Begins = lambda step, stage: None,
    force: bool = False,
) -> int:
    """Train until the run has as many policies as asked for, and return how many steps were done now.

    Args:
        run: The run's directory; a new one, or one to continue with.
        settings: Tables, merged.
        given: Those of them that came with the command; what the run does not hold yet of them, it keeps. None: all.
        report: Called after each step, and after each evaluation, with the newest numbers.
        begins: Called when a stage begins here.
        force: Continue with other settings than the run began with. What unsynced steps hold that was made under others
            is made again.

    Raises:
        ConflictError: the run began with other settings.
        InputError: evaluations are to be priced, and the table has no prices of the run's model.
        OutputError: another loop is at work in the run.
        KeyboardInterrupt: at SIGTERM, too, once what was started is stopped; it continues when it is called again.
    """
    settings = given_settings(settings)
    config: LoopConfig = stage_config(settings, "loop")
    session = Session(run, placed(settings, config.placement), keep_up=True)
    given = settings if given is None else given

    def keep() -> None:
        if force:
            replace_settings(run, settings)
        else:
            remember(run, settings, given)

    trackers = Trackers(config.trackers, run.root)

    def told(step: int, numbers: dict[str, Any]) -> None:
        trackers.log(numbers, step)
        report(step, numbers)

    with terminated_as_interrupted(), locked(run.root):
        try:
            return _steps(session, config, keep, told, begins, force=force)
        finally:
            session.kept.close()
            trackers.close()


def _steps(
    session: Session, config: LoopConfig, keep: Callable[[], None], report: Report, begins: Begins, *, force: bool
) -> int:
    run, place, first = session.run, config.placement, session.run.next_step()
    resolved = resolve(session)
    if config.eval_every:
        _check_prices(session)
    if force:
        _make_way(session, first, place)
    else:
        _check_settings(run, resolved)
    write_whole(run.root / RESOLVED, (json.dumps(resolved, indent=2, sort_keys=True) + "\n").encode())
    keep()
    _tidy(session, first, config.keep_states)
    if session.of_lag:
        warnings.warn(
            Notice(f"with lag {session.config.lag}, unless set otherwise: {described(session.of_lag)}"), stacklevel=2
        )
    watch = CollapseWatch(read_metrics(run.metrics) if first else ())
    MetricsLog(run.metrics).write("startup", {"timing/startup": _seconds_since_start()})
    if first <= config.steps:  # a finished loop, too, owes the evaluation in which it was killed
        _evaluate(session, first, config, report, force=force)

    def done(step: int) -> None:
        numbers = step_numbers(run, step, session.stages)
        report(step, numbers)
        _evaluate(session, step + 1, config, report)
        if (collapse := watch.after(step, numbers)) is not None:
            _tell_collapse(session, step, collapse, numbers, stop=config.stop_on_collapse)

    if session.config.executor == "ray":
        from nanoskyrl.stages.running.cluster.learner import RayTrainer

        trainer = RayTrainer(session, config.steps, config.keep_states)
    elif place is not None and place.apart:
        trainer = TrainerProcess(session, place.train, config.steps, config.keep_states)
    else:
        trainer = None
    if trainer is not None:
        overlapped(session, trainer, first, config.steps, done, begins)
        return max(0, config.steps - first)
    learns = training_half(session.stages)
    for step in range(first, config.steps):
        if step == first + 1:
            # Libraries and models are up by now: a million objects that every collection would look through.
            gc.collect()
            gc.freeze()
        began = time.perf_counter()
        for stage in session.stages:
            if place is not None and stage == learns[0]:
                session.kept.close()  # the servers make room on the GPUs that they share with the learner
            begins(step, stage)
            session.make(stage, step)
            if place is not None and stage == learns[-1]:
                session.kept.release_learner()
        session.prune(step, config.keep_states)
        MetricsLog(run.metrics, step).write("loop", {"timing/total": time.perf_counter() - began})
        done(step)
    return max(0, config.steps - first)


def _tidy(session: Session, first: int, keep_states: int) -> None:
    """Do what a loop that was killed between two steps still had to, and take away what it left."""
    run, last = session.run, first - 1
    remove_leftovers(run.policy(0).parent)
    evaluated = (run.root / EVALUATIONS).glob(f"*{first:08d}/*")
    of_steps = (run.stage(step, stage) for step in (last, first) if step >= 0 for stage in session.stages)
    for output in (*of_steps, *evaluated):
        tidy(output)
    with contextlib.suppress(OutputError), locked(run.root / STOP_FILE):
        pass  # a trainer's lock, which goes with it
    if first:
        session.prune(last, keep_states)
        for left in run.stage(last, "train").glob(f"state*{TEMPORARY}"):
            remove_tree(left)
        lines = read_metrics(run.metrics, tail_bytes=TAIL)
        looped = any(line.get("stage") == "startup" for line in lines)
        if looped and last not in latest(lines, "loop"):
            seconds = seconds_of_stages((latest(lines, stage) for stage in session.stages), last)
            MetricsLog(run.metrics, last).write("loop", {"timing/total": seconds})


def placed(settings: Settings, place: Placement | None) -> Settings:
    """Return the settings with the GPUs that generate, for engines that take some; on Ray each sees only its own."""
    if place is None or stage_config(settings, "run").executor == "ray":
        return settings
    named = (stage_config(settings, "rollout").engine, stage_config(settings, "sync").engine or "hf")
    of_engines: dict[str, Any] = {name: config_class(name) for name in named}
    takes = [name for name, config in of_engines.items() if hasattr(config, "on_gpus")]
    return merge(settings, *({name: of_engines[name].on_gpus(place.generate)} for name in takes))


def _make_way(session: Session, first: int, place: Placement | None) -> None:
    """Delete what unsynced steps hold that was made under other settings, once nothing refuses those in force."""
    check_settings(session, first)
    processes = len(place.train) if place is not None and place.apart else 1
    if (executor := session.kept.executor()) is not None:
        processes = executor.shape.learner_workers
    for output in outdated(session, first, processes):
        discard(output)


def _check_settings(run: Run, resolved: dict[str, Any]) -> None:
    path = run.root / RESOLVED
    with told_as(
        InputError,
        f"`{path}` is not JSON",
        ValueError,
        RecursionError,
        hint="Delete it, if the run's settings are those it had",
    ):
        kept = json.loads(path.read_bytes()) if path.is_file() else resolved
        if not isinstance(kept, dict):
            raise ValueError("it holds no table")
    # An older version kept relative paths as they were given.
    there = {table: keys for table, keys in kept.items() if table in resolved and isinstance(keys, dict)}
    kept = with_later_keys(kept | whole_in(run, there), resolved)
    difference = first_difference(_choices(resolved), _choices(kept)) or first_difference(resolved, kept)
    if difference:
        name, now, then = difference
        raise ConflictError(
            f"run `{run.root}` began with another `{name}`: {json.dumps(then)}, now {json.dumps(now)}",
            hint="Name another run with `--run`, or continue with the new settings with `--force`",
        )


def _choices(resolved: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide which tables there are: a table that is gone says less than they."""
    return {
        f"{table}.{key}": keys.get(key) if isinstance(keys := resolved.get(table), dict) else None
        for table, key in (("rollout", "env"), ("rollout", "engine"), ("train", "algo"))
    }


def _check_prices(session: Session) -> None:
    """Raise InputError for prices that an evaluation would end with, before anything is trained."""
    published = session.run.policies()
    # What is published first is called by the name that the run asks for.
    model = model_name(session.run.policy(published[0])) if published else session.config.policy
    read_prices(stage_config(session.settings, "eval").prices, model)


def _tell_collapse(session: Session, step: int, collapse: Collapse, numbers: dict[str, Any], *, stop: bool) -> None:
    """Tell that the policy collapses, and what to try.

    Raises:
        CollapseError: the loop is to stop there.
    """
    run, told = session.run, f"step {step}: {collapse}"
    MetricsLog(run.metrics, step).write("collapse", {"success/best": collapse.best, "success/last": collapse.last})
    hint = f"Try `--set {remedy(session.settings, numbers.get('train/lr') or 0.0)}`, in a run that begins with an "
    hint += "earlier policy (`--policy`); docs/offpolicy.md says what helps"
    if stop:
        raise CollapseError(told, hint=hint)
    warnings.warn(Notice(f"{told}. {hint}"), stacklevel=2)


def _evaluate(session: Session, version: int, config: LoopConfig, report: Report, *, force: bool = False) -> None:
    """Evaluate a policy if it is due; with `force`, again if it was evaluated under other settings."""
    due = config.eval_every and (version % config.eval_every == 0 or version >= config.steps)
    if due:
        for name in session.evaluated():
            policy = session.places.policy_of(version)
            try:
                session.eval(name, policy=policy)
            except ConflictError:
                if not force:
                    raise
                session.eval(name, policy=policy, force=True)
            lines = latest(read_metrics(session.run.metrics, tail_bytes=TAIL), "eval")
            if version in lines:
                report(version, {"stage": "eval", **lines[version]})


def step_numbers(run: Run, step: int, stages: Iterable[str] = STAGES) -> dict[str, Any]:
    """Return the newest numbers of the stages of a step."""
    numbers: dict[str, Any] = {}
    lines = read_metrics(run.metrics, tail_bytes=TAIL)
    for stage in (*stages, "loop"):
        found = latest(lines, stage).get(step, {})
        numbers |= {key if not key.startswith("timing/") else f"{stage}/{key}": value for key, value in found.items()}
    return numbers


def _seconds_since_start() -> float:
    """Return how long this process has run: imports, for the most part."""
    import psutil

    return time.time() - psutil.Process().create_time()
