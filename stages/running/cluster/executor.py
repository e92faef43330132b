"""Parts of stages made by the workers of a Ray cluster; placement, restarts on other nodes and scaling are Ray's.

Workers come in teams that live and die together, each in a placement group: a RolloutWorker in a bundle of its own, and
the EnvWorkers that ask it. When one is lost, with its node or alone, the parts that its team had in hand are made by
others, and a new team is asked for; it joins when Ray has found room for it. Finished parts lie where they were
committed.
"""

import contextlib
import logging
import os
import socket
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from nanoskyrl.stages.core.config import Settings, stage_config
from nanoskyrl.stages.core.errors import EngineError, Notice, SettingsError
from nanoskyrl.stages.core.executor import Job
from nanoskyrl.stages.core.output import Output
from nanoskyrl.stages.engines.base import Engine, face_of
from nanoskyrl.stages.models.policy import first_line
from nanoskyrl.stages.running.cluster.config import RayConfig, shape_of
from nanoskyrl.stages.running.cluster.workers import EnvWorker, RolloutWorker, Surroundings, cause_of, remote_engine
from nanoskyrl.stages.running.whole_paths import module_folders


def connect(config: RayConfig, cpus: float) -> bool:
    """Join a cluster, or start one on this machine; return whether this call did.

    Args:
        config: Which one.
        cpus: That a cluster of our own must at least count: a worker may wait, but never for ever.

    Raises:
        SettingsError: Ray is not installed.
        EngineError: there is no cluster at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise SettingsError("Ray is not installed", hint="pip install 'nanoskyrl[ray]'") from error
    if ray.is_initialized():
        return False
    address = config.address or os.environ.get("RAY_ADDRESS") or "local"
    own: dict[str, Any] = {}
    if address == "local":
        own = {
            "num_cpus": max(os.cpu_count() or 1, int(-(-cpus // 1))), "include_dashboard": False,
            "object_store_memory": max(config.object_store_mib, 80) << 20,
        }  # fmt: skip
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():  # where nobody answers, Ray asks for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, namespace="nanoskyrl", logging_level=logging.ERROR, **own)
    except (OSError, ValueError, RuntimeError) as error:
        raise EngineError(
            f"no Ray cluster at `{address}`: {error}", hint="Start one with `ray start`, or set `ray.address = local`"
        ) from error
    return True


ANSWER_SECONDS = 1.0
"""How long others are waited for once one answers; who comes later is brought to the policy before its first part."""
Item = tuple[int, Any]
NO_PART = -1
"""Index of what a worker had in hand that was lost while it began."""


class Team:
    """A RolloutWorker, where tokens of a policy are asked for, and its EnvWorkers."""

    def __init__(
        self, serves: bool, env_workers: int, gpus: int, config: RayConfig, surroundings: Surroundings
    ) -> None:
        """Ask Ray for the place and the actors; both come when there is room.

        Args:
            serves: Whether it has a RolloutWorker.
            env_workers: How many of these.
            gpus: Of the RolloutWorker.
            config: The CPUs of each.
            surroundings: Of the driver.
        """
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Placed

        bundles = [{"CPU": config.rollout_worker_cpus, "GPU": float(gpus)}] * serves
        bundles += [{"CPU": config.env_worker_cpus}] * env_workers
        self.place = placement_group([{kind: n for kind, n in each.items() if n} or {"CPU": 0.01} for each in bundles])

        def actor(kind: type, bundle: int, *given: Any) -> Any:
            takes = {"num_cpus": bundles[bundle].get("CPU", 0.0), "num_gpus": bundles[bundle].get("GPU", 0.0)}
            strategy = Placed(self.place, placement_group_bundle_index=bundle)
            return ray.remote(kind).options(scheduling_strategy=strategy, **takes).remote(surroundings, *given)

        self.rollout_worker = actor(RolloutWorker, 0) if serves else None
        self.env_workers = [actor(EnvWorker, serves + n, self.rollout_worker) for n in range(env_workers)]

    def disband(self) -> None:
        """Give everything back; servers that an engine started end with its process (`core/children.py`)."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in (*self.env_workers, self.rollout_worker):
            if actor is not None:
                ray.kill(actor)
        remove_placement_group(self.place)


class RayExecutor:
    """Teams of workers that stay up from stage to stage."""

    def __init__(self, settings: Settings) -> None:
        """Start nothing.

        Raises:
            SettingsError: the workers do not go together.
        """
        self.settings, self.config, self.shape = settings, stage_config(settings, "ray"), shape_of(settings)
        run = stage_config(settings, "run")
        folders = (*run.folders, *module_folders(settings), os.getcwd())
        self.surroundings = Surroundings(folders=folders, trust_remote_code=run.trust_remote_code)
        self._teams: list[Team] = []
        self._started = self._serves = False
        self._lost = self._made = 0

    def teams(self, *, serves: bool) -> list[Team]:
        """Return the teams, with RolloutWorkers if they shall serve; called first, it joins the cluster."""
        if self._teams and serves and not self._serves:
            self._disband()
        if not self._teams:
            shape, self._serves = self.shape, serves
            self.join()
            sizes = (len(range(n, shape.env_workers, shape.teams)) for n in range(shape.teams))
            self._teams = [self._team(size) for size in sizes]
        return self._teams

    def join(self) -> None:
        """Join the cluster, or start it."""
        shape, config = self.shape, self.config
        cpus = shape.rollout_workers * config.rollout_worker_cpus + shape.env_workers * config.env_worker_cpus
        self._started = connect(config, cpus + shape.learner_workers) or self._started

    def _team(self, env_workers: int) -> Team:
        return Team(self._serves, env_workers, self.shape.gpus_each, self.config, self.surroundings)

    def engine(self, name: str, config: Any) -> Engine:
        """Return the engine that all RolloutWorkers are brought to, as `sync` does."""
        return remote_engine(name, self._on_own_gpus(config), self._serving)

    def _serving(self) -> list[Any]:
        """Return the RolloutWorkers that answer, at least one; those that were lost are replaced."""
        import ray

        while True:
            teams = [(team.rollout_worker, team) for team in self.teams(serves=True)]
            asked = {worker.answers.remote(): team for worker, team in teams if worker is not None}
            ray.wait(list(asked))
            done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
            found = []
            for ref in done:
                try:
                    found.append(ray.get(ref) and asked[ref].rollout_worker)
                except Exception as error:
                    if not _is_loss(cause_of(error)):
                        raise cause_of(error) from error
                    self._replace(asked[ref])
            if found:
                return found

    def _on_own_gpus(self, config: Any) -> Any:
        """Return an engine's settings for a worker, which sees no GPUs but its own."""
        on_gpus = getattr(config, "on_gpus", None)
        return config if on_gpus is None else replace(config, **on_gpus(range(self.shape.gpus_each)))

    def fill(self, out: Output, job: Job, items: Iterable[tuple[int, Any]]) -> list[str]:
        """Have a part made of every item, and return why some were left out; see `Executor`."""
        import ray

        serves = job.engine is not None and face_of(job.engine[0]).holds_policy
        if job.engine is not None:
            job = replace(job, engine=(job.engine[0], self._on_own_gpus(job.engine[1])))
        coming, again = iter(items), deque[Item]()
        following = next(coming, None)
        if following is None:
            return []
        teams, given = self.teams(serves=serves), ray.put(job)
        busy: dict[Any, tuple[Team, Any, Item | None]] = {}
        idle: list[tuple[Team, Any]] = []
        losses: dict[int, int] = {}
        left: list[str] = []

        def begin(team: Team) -> None:
            busy.update({worker.begin.remote(given): (team, worker, None) for worker in team.env_workers})

        def hand_out() -> None:
            nonlocal following
            while idle and (again or following is not None):
                team, worker = idle.pop()
                if again:  # what was lost comes first: everybody waits for the last part
                    item = again.popleft()
                else:
                    item, following = following, next(coming, None)
                assert item is not None
                busy[worker.make.remote(*item)] = (team, worker, item)

        for team in teams:
            begin(team)
        while following is not None or again or any(item for _, _, item in busy.values()):
            (done, *_), _ = ray.wait(list(busy))
            team, worker, item = busy.pop(done)
            try:
                found = ray.get(done)
            except Exception as error:
                cause = cause_of(error)
                if not _is_loss(cause):
                    raise cause from error
                mates = [busy.pop(ref)[2] for ref in [ref for ref, (whose, *_) in busy.items() if whose is team]]
                lost = [one for one in (item, *mates) if one is not None]
                self._count(lost, losses, cause)
                again += lost
                idle = [one for one in idle if one[0] is not team]
                begin(self._replace(team))
            else:
                idle.append((team, worker))
                if isinstance(found, list):
                    left += found
                elif found is not None:
                    out.note(found)
                    self._made += 1
            hand_out()
        return left

    def _count(self, lost: list[Item], losses: dict[int, int], error: BaseException) -> None:
        """Count what was lost with a worker.

        Raises:
            EngineError: it was lost too often, or workers are lost before they make anything.
        """
        self._lost += 1
        for index in [index for index, _ in lost] or [NO_PART]:
            losses[index] = losses.get(index, 0) + 1
            what, most = (f"part {index}", 1) if index != NO_PART else ("the job", self.shape.teams)
            if losses[index] > self.config.losses * most:
                raise EngineError(
                    f"{what} lost its worker {losses[index]} times: {first_line(error)}",
                    hint="See what Ray says of it above; finished parts are kept, and the same command resumes",
                ) from error
        warnings.warn(
            Notice(f"a worker was lost, and {len(lost)} parts are made again elsewhere: {first_line(error)}"),
            stacklevel=3,
        )

    def _replace(self, team: Team) -> Team:
        """Return a new team for one that lost a worker."""
        self._teams.remove(team)
        team.disband()
        self._teams.append(self._team(len(team.env_workers)))
        return self._teams[-1]

    def facts(self) -> Mapping[str, float | int | str | None]:
        """Return numbers about the work since it was last asked, for the log."""
        found = {
            "ray/parts": self._made, "ray/workers_lost": self._lost, "ray/env_workers": self.shape.env_workers,
            "ray/rollout_workers": self.shape.rollout_workers,
        }  # fmt: skip
        self._made = self._lost = 0
        return found

    def close(self) -> None:
        """Give the workers back; a cluster that was started here is stopped."""
        self._disband()
        if self._started:
            import ray

            ray.shutdown()
            self._started = False

    def _disband(self) -> None:
        for team in self._teams:
            with contextlib.suppress(Exception):  # the cluster may be gone
                team.disband()
        self._teams = []


def _is_loss(error: BaseException) -> bool:
    """Say whether a worker was lost, not its work wrong: another one may be luckier."""
    from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, WorkerCrashedError

    return isinstance(error, RayActorError | ObjectLostError | OutOfMemoryError | NodeDiedError | WorkerCrashedError)
