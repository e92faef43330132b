"""Plug-ins are names in dictionaries, looked up when they are used.

A name stands for `module:attribute`. `lookup` also takes a `module:attribute` of the
user's and asks installed packages for entry points in `nanoskyrl.<kind>s`.
"""

import contextlib
import functools
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nanoskyrl.stages.core.errors import NanoskyrlError, SettingsError, did_you_mean, is_out_of_memory

ENVS = {
    "text_math": "nanoskyrl.envs.worlds.text_math.environment:TextMath",
    "tool_use": "nanoskyrl.envs.worlds.tool_use.environment:ToolUse",
    "webshop_lite": "nanoskyrl.envs.worlds.webshop.environment:WebshopLite",
    "alfworld_lite": "nanoskyrl.envs.worlds.alfworld.environment:AlfworldLite",
    "openenv": "nanoskyrl.envs.outside.openenv:OpenEnv",
    "skyrl_gym": "nanoskyrl.envs.outside.skyrl_gym:SkyrlGym",
    "verifiers": "nanoskyrl.envs.outside.verifiers_env:Verifiers",
    "fleet": "nanoskyrl.envs.outside.fleet:Fleet",
}

ENGINES = {
    "hf": "nanoskyrl.stages.engines.hf:HfEngine",
    "vllm": "nanoskyrl.stages.engines.vllm.engine:VllmEngine",
    "openai": "nanoskyrl.stages.engines.openai:OpenaiEngine",
    "scripted": "nanoskyrl.stages.engines.scripted:ScriptedEngine",
}

BENCHES = {
    "hle": "nanoskyrl.eval.benchmarks.hle:Hle",
    "swe_bench_verified": "nanoskyrl.eval.benchmarks.swe_bench:SweBenchVerified",
    "swe_bench_multilingual": "nanoskyrl.eval.benchmarks.swe_bench:SweBenchMultilingual",
    "browsecomp": "nanoskyrl.eval.benchmarks.browsecomp:BrowseComp",
    "deepsearchqa": "nanoskyrl.eval.benchmarks.deepsearchqa:DeepSearchQa",
    "livecodebench": "nanoskyrl.eval.benchmarks.livecodebench:LiveCodeBench",
    "humaneval": "nanoskyrl.eval.benchmarks.humaneval:HumanEval",
    "mmlu": "nanoskyrl.eval.benchmarks.mmlu:Mmlu",
    "mmlu_pro": "nanoskyrl.eval.benchmarks.mmlu_pro:MmluPro",
    "gpqa": "nanoskyrl.eval.benchmarks.gpqa:Gpqa",
    "math": "nanoskyrl.eval.benchmarks.math:Math",
    "math500": "nanoskyrl.eval.benchmarks.math:Math500",
    "gsm8k": "nanoskyrl.eval.benchmarks.gsm8k:Gsm8k",
}
"""Benchmarks are environments whose tasks are for evaluation alone, so `lookup("env", ...)` finds them, too."""

ALGOS = {
    "ppo": "nanoskyrl.algos.surrogates.ppo:PPO",
    "grpo": "nanoskyrl.algos.surrogates.grpo:GRPO",
    "sapo": "nanoskyrl.algos.surrogates.sapo:SAPO",
    "gspo": "nanoskyrl.algos.surrogates.gspo:GSPO",
    "dapo": "nanoskyrl.algos.surrogates.dapo:DAPO",
    "dr_grpo": "nanoskyrl.algos.surrogates.dr_grpo:DR_GRPO",
    "rloo": "nanoskyrl.algos.surrogates.rloo:RLOO",
    "reinforce_pp": "nanoskyrl.algos.surrogates.reinforce_pp:REINFORCE_PP",
    "reinforce_pp_baseline": "nanoskyrl.algos.surrogates.reinforce_pp:REINFORCE_PP_BASELINE",
    "cispo": "nanoskyrl.algos.surrogates.cispo:CISPO",
    "dppo_tv": "nanoskyrl.algos.surrogates.dppo:DPPO_TV",
    "dppo_kl": "nanoskyrl.algos.surrogates.dppo:DPPO_KL",
    "gmpo": "nanoskyrl.algos.surrogates.gmpo:GMPO",
    "clip_cov": "nanoskyrl.algos.surrogates.cov:CLIP_COV",
    "kl_cov": "nanoskyrl.algos.surrogates.cov:KL_COV",
    "reinforce": "nanoskyrl.algos.surrogates.reinforce:REINFORCE",
}

ESTIMATORS = {
    "grpo": "nanoskyrl.algos.estimators.grpo:GRPO",
    "dr_grpo": "nanoskyrl.algos.estimators.dr_grpo:DR_GRPO",
    "rloo": "nanoskyrl.algos.estimators.rloo:RLOO",
    "gae": "nanoskyrl.algos.estimators.gae:GAE",
    "reinforce_pp": "nanoskyrl.algos.estimators.reinforce_pp:REINFORCE_PP",
    "reinforce_pp_baseline": "nanoskyrl.algos.estimators.reinforce_pp:REINFORCE_PP_BASELINE",
    "batch_std": "nanoskyrl.algos.estimators.batch_std:BATCH_STD",
    "maxrl": "nanoskyrl.algos.estimators.maxrl:MAXRL",
}

TOOL_FORMATS = {
    "hermes": "nanoskyrl.envs.tool_formats.hermes:HERMES",
    "qwen_xml": "nanoskyrl.envs.tool_formats.tagged:QWEN_XML",
    "glm": "nanoskyrl.envs.tool_formats.tagged:GLM",
    "llama_json": "nanoskyrl.envs.tool_formats.json_marks:LLAMA_JSON",
    "mistral": "nanoskyrl.envs.tool_formats.json_marks:MISTRAL",
    "deepseek": "nanoskyrl.envs.tool_formats.json_marks:DEEPSEEK",
    "lfm2": "nanoskyrl.envs.tool_formats.literals:LFM2",
    "gemma4": "nanoskyrl.envs.tool_formats.literals:GEMMA4",
    "harmony": "nanoskyrl.envs.tool_formats.channels:HARMONY",
    "atem": "nanoskyrl.envs.tool_formats.channels:ATEM",
    "own": "nanoskyrl.envs.tool_formats.own:OWN",
}
"""Markups of tool calls, in the order in which a chat template is tried with them."""

STAGES = {"filter": "nanoskyrl.stages.filter:FILTER"}
"""Stages that a run has where `run.stages` names them; those of every run are in `pipeline.py`."""

BUILTIN: Mapping[str, Mapping[str, str]] = {
    "env": ENVS,
    "bench": BENCHES,
    "engine": ENGINES,
    "algo": ALGOS,
    "estimator": ESTIMATORS,
    "tool_format": TOOL_FORMATS,
    "stage": STAGES,
}


@functools.cache
def package_version(name: str) -> str | None:
    """Return an installed package's version, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def entry_points(kind: str) -> dict[str, str]:
    """Return what installed packages offer for a kind, as name to `module:attribute`."""
    return _offered(tuple(sys.path)).get(f"nanoskyrl.{kind}s", {})


@functools.cache
def _offered(_path: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Return what packages on this path offer; it is read once, for that takes a tenth of a second."""
    found: dict[str, dict[str, str]] = {}
    for package in importlib.metadata.distributions():
        for point in package.entry_points:
            found.setdefault(point.group, {}).setdefault(point.name, point.value)  # the first on the path holds
    return found


def names(kind: str) -> list[str]:
    """Return every name that `lookup` takes for a kind, built in or installed."""
    return sorted({*BUILTIN[kind], *entry_points(kind)})


def lookup(kind: str, name: str) -> Any:
    """Import and return the plug-in of this kind and name.

    Raises:
        SettingsError: no such name, or its module does not import, or lacks the attribute.
    """
    kinds = ("env", "bench") if kind == "env" else (kind,)
    target = next((BUILTIN[one][name] for one in kinds if name in BUILTIN[one]), name if ":" in name else None)
    if target is None:  # last, because this reads a file of every installed package
        target = next((offered[name] for offered in map(entry_points, kinds) if name in offered), None)
    if target is None:
        raise SettingsError(
            f"unknown {kind} `{name}`",
            hint=did_you_mean(name, names(kind))
            or f"Choose one of {', '.join(names(kind))}, or name `module:attribute`",
        )
    return load_attribute(target, what=kind)


@contextlib.contextmanager
def plugin_errors(what: str) -> Iterator[None]:
    """Turn whatever a plug-in raises inside the block into one error that names it.

    Raises:
        SettingsError: the plug-in raised; errors of ours, and missing memory, go through as they are.
    """
    try:
        yield
    except NanoskyrlError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):  # which is seldom its fault
            raise
        raise SettingsError(
            f"{what} failed: {type(error).__name__}: {error}", hint="Fix it; SKYRL_TRACEBACK=1 shows where it happened"
        ) from error


def look_in(folders: Iterable[str]) -> None:
    """Let modules be imported from these folders, too; before the current one, which may hold others of the name."""
    current = sys.path.index(here) if (here := os.getcwd()) in sys.path else len(sys.path)
    sys.path[current:current] = [folder for folder in folders if folder not in sys.path]


def _folders_looked_in() -> str:
    ours = [path or os.getcwd() for path in sys.path if not path.startswith((sys.prefix, sys.base_prefix))]
    return ", ".join(f"`{path}`" for path in dict.fromkeys(ours) if os.path.isdir(path))


def load_attribute(target: str, *, what: str) -> Any:
    """Import `module:attribute`, with one clear error if that fails."""
    module_name, _, attribute = target.partition(":")
    if not module_name or module_name.startswith("."):
        raise SettingsError(f"`{target}` names no module to take {what} from", hint="Name it as `module:attribute`")
    try:
        with plugin_errors(f"importing `{module_name}`"):
            module = importlib.import_module(module_name)
    except SettingsError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        raise SettingsError(
            f"cannot import `{target}` as {what}: {error.__cause__}",
            hint=f"It is neither installed nor in {_folders_looked_in()}: check the spelling, install its package, or "
            "name its folder in `run.folders`",
        ) from error
    found = getattr(module, attribute, None) if attribute else None
    if found is None:
        raise SettingsError(
            f"module `{module_name}` has no `{attribute}` to use as {what}",
            hint=did_you_mean(attribute, vars(module)) or "Name it as `module:attribute`",
        )
    return found
