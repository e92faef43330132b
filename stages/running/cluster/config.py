"""How a run is spread over a Ray cluster: how many workers there are, and what each of them takes."""

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from msgspec import Meta

from nanoskyrl.stages.core.checked import PLACE, Checked, FiniteNonNegative, NonNegativeInt, PositiveInt
from nanoskyrl.stages.core.config import Settings, plugin_config, stage_config
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.engines.base import face_of

ENV_WORKERS = 2
"""To a RolloutWorker: while one plays its environments, another one's turns are generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig(Checked):
    """Which cluster, and how many workers."""

    address: str | None = field(default=None, metadata=PLACE)
    """HOST:PORT of a cluster, auto (the one that this machine belongs to), or local (one is started here, and stopped).
    None: $RAY_ADDRESS, else local."""
    rollout_workers: PositiveInt | None = field(default=None, metadata=PLACE)
    """Engines, each on GPUs of its own; None: as many as `loop.gpus_generate` has room for, at least 1."""
    env_workers: PositiveInt | None = field(default=None, metadata=PLACE)
    """Processes that play environments, judge and write parts; None: 2 to each RolloutWorker."""
    learner_workers: PositiveInt | None = field(default=None, metadata=PLACE)
    """Processes that train together; None: one for each of `loop.gpus_train`, at least 1."""
    env_worker_cpus: FiniteNonNegative = field(default=1.0, metadata=PLACE)
    """CPUs that Ray sets aside for an EnvWorker."""
    rollout_worker_cpus: FiniteNonNegative = field(default=1.0, metadata=PLACE)
    """The same for a RolloutWorker."""
    losses: Annotated[int, Meta(ge=0, le=1000)] = field(default=3, metadata=PLACE)
    """How often a part, or the training, may lose its workers before the command gives up."""
    object_store_mib: NonNegativeInt = field(default=256, metadata=PLACE)
    """Memory of the object store of a cluster that is started here, in MiB, at least 80: token data only passes
    through it."""


class ClusterShape(NamedTuple):
    """What a run asks of a cluster; `skyrl plan` shows it, and the executor takes it."""

    rollout_workers: int
    """0: the engine holds no policy, and the EnvWorkers ask it themselves."""
    gpus_each: int
    """Of a RolloutWorker."""
    env_workers: int
    learner_workers: int
    learner_gpus: int
    """0: training runs on CPUs."""

    @property
    def teams(self) -> int:
        """How many groups of workers there are that live and die together."""
        return self.rollout_workers or self.env_workers


def shape_of(settings: Settings) -> ClusterShape:
    """Return how many workers of each kind a run has, and the GPUs that each takes.

    Raises:
        SettingsError: GPUs do not make whole servers, or there are fewer EnvWorkers than RolloutWorkers.
    """
    config: RayConfig = stage_config(settings, "ray")
    place, engine = stage_config(settings, "loop").placement, stage_config(settings, "rollout").engine
    generate, train = (len(place.generate), len(place.train)) if place is not None else (0, 0)
    each = getattr(plugin_config(settings, "engine", engine), "tensor_parallel", 1)
    if generate % each:
        raise SettingsError(
            f"{generate} GPUs do not make whole servers of {each}",
            hint="Change `--gpus-generate` or `--tensor-parallel`",
        )
    servers = (config.rollout_workers or generate // each or 1) if face_of(engine).holds_policy else 0
    envs = config.env_workers or ENV_WORKERS * (servers or 1)
    if envs < servers:
        raise SettingsError(
            f"{servers} RolloutWorkers have {envs} EnvWorkers to ask them", hint="Raise `ray.env_workers`"
        )
    return ClusterShape(
        rollout_workers=servers, gpus_each=each if generate else 0, env_workers=envs,
        learner_workers=config.learner_workers or train or 1, learner_gpus=train,
    )  # fmt: skip
