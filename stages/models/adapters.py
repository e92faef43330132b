"""LoRA on a policy: which weights get adapters, and new ones.

Every linear layer gets one, and every matrix of the experts, which families keep as one
parameter of three dimensions. The head gets none, nor do routers: a step of theirs sends
tokens to other experts, and rollout's engine may route otherwise in its type anyway.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanoskyrl.stages.core.errors import SettingsError, did_you_mean, told_as
from nanoskyrl.stages.models.packing import hidden_states, is_packing, pack_of
from nanoskyrl.stages.models.policy import STARTER, STARTER_DIRECTORY, first_line, is_adapter, read_info
from nanoskyrl.stages.models.rows_alone import a_, decoder_of, embeddings_of, whole_weights

MAMBAS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Families whose fused kernels read `out_proj` past an adapter; peft refuses it there."""
HINT = "Leave layers out with `train.lora_exclude`, or train the whole model with `train.lora_rank = 0`"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """How adapters are made; what is None or empty is left to the policy's adapters, or to the defaults."""

    rank: int | None = None
    alpha: int | None = None
    targets: tuple[str, ...] = ()
    """Names, or ends of names, of layers and of experts' parameters; empty: all that can have adapters."""
    exclude: tuple[str, ...] = ()
    rslora: bool = False
    dropout: float = 0.0


def rank_of(model: Any, settings: LoraSettings = LoraSettings()) -> int | None:
    """Return the rank of the adapters that are on the model; None where it has none.

    Args:
        model: Of the policy.
        settings: What is asked for.

    Raises:
        SettingsError: it has other adapters than are asked for.
    """
    if not hasattr(model, "peft_config"):
        return None
    adapters = model.peft_config["default"]
    pairs = [
        ("rank", adapters.r, settings.rank),
        ("alpha", adapters.lora_alpha, settings.alpha),
        ("rslora", adapters.use_rslora, settings.rslora or None),
        ("dropout", adapters.lora_dropout, settings.dropout or None),
    ]
    if settings.targets or settings.exclude:
        found = Targets.of(model.get_base_model(), settings.targets, settings.exclude)
        has = set(_adapted(model))
        pairs.append(("targets", sorted(has), sorted({*found.modules, *found.parameters} - _lost(found, has))))
    for name, has, asked in pairs:
        if asked is not None and asked != has:
            raise SettingsError(
                f"the policy has adapters of {name} {has}, and `train.lora_{name}` is {asked}"
                if name != "targets"
                else "the policy has adapters on other layers than `train.lora_targets` and `train.lora_exclude` say",
                hint=f"Continue with its {name}, or begin another run",
            )
    return adapters.r


def _lost(targets: "Targets", adapted: set[str]) -> set[str]:
    """Return the layers that peft leaves out: where it knows experts under older names, such as gate_proj, it takes
    layers of shared experts and dense blocks for those, and adapts the experts in their place."""
    if not targets.parameters:
        return set()
    ends = {name.rpartition(".")[2] for name in adapted if name not in targets.parameters}
    return {name for name in targets.modules if name not in adapted and name.rpartition(".")[2] not in ends}


def _adapted(model: Any) -> Iterator[str]:
    """Yield the name, in the model without adapters, of every layer and parameter that has one."""
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_A"):
            plain = ".".join(part for part in name.split(".") if part != "base_layer")
            yield f"{plain}.{module.parameter_name}" if hasattr(module, "parameter_name") else plain


@dataclass(frozen=True, slots=True)
class Targets:
    """What gets adapters; names as in the model."""

    modules: list[str]
    parameters: list[str]
    """Of experts, [E, ...] each."""
    routers: list[str]
    """Linear layers that choose experts, which are left alone unless they are named."""

    @classmethod
    def of(cls, base: Any, targets: Sequence[str] = (), exclude: Sequence[str] = ()) -> "Targets":
        """Find them in a model without adapters.

        Args:
            base: A causal language model of transformers.
            targets: `train.lora_targets`.
            exclude: `train.lora_exclude`.

        Raises:
            SettingsError: a name fits nothing, or nothing is left.
        """
        from transformers.pytorch_utils import Conv1D

        head = base.get_output_embeddings()
        plain = dict(_without_wrappers(base))
        linear = [name for name, m in plain.items() if isinstance(m, nn.Linear | Conv1D) and m is not head]
        if base.config.get_text_config().model_type in MAMBAS:
            linear = [name for name in linear if not _fits(name, "out_proj")]
        experts = [
            f"{name}.{own}"
            for name, module in plain.items()
            if not isinstance(module, nn.modules.conv._ConvNd | nn.Linear)
            for own, parameter in module.named_parameters(recurse=False)
            if len(parameter) > 1 and "bias" not in own and "expert" in f"{name} {type(module).__name__}".lower()
            # DBRX lays its experts end to end.
            if parameter.ndim == 3 or (parameter.ndim == 2 and "experts" in name.split("."))
        ]
        routers = _routers(plain, linear, experts)
        for setting, names in (("targets", targets), ("exclude", exclude)):
            for name in names:
                if not any(_fits(each, name) for each in (*linear, *experts)):
                    ends = sorted({each.rpartition(".")[2] for each in (*linear, *experts)})
                    raise SettingsError(
                        f"`train.lora_{setting}` names `{name}`, which is no layer of {a_(base)}",
                        hint=did_you_mean(name, ends) or f"There are {', '.join(ends)}",
                    )

        def chosen(names: list[str]) -> list[str]:
            if targets:
                names = [each for each in names if any(_fits(each, name) for name in targets)]
            else:
                names = [each for each in names if each not in routers]
            return [each for each in names if not any(_fits(each, name) for name in exclude)]

        found = cls(chosen(linear), chosen(experts), routers)
        if not found.modules and not found.parameters:
            raise SettingsError(
                "no layer is left for adapters", hint="Name fewer in `train.lora_exclude`, or others in `lora_targets`"
            )
        return found


def _without_wrappers(base: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield a model's modules by the names that they had before any of them got an adapter."""
    for name, module in base.named_modules():
        parts = name.split(".")
        if not hasattr(module, "lora_A") and not any(part.startswith("lora_") for part in parts):
            yield ".".join(part for part in parts if part != "base_layer"), module


def _fits(name: str, asked: str) -> bool:
    return name == asked or name.endswith(f".{asked}")


def _routers(modules: dict[str, nn.Module], linear: list[str], experts: list[str]) -> list[str]:
    """Return the linear layers of a block of experts that give a number an expert, or one in all; or are so named."""
    counts: dict[str, int] = {}  # of experts, by block
    for name in experts:
        holder, _, own = name.rpartition(".")
        counts[holder.rpartition(".")[0]] = len(getattr(modules[holder], own))
    for name, module in modules.items():
        if name.endswith(".experts") and isinstance(module, nn.ModuleList):
            counts[name.rpartition(".")[0]] = len(module)
    found = []
    for name in linear:
        layer: Any = modules[name]
        parent = name.rpartition(".")[0]
        # The router lies in the block, or in a module of its own there.
        count = counts.get(parent) or counts.get(parent.rpartition(".")[0])
        sized = count and getattr(layer, "out_features", None) in (count, 1)
        # LongCat's gives numbers for experts that do nothing, too.
        if sized or (experts and {"router", "gate"} & set(name.split("."))):
            found.append(name)
    return found


def with_adapters(model: Any, policy: Path, settings: LoraSettings, *, seed: int) -> Any:
    """Return the model with new adapters, which change nothing yet.

    Args:
        model: Of the policy, without adapters.
        policy: Its directory.
        settings: With rank and alpha.
        seed: Of their random half.

    Raises:
        SettingsError: the policy was trained as a whole, the rank is past every layer, or experts would get dropout.
    """
    from peft import LoraConfig, get_peft_model

    rank, alpha = settings.rank, settings.alpha
    assert rank is not None
    assert alpha is not None
    info = read_info(policy)
    if info.parent is not None:
        raise SettingsError(
            f"`{policy}` was trained as a whole, and `train.lora_rank` is {rank}",
            hint="Continue with `train.lora_rank = 0`, or begin another run with this policy",
        )
    targets = Targets.of(model, settings.targets, settings.exclude)
    # Not the smallest layer: a small one would forbid every useful rank.
    sizes = [_narrow(model.get_submodule(name)) for name in targets.modules]
    sizes += [min(model.get_parameter(name).shape[-2:]) for name in targets.parameters]
    if rank > max(sizes):
        raise SettingsError(
            f"`train.lora_rank` is {rank}, past the {max(sizes)} of the model's largest layer",
            hint="Give less than that, such as 16, or train the whole model with 0",
        )
    if targets.parameters and settings.dropout:
        raise SettingsError(
            f"`train.lora_dropout` is {settings.dropout}, and adapters of experts have none",
            hint="Set it to 0, or leave experts out with `train.lora_exclude`",
        )

    def make(base: Any, modules: list[str]) -> Any:
        torch.manual_seed(seed)
        made = LoraConfig(
            r=rank, lora_alpha=alpha, lora_dropout=settings.dropout, use_rslora=settings.rslora, task_type="CAUSAL_LM",
            target_modules=modules, target_parameters=targets.parameters or None,
        )  # fmt: skip
        # In the base's type: products in float32 would cost more than all other work of the adapters. The optimizer
        # steps float32 copies.
        with told_as(
            SettingsError, "peft makes no such adapters", ValueError, TypeError, NotImplementedError, hint=HINT
        ):
            return get_peft_model(base, made, autocast_adapter_dtype=False)

    base, model = model, make(model, targets.modules)
    if lost := _lost(targets, set(_adapted(model))):
        if settings.targets:
            raise SettingsError(
                f"peft puts no adapters on `{sorted(lost)[0]}` of {a_(base)}: it takes the name for one of an expert's",
                hint="Leave such layers out of `train.lora_targets`",
            )
        model = make(model.unload(), [name for name in targets.modules if name not in lost])
    model.peft_config["default"].base_model_name_or_path = _base_name(info.source, policy)
    if targets.parameters:
        with whole_weights(model):
            _check_reached(model)
    return model


def _narrow(layer: Any) -> int:
    """Return the smaller size of a linear layer; weights in 4 bits do not have it as their shape."""
    return min(layer.in_features, layer.out_features) if hasattr(layer, "in_features") else min(layer.weight.shape)


def _check_reached(model: Any) -> None:
    """Refuse adapters of parameters that the model reads past them, and would never learn.

    Raises:
        SettingsError: names the first one.
    """
    base = model.get_base_model()
    wrapped = [
        (f"{name.replace('.base_layer', '')}.{module.parameter_name}", module.lora_B["default"].weight)
        for name, module in base.named_modules()
        if hasattr(module, "parameter_name") and hasattr(module, "lora_B")
    ]
    unreached, why = "", ""
    try:
        ids = torch.arange(1, 17, device=base.device)[None] % embeddings_of(base)
        mask = torch.ones_like(ids)
        pack = pack_of([ids.shape[1]], ids.shape[1], ids.device) if is_packing(base) else None
        states = hidden_states(decoder_of(base), ids, mask, pack)
        found = torch.autograd.grad(states.sum(), [weight for _, weight in wrapped], allow_unused=True)
        # In some layer: few tokens may all go to experts of a layer that do nothing, such as LongCat's.
        reached = {_end(name) for (name, _), slope in zip(wrapped, found, strict=True) if slope is not None}
        unreached = next((name for name, _ in wrapped if _end(name) not in reached), "")
    except (AttributeError, RuntimeError, TypeError) as error:
        unreached, why = wrapped[0][0], f" ({type(error).__name__}: {first_line(error)})"
    if unreached:
        raise SettingsError(
            f"{a_(base)} does not compute through adapters on `{unreached}`{why}",
            hint=f"Leave them out: `train.lora_exclude = {[_end(unreached)]}`",
        )


def _end(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _base_name(source: str | None, policy: Path) -> str:
    """Return where others find the base: a hub's id, or a folder that does not depend on where they stand.

    The place that the user named, and not the run's own copy: it is the same for every run that begins with it.
    """
    if source == STARTER:
        return str(STARTER_DIRECTORY)
    if source and Path(source).is_dir() and not is_adapter(Path(source)):
        return str(Path(source).resolve())
    if source and source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return source
    return str(policy.resolve())


def set_dropout(model: Any, *, on: bool) -> None:
    """Let the adapters' dropout draw, or let everything through; the base's own dropout is never on."""
    for name, module in model.named_modules():
        if ".lora_dropout." in name:
            module.training = on
