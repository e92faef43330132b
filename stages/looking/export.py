"""A policy of a run as a directory for others: what transformers, peft and vLLM load, with a model card."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanoskyrl.stages.core.checked import Checked
from nanoskyrl.stages.core.errors import InputError, OutputError, SettingsError
from nanoskyrl.stages.core.leftovers import remove_leftovers, scratch_beside
from nanoskyrl.stages.core.manifest import Manifest, is_finished, read_manifest
from nanoskyrl.stages.core.runs import NUMBER, Run
from nanoskyrl.stages.core.storage import as_path, as_usual, make_directory, sync_tree, write_errors
from nanoskyrl.stages.engines.task_order import weights_of
from nanoskyrl.stages.looking.eval_report import summary_of
from nanoskyrl.stages.models.policy import (
    check_policy,
    check_trained,
    is_adapter,
    policy_digest,
    policy_files,
    read_info,
)

CARD = "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig(Checked):
    """What is written."""

    merge: bool = False
    """Write the whole model that an adapter makes of its base; a whole model is what it is."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """float32, bfloat16 or float16; None: as the run has it."""


def policy_named(name: str) -> tuple[Run, int]:
    """Return the run and the version that `RUN` or `RUN@N` names; the newest without N.

    Raises:
        InputError: it is not there.
    """
    root, at, number = name.rpartition("@")
    if not at or as_path(name).is_dir():
        root, number = name, ""
    if number and not NUMBER.fullmatch(number):
        raise SettingsError(f"`{name}` names no policy", hint="Write RUN@N, such as runs/default@3")
    run = Run(as_path(root))
    versions = run.policies()
    if not versions:
        raise InputError(f"`{root}` is no run with a published policy", hint="Name a run; `skyrl sync` publishes")
    version = int(number) if number else versions[-1]
    if version not in versions:
        raise InputError(
            f"run `{root}` has no policy {version}",
            hint=f"It has {versions[0]} to {versions[-1]}, the newest without @N",
        )
    return run, version


def export(run: Run, version: int, output: Path, config: ExportConfig = ExportConfig()) -> Path:
    """Write a policy of a run as a Hugging Face directory that other users may read.

    Args:
        run: Its run.
        version: N of `policies/N`.
        output: A directory that is not there yet, or is empty.
        config: Whether adapters are merged, and the type of the weights.

    Returns:
        The directory.

    Raises:
        InputError: the policy does not load.
        OutputError: something is there, or it cannot be written.
    """
    policy = run.policy(version)
    check_policy(policy)
    check_trained(run, version)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OutputError(f"`{output}` is there already", hint="Name another directory, or delete it")
    make_directory(output.parent)
    remove_leftovers(output.parent)
    with scratch_beside(output) as scratch:
        place = scratch / "model"
        place.mkdir()
        _write_weights(policy, place, config)
        with write_errors(output):
            (place / CARD).write_text(card(run, version, adapter=is_adapter(place)), encoding="utf-8")
            for file in place.iterdir():
                as_usual(file)
            sync_tree(place)
            if output.is_dir():
                output.rmdir()
            place.rename(output)
    return output


def _write_weights(policy: Path, place: Path, config: ExportConfig) -> None:
    """Write the files of a policy, in another type or merged if that is asked for."""
    import shutil

    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    from nanoskyrl.stages.models.loading import load_model
    from nanoskyrl.stages.models.merging import copy_frame, merge_adapter

    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    adapter = is_adapter(policy)
    if adapter and config.merge:
        merge_adapter(policy, place, dtype=dtype)
        return
    with write_errors(place, SafetensorError):
        if dtype is not None and not adapter:
            load_model(policy, dtype=dtype, device="cpu").save_pretrained(place)
            copy_frame(policy, place)
            return
        for file in policy_files(policy):
            shutil.copyfile(file, place / file.name)
        if dtype is not None:
            for file in place.glob("*.safetensors"):
                save_file({name: value.to(dtype) for name, value in load_file(file).items()}, file, {"format": "pt"})


def card(run: Run, version: int, *, adapter: bool) -> str:
    """Return a model card that names the run, its data, the algorithm and the evaluations.

    Args:
        run: Its run.
        version: N of `policies/N`.
        adapter: Whether what is written is an adapter.
    """
    info = read_info(run.policy(version))
    # `starter` and folders of a machine are no names on a hub.
    source = info.source or read_info(run.policy(0)).source
    on_hub = source and source.count("/") == 1 and not as_path(source).exists()
    head = [
        "---",
        f"library_name: {'peft' if adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags: [reinforcement-learning, nanoskyrl]",
        *([f"base_model: {source}"] if on_hub else []),
        "---",
    ]
    name = run.root.resolve().name
    facts = {
        "Run": f"`{name}`, policy {version}",
        "Made from": f"`{source or 'unknown'}`",
        "Digest of the policy": f"`{policy_digest(run.policy(version))}`",
        **_data(_manifest(run, version - 1, "rollout")),
        **_algorithm(run, version),
    }
    lines = [
        *head, "", f"# {name}, policy {version}", "",
        "Trained with reinforcement learning by nanoskyrl. The digest names the run's own copy of these weights.", "",
        "| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in facts.items()), "",
        "## Evaluation", "", *_evaluations(run, version),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _manifest(run: Run, step: int, stage: str) -> Manifest | None:
    """Return the manifest of a stage; None where there is none any more."""
    place = run.stage(step, stage)
    return read_manifest(place) if step >= 0 and is_finished(place) else None


def _data(rollout: Manifest | None) -> dict[str, str]:
    if rollout is None:
        return {}
    asked = rollout.settings["rollout"]
    files = {key: digest for key, digest in rollout.inputs.items() if key.endswith(("data", "corpus", "prompt"))}
    return {
        **{
            f"Environment `{name}`": f"weight {weight:g}, split `{asked['split']}`, "
            + _settings(rollout.settings.get(name) or {})
            for name, weight in weights_of(asked["env"]).items()
        },
        "Attempts": f"{asked['train_batch_size']} prompts x {asked['n_samples_per_prompt']} a step, "
        f"temperature {asked['temperature']:g}",
        **{f"Digest of `{key}`": f"`{digest}`" for key, digest in files.items()},
    }


def _algorithm(run: Run, version: int) -> dict[str, str]:
    trains = [manifest for step in range(version) if (manifest := _manifest(run, step, "train")) is not None]
    if not trains:
        return {}
    last = trains[-1]
    name, facts = last.settings["train"]["algo"], last.facts
    steps = sum(int(manifest.facts["optimizer_steps"]) for manifest in trains)
    how = f"LoRA of rank {facts['lora_rank']}" if facts["lora_rank"] else "the whole model"
    return {
        "Algorithm": f"`{name}`, {_settings(last.settings.get(name) or {})}",
        "Training": f"{how}, {len(trains)} steps, {steps} optimizer steps, learning rate {facts['lr']:g} at the end",
    }


def _settings(table: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in table.items() if value is not None) or "without settings"


def _evaluations(run: Run, version: int) -> list[str]:
    finished = run.evaluations(f"{version:08d}")
    if not finished:
        return ["This policy was not evaluated in its run."]
    lines = ["| | Success | 95% interval | Tasks | Samples |", "| --- | --- | --- | --- | --- |"]
    for place in finished:
        numbers = summary_of(place)
        success = "not known" if numbers["success"] is None else f"{numbers['success']:.3f}"
        low, high = numbers["success_95"] or (None, None)
        between = "" if low is None else f"{low:.3f} to {high:.3f}"
        lines.append(f"| `{place.name}` | {success} | {between} | {numbers['tasks']} | {numbers['samples']} |")
    return lines
