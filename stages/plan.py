"""What the next stages would do, where, and how much memory they need; nothing is started."""

import json
import os
from dataclasses import dataclass
from typing import Any

from nanoskyrl.stages.config import Settings, stage_config
from nanoskyrl.stages.errors import SettingsError
from nanoskyrl.stages.placement import Placement
from nanoskyrl.stages.policy import count_parameters, find_base, is_adapter, resolve_policy
from nanoskyrl.stages.runs import Run, RunConfig
from nanoskyrl.stages.session import check_first_policy
from nanoskyrl.stages.train_config import DEFAULT_LORA_RANK, FULL_BELOW, TrainConfig

GIB = 1 << 30
FLOAT32, BFLOAT16 = 4, 2
LOGITS_AT_ONCE = {False: 1 << 25, True: 1 << 27}
"""On a CPU and on a GPU, as in `nanoskyrl.stages.logprobs`, which is not imported here because it loads torch."""
LAYER_NUMBERS = 24
"""Numbers of hidden size that one token leaves in a layer beside what its MLP leaves: states, norms, heads."""
SEQUENCES = 16
"""A server ought to hold so many sequences at once, or it hardly batches."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device, by what takes them."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.parts.values())


def plan(run: Run, settings: Settings) -> dict[str, Any]:
    """Return the next step, its policy, how it is trained, where, and estimates of memory.

    Raises:
        InputError: the policy is not there.
        SettingsError: what is asked for cannot fit where it is asked for.
    """
    from nanoskyrl.stages.loop import LoopConfig

    config: RunConfig = stage_config(settings, "run")
    rollout, train = stage_config(settings, "rollout"), stage_config(settings, "train")
    looped: LoopConfig = stage_config(settings, "loop")
    step = run.next_step()
    check_first_policy(run, config.policy)
    published = run.policy(max(0, step - config.lag))
    policy = published if published.is_dir() else resolve_policy(config.policy)
    base = find_base(policy) if is_adapter(policy) else policy
    shape, parameters = json.loads((base / "config.json").read_bytes()), count_parameters(base)
    rank = _rank(train, parameters)
    rows = rollout.train_batch_size * rollout.n_samples_per_prompt
    gpus = _gpus()
    place = looped.placement
    if place is not None:
        _check_there(place, len(gpus))
    on_gpu = bool(place.train) if place is not None else bool(gpus)
    processes = max(1, len(place.train)) if place is not None else 1
    training = training_memory(train, shape, parameters, rank, on_gpu=on_gpu, processes=processes)
    length = (rollout.max_sequence_length or 0) or shape.get("max_position_embeddings", 0)
    generating = generation_memory(
        shape, parameters, min(rollout.max_generate_length * rollout.max_turns, length), on_gpu=on_gpu
    )
    report = {
        "run": str(run.root),
        "next step": step,
        "policy": str(policy),
        "parameters": f"{parameters:,}",
        "environment": rollout.env,
        "rollout": f"{rows} trajectories ({rollout.train_batch_size} prompts) on `{rollout.engine}`",
        "train": f"{train.algo}, {'full fine-tuning' if rank == 0 else f'LoRA rank {rank}'}, "
        + ("one process" if processes == 1 else f"{processes} processes, {_strategy(train, parameters, rank)}"),
        "devices": f"{len(gpus)} x {gpus[0][0]}" if gpus else f"CPU, {_threads()} threads",
        "placement": _placement(place, config.lag),
    }
    for half, memory in (("generation", generating), ("training", training)):
        report |= {f"{half}: {name}": _size(value) for name, value in memory.parts.items()}
        report[f"{half}: in all"] = _size(memory.total)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    report["memory of this machine"] = _size(machine)
    if gpus:
        report["memory of a GPU"] = _size(min(memory for _, memory in gpus))
    _refuse_what_cannot_fit(place, gpus, machine, generating, training)
    return report


def training_memory(
    train: TrainConfig, shape: dict[str, Any], parameters: int, rank: int, *, on_gpu: bool, processes: int
) -> Memory:
    """Return what one process of training takes.

    Args:
        train: Its settings.
        shape: The model's config.
        parameters: Of the model.
        rank: Of adapters; 0: all of it learns.
        on_gpu: Whether bfloat16 is the default.
        processes: How many share the work.
    """
    half = train.dtype == "bfloat16" or (train.dtype == "auto" and on_gpu)
    size = BFLOAT16 if half else FLOAT32
    hidden, layers = shape.get("hidden_size", 0), shape.get("num_hidden_layers", 0)
    inner, vocabulary = shape.get("intermediate_size", 4 * hidden), shape.get("vocab_size", 0)
    # Adapters: two matrices beside each of a layer's seven.
    learnt = layers * rank * (7 * hidden + 3 * (hidden + inner)) if rank else parameters
    strategy = _strategy(train, parameters, rank) if processes > 1 else "one"
    shared = {"zero3": processes, "zero2": 1}.get(strategy, 1)
    states = processes if strategy.startswith("zero") else 1
    tokens = train.max_tokens_per_micro_batch
    again = train.gradient_checkpointing
    again = float(parameters >= FULL_BELOW) if again is None else again
    # Layers that are computed again keep their input; one at a time has all of its numbers.
    a_layer = tokens * (LAYER_NUMBERS * hidden + 5 * inner) * size
    kept = layers * (1 - again) * a_layer + layers * again * tokens * hidden * size + (a_layer if again else 0)
    moments = 2 * (1 if train.optimizer == "adamw_8bit" else FLOAT32)
    weights = parameters * (0.56 if train.quantization else size) / shared
    return Memory({
        "weights": weights,
        "gradients": learnt * FLOAT32 / states,
        "optimizer": learnt * (moments + (FLOAT32 if half else 0)) / states,
        "activations, at most": kept,
        "logits of a chunk, at most": 3 * min(tokens * vocabulary, LOGITS_AT_ONCE[on_gpu]) * FLOAT32,
    })  # fmt: skip


def generation_memory(shape: dict[str, Any], parameters: int, length: int, *, on_gpu: bool) -> Memory:
    """Return what one generation server takes at the least: weights, and keys and values of a few sequences."""
    size = BFLOAT16 if on_gpu else FLOAT32
    heads = shape.get("num_attention_heads", 1)
    head = shape.get("head_dim") or shape.get("hidden_size", 0) // max(1, heads)
    token = 2 * shape.get("num_hidden_layers", 0) * (shape.get("num_key_value_heads") or heads) * head * size
    return Memory({
        "weights": parameters * size, f"keys and values of {SEQUENCES} sequences": SEQUENCES * length * token,
    })  # fmt: skip


def _refuse_what_cannot_fit(
    place: Placement | None, gpus: list[tuple[str, int]], machine: int, generating: Memory, training: Memory
) -> None:
    """Raise SettingsError where even the estimate is more than there is."""
    turns = place is None or not place.apart
    on_gpu = bool(gpus) and (place is None or bool(place.train))
    there = min((memory for _, memory in gpus), default=machine) if on_gpu else machine
    # Taking turns on named GPUs, each half is stopped for the other; in one process both stay.
    wanted = {"training": training.total, "generation": generating.total}
    if (place is None and turns) or not on_gpu:
        wanted = {"generation and training": generating.total + training.total}
    for name, size in wanted.items():
        if size > there:
            raise SettingsError(
                f"{name} would take about {_size(size)}, and there are {_size(there)}",
                hint="Lower `train.max_tokens_per_micro_batch`, raise `train.gradient_checkpointing` to 1, train with "
                "`train.lora_rank`, or spread it with `--gpus-train`",
            )


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


def _rank(train: TrainConfig, parameters: int) -> int:
    return train.lora_rank if train.lora_rank is not None else (0 if parameters < FULL_BELOW else DEFAULT_LORA_RANK)


def _strategy(train: TrainConfig, parameters: int, rank: int) -> str:
    if train.strategy != "auto":
        return train.strategy
    return "ddp" if rank or parameters < FULL_BELOW else "zero3"


def _gpus() -> list[tuple[str, int]]:
    """Return name and bytes of every GPU."""
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(each.name, each.total_memory) for each in found]


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.1f} MiB"
