"""What the next stages would do, where, and how much memory they need; nothing is started."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.config import Settings, plugin_config, stage_config
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.core.runs import Run, RunConfig, is_published
from nanoskyrl.stages.engines.vllm.config import VllmConfig
from nanoskyrl.stages.engines.vllm.memory import choose_servers, kv_cache_bytes
from nanoskyrl.stages.learning.train_config import backbone_or_default, rank_or_default, strategy_or_default
from nanoskyrl.stages.looking.footprint import (
    BFLOAT16,
    FLOAT32,
    Bytes,
    MemoryUse,
    generation_memory,
    serving_memory,
    training_memory,
)
from nanoskyrl.stages.models.policy import count_parameters, find_base, is_adapter, resolve_policy
from nanoskyrl.stages.running.cluster.config import ClusterShape, shape_of
from nanoskyrl.stages.running.placement import Placement
from nanoskyrl.stages.running.places import Places

TRAINING_HINT = (
    "Lower `train.max_tokens_per_micro_batch`, raise `train.gradient_checkpointing` to 1, "
    "train with `train.lora_rank`, or spread it with `--gpus-train`"
)
GENERATION_HINT = "Lower `vllm.kv_cache_gib`, `vllm.servers_per_gpu` or `vllm.gpu_memory`"
HINTS = {
    "training": TRAINING_HINT,
    "generation": GENERATION_HINT,
    "generation and training": f"{TRAINING_HINT}. {GENERATION_HINT}",
}
"""What to do where a half does not fit."""


def plan(run: Run, settings: Settings) -> dict[str, Any]:
    """Return the next step, its policy, how it is trained, where, and estimates of memory.

    Raises:
        InputError: the policy is not there.
        SettingsError: what is asked for cannot fit where it is asked for.
    """
    import torch

    from nanoskyrl.stages.running.loop import LoopConfig

    config: RunConfig = stage_config(settings, "run")
    rollout, train = stage_config(settings, "rollout"), stage_config(settings, "train")
    looped: LoopConfig = stage_config(settings, "loop")
    step = run.next_step()
    Places(run, config).check_first_policy()
    published = run.policy(max(0, step - config.lag))
    policy = published if is_published(published) else resolve_policy(config.policy)
    base = find_base(policy) if is_adapter(policy) else policy
    shape, parameters = json.loads((base / "config.json").read_bytes()), count_parameters(base)
    rank = rank_or_default(train.lora_rank, parameters)
    rows = rollout.train_batch_size * rollout.n_samples_per_prompt
    gpus = _gpus()
    place = looped.placement
    on_ray = config.executor == "ray"
    if place is not None and not on_ray:  # a cluster's GPUs are counted over all of its hosts
        _check_there(place, len(gpus))
    on_gpu = bool(place.train) if place is not None else bool(gpus)
    processes = max(1, len(place.train)) if place is not None else 1
    backbone = backbone_or_default(stage_config(settings, "critic").backbone, lora=bool(rank))
    training = training_memory(
        train, shape, parameters, rank, on_gpu=on_gpu, processes=processes,
        critic=lookup("algo", train.algo).needs_critic and backbone == "own",
    )  # fmt: skip
    generating = _generating(settings, base, shape, parameters, place, gpus)
    strategy = strategy_or_default(train.strategy, parameters, lora=bool(rank))
    report = {
        "run": str(run.root),
        "next step": step,
        "policy": str(policy),
        "parameters": parameters,
        "environment": rollout.env
        if isinstance(rollout.env, str)
        else ", ".join(f"{name} (weight {weight:g})" for name, weight in rollout.env.items()),
        "rollout": f"{rows} trajectories ({rollout.train_batch_size} prompts) on `{rollout.engine}`",
        "train": f"{train.algo}, {'full fine-tuning' if rank == 0 else f'LoRA rank {rank}'}, "
        + ("one process" if processes == 1 else f"{processes} processes, {strategy}"),
        "devices": f"{len(gpus)} x {gpus[0][0]}" if gpus else f"CPU, threads: {torch.get_num_threads()}",
        "placement": _placement(place, config.lag),
    }
    if on_ray:
        report |= _workers(shape_of(settings))
    for half, memory in (("generation", generating), ("training", training)):
        report |= {f"{half}: {name}": Bytes(value) for name, value in memory.parts.items()}
        report[f"{half}: in all"] = memory.total
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    report["memory of this machine"] = Bytes(machine)
    if gpus:
        report["memory of a GPU"] = Bytes(min(memory for _, memory in gpus))
    _refuse_what_cannot_fit(place, gpus, machine, generating, training)
    return report


def _generating(
    settings: Settings,
    base: Path,
    shape: dict[str, Any],
    parameters: int,
    place: Placement | None,
    gpus: list[tuple[str, int]],
) -> MemoryUse:
    """Return what generation takes on each of its devices."""
    rollout = stage_config(settings, "rollout")
    on_gpu = bool(place.generate) if place is not None else bool(gpus)
    if rollout.engine == "vllm" and on_gpu:
        config: VllmConfig = plugin_config(settings, "engine", "vllm")
        config = replace(config, servers_per_gpu=choose_servers(base, config))
        weights = parameters * (FLOAT32 if config.dtype == "float32" else BFLOAT16) // config.tensor_parallel
        cache = kv_cache_bytes(base, config, cpu=False)
        device = min(memory for _, memory in gpus)
        return serving_memory(weights, config.servers_per_gpu or 1, cache, config.gpu_memory, device)
    length = rollout.max_sequence_length or shape.get("max_position_embeddings", 0)
    longest = min(rollout.max_generate_length * rollout.max_turns, length)
    return generation_memory(shape, parameters, longest, on_gpu=on_gpu)


def _refuse_what_cannot_fit(
    place: Placement | None, gpus: list[tuple[str, int]], machine: int, generating: MemoryUse, training: MemoryUse
) -> None:
    """Raise SettingsError where even the estimate is more than there is."""
    gpu = min((memory for _, memory in gpus), default=machine)
    if place is not None and (place.generate or place.train):
        # Taking turns on the same GPUs, each half is stopped for the other.
        wanted = {
            "training": (training.total, gpu if place.train else machine),
            "generation": (generating.total, gpu if place.generate else machine),
        }
    else:  # in one process, or side by side on the CPU
        wanted = {"generation and training": (Bytes(generating.total + training.total), gpu if not place else machine)}
    for name, (size, there) in wanted.items():
        if size > there:
            raise SettingsError(f"{name} would take about {size}, and there are {Bytes(there)}", hint=HINTS[name])


def _workers(shape: ClusterShape) -> dict[str, str]:
    """Return what is asked of a Ray cluster, in words."""
    gpus = f"{shape.gpus_each} GPU{'s' * (shape.gpus_each != 1)} each" if shape.gpus_each else "CPU"
    learns = "a GPU each" if shape.learner_gpus else "CPU"
    return {
        "RolloutWorkers": f"{shape.rollout_workers}, {gpus}" if shape.rollout_workers else "none: no policy is held",
        "EnvWorkers": f"{shape.env_workers}, CPU",
        "Learner": f"{shape.learner_workers} process{'es' * (shape.learner_workers != 1)}, {learns}",
    }


def _check_there(place: Placement, count: int) -> None:
    most = max((*place.generate, *place.train), default=-1)
    if most >= count:
        raise SettingsError(
            f"GPU {most} is asked for, and this machine has {count}", hint="`skyrl doctor` says what there is"
        )


def _placement(place: Placement | None, lag: int) -> str:
    if place is None:
        return "generation and training in turns, in one process"
    generate, train = (("GPU " + ",".join(map(str, of))) if of else "the CPU" for of in (place.generate, place.train))
    if not place.apart:
        return f"generation on {generate} and training on {train}, in turns: each is stopped for the other"
    how = f"at once, rollouts up to {lag} steps ahead" if lag else "one waits for the other: the lag is 0"
    return f"generation on {generate}, training on {train}, {how}"


def _gpus() -> list[tuple[str, int]]:
    """Return name and bytes of every GPU."""
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(each.name, each.total_memory) for each in found]
