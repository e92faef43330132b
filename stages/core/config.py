"""Settings: frozen dataclasses beside the code they set, filled from a file, then `--set`, then flags.

A file has one table for each stage, environment, engine and algorithm. An unknown key is
an error with a suggestion, also for the words other toolkits use; a value outside its type is
an error that names the key, the type or range and what was found.
"""

import ast
import contextlib
import dataclasses
import datetime
import difflib
import json
import re
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nanoskyrl.stages.core.checked import checked, hints_of, metadata_of, words_of
from nanoskyrl.stages.core.errors import InputError, Notice, SettingsError, did_you_mean, told_as
from nanoskyrl.stages.core.pipeline import OURS, Stage
from nanoskyrl.stages.core.registry import BUILTIN, entry_points, load_attribute, look_in, lookup
from nanoskyrl.stages.core.storage import expanded

Settings = dict[str, dict[str, Any]]
"""Table name to key to value, as given; not yet checked against a dataclass."""

C = TypeVar("C")

GONE = {
    "gspo.seq_log_ratio_max": 10.0,
    "gpqa.shuffle_seed": 0,
}
"""Settings of earlier versions, and the values that hold now: such a key is read, named once, and ignored."""
_told: set[str] = set()
_THERE = object()

CONFIGS = {
    **{name: str(stage.config) for name, stage in OURS.items()},
    "judge": "nanoskyrl.envs.graders.judge:JudgeConfig",
    "critic": "nanoskyrl.stages.learning.train_config:CriticConfig",
    "off_policy": "nanoskyrl.algos.off_policy:OffPolicyConfig",
    "loop": "nanoskyrl.stages.running.loop:LoopConfig",
    "run": "nanoskyrl.stages.core.runs:RunConfig",
    "code": "nanoskyrl.stages.core.code:CodeConfig",
    "ray": "nanoskyrl.stages.running.cluster.config:RayConfig",
    "hf": "nanoskyrl.stages.engines.base:HfConfig",
    "vllm": "nanoskyrl.stages.engines.vllm.config:VllmConfig",
}
"""Where the settings of each table stand, in modules that do not load torch; plug-ins name theirs as `Config`."""

_RIVALS = {
    "n_samples_per_prompt": "num_generations rollout.n n group_size",
    "train_batch_size": "generation_batch_size rollout_batch_size",
    "policy_mini_batch_size": "ppo_mini_batch_size global_batch_size",
    "update_epochs_per_batch": "ppo_epochs num_iterations",
    "eps_clip_low": "clip_ratio_low epsilon clip_ratio",
    "eps_clip_high": "clip_ratio_high epsilon_high",
    "kl_loss_coef": "beta",
    "kl_reward_coef": "kl_coef init_kl_coef",
    "kl_target": "advantage.target_kl",
    "loss_reduction": "loss_agg_mode loss_type",
    "max_generate_length": "max_completion_length max_response_length max_new_tokens max_tokens",
    "max_input_length": "max_prompt_length",
    "max_turns": "max_assistant_turns max_tool_calling_iterations",
    "clip_ratio_c": "dual_clip_c dual_clip delta",
    "lambd": "lam gae_lambda",
    "value_clip": "cliprange_value",
    "max_sample_batches": "max_num_gen_batches",
    "lr": "learning_rate",
    "lora_rank": "lora_r max_lora_rank",
    "lora_targets": "target_modules lora_target_modules target_parameters",
    "lora_exclude": "exclude_modules",
    "lora_rslora": "use_rslora",
    "gpu_memory": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "tensor_parallel": "tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size",
    "eager": "enforce_eager",
}
"""Our settings, and what TRL, verl and OpenRLHF call them."""
RIVAL_WORDS = {word: ours for ours, words in _RIVALS.items() for word in words.split()}


def config_class(table: str) -> type | None:
    """Return the dataclass of a table, or None if nothing has that name."""
    if table in CONFIGS:
        return load_attribute(CONFIGS[table], what="settings")
    kinds = ("env", "bench", "algo", "engine", "stage")
    kind = next((kind for kind in kinds if table in BUILTIN[kind] or ":" in table), None)
    kind = kind or next((kind for kind in kinds if table in entry_points(kind)), None)
    return settings_class(lookup(kind, table)) if kind else None


def settings_class(plugin: Any) -> Any:
    """Return the settings of a plug-in: those that a class or an algorithm has as `Config`, and a stage as `config`."""
    return plugin.config if isinstance(plugin, Stage) else getattr(plugin, "Config", None)


def tables() -> list[str]:
    """Return the names of all tables that are built in."""
    return list(
        dict.fromkeys(
            [*CONFIGS, *BUILTIN["env"], *BUILTIN["engine"], *BUILTIN["algo"], *BUILTIN["bench"], *BUILTIN["stage"]]
        )
    )


def read_file(path: Path) -> Settings:
    """Return the tables of a TOML or YAML file; modules are looked for in its `run.folders` from then on.

    Raises:
        InputError: it is missing or cannot be parsed.
        SettingsError: a table has an unknown name or is no table.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"there is no settings file `{path}`", hint="`skyrl init` writes one") from error
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise InputError(f"`{path}` is not a text file", hint="Name a TOML or YAML file") from error
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            value = yaml.load(text, _yaml_loader()) or {}
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise InputError(
                f"`{path}` is not YAML: {' '.join(str(error).split())}", hint="Fix the line it names"
            ) from error
    else:
        with told_as(InputError, f"`{path}` is not TOML", ValueError, RecursionError, hint="Fix the line it names"):
            value = tomllib.loads(text)
    if not isinstance(value, dict):
        raise SettingsError(f"`{path}` holds no tables", hint="Write tables such as [rollout]")
    value = {table: {} if keys is None else keys for table, keys in value.items()}  # YAML's empty table is null
    if isinstance(run := value.get("run"), dict):  # first: a table may be that of a plug-in there
        look_in(map(expanded, map(str, run.get("folders", ()))))
    for table, keys in value.items():
        if not isinstance(keys, dict):
            place, key = _place_of(str(table)) or ("run", str(table))
            raise SettingsError(
                f"`{table}` in `{path}` stands outside a table", hint=f"Put it into one: [{place}] has `{key}`"
            )
        if not all(isinstance(name, str) for name in (table, *keys)):
            raise SettingsError(
                f"`{table}` in `{path}` has a name that is no text", hint="Put names such as on into quotes"
            )
    return {table: known_keys(table, keys) for table, keys in value.items()}


def _yaml_loader() -> Any:
    """Return a loader that reads 1e-4 as a number, as YAML 1.2 and everybody else does."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            """Refuse a key that stands there twice, as TOML does; YAML would take the last in silence."""
            seen: set[str] = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    raise ValueError(f"line {key.start_mark.line + 1} has the key `{key.value}` a second time")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def parse_set(assignment: str) -> Settings:
    """Return the table that one `--set table.key=value` describes; the value is TOML, else text."""
    place, sign, text = assignment.partition("=")
    table, _, key = place.strip().rpartition(".")
    if not sign or not key:
        raise SettingsError(
            f"`--set {assignment}` is not `table.key=value`", hint="Write, for instance, `--set train.lr=1e-4`"
        )
    if not table:
        table, key_there = _place_of(key) or ("table", key)
        raise SettingsError(f"`{key}` needs its table", hint=f"Write `--set {table}.{key_there}={text}`")
    value = _parse_value(text.strip())
    if "." in table:  # a key of a setting that is itself a table
        outer, _, inner = table.partition(".")
        raise SettingsError(
            f"`{inner}` of [{outer}] is set as a whole", hint=f"Write `--set {outer}.{inner}={{{key}={text}}}`"
        )
    config = config_class(table) if value is None else None
    if config is not None and text.strip() in words_of(hints_of(config).get(key)):  # none, where a setting has the word
        value = text.strip()
    return {table: known_keys(table, {key: value})}


def _parse_value(text: str) -> Any:
    """Return what a value stands for: TOML, else JSON's or Python's spelling of it, else the text."""
    if text in ("null", "none", "None"):
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        return text if isinstance(value, datetime.date | datetime.time) else value
    except (ValueError, RecursionError):
        pass
    if text.startswith("{"):  # JSON's tables; all else that JSON writes is TOML, too
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    try:
        value = ast.literal_eval(text)
        return value if isinstance(value, bool | int | float) else text
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def merge(*sources: Mapping[str, Mapping[str, Any]]) -> Settings:
    """Return the tables of all sources; later ones win."""
    merged: Settings = {}
    for source in sources:
        for table, keys in source.items():
            merged.setdefault(table, {}).update(keys)
    return merged


def known_keys(table: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a table gives, without settings that are gone; raises for a table or key that does not exist."""
    check_keys(table, [key for key in keys if f"{table}.{key}" not in GONE])
    for name in (f"{table}.{key}" for key in keys):
        if name in GONE and name not in _told:
            _told.add(name)
            warnings.warn(Notice(f"`{name}` is no setting any more and is ignored: {GONE[name]} holds"), stacklevel=2)
    return {key: value for key, value in keys.items() if f"{table}.{key}" not in GONE}


def check_keys(table: str, keys: Iterable[str]) -> None:
    """Raise for a table or key that does not exist."""
    found = config_class(table)
    if found is None:
        raise SettingsError(
            f"unknown table `{table}`", hint=did_you_mean(table, tables()) or f"Choose one of {', '.join(tables())}"
        )
    known = {field.name: field for field in dataclasses.fields(found)}
    for key in keys:
        if key not in known:
            raise SettingsError(f"unknown key `{table}.{key}`", hint=_suggest(table, key, list(known)))
        if hint := known[key].metadata.get("of_run"):
            raise SettingsError(f"`{table}.{key}` follows from the run and cannot be set", hint=hint)


def _suggest(table: str, key: str, known: list[str]) -> str:
    word = RIVAL_WORDS.get(f"{table}.{key}") or RIVAL_WORDS.get(key)
    if word in known:
        return f"Did you mean `{table}.{word}`?"
    if word is None and (close := did_you_mean(key, known)):
        return close.replace("`", f"`{table}.", 1)
    if place := _place_of(key):
        return f"Did you mean `{'.'.join(place)}`?"
    return f"[{table}] has {', '.join(known)}"


def _place_of(key: str) -> tuple[str, str] | None:
    """Return table and name of the setting that a key most likely stands for, under our word or a rival's."""
    key = RIVAL_WORDS.get(key, key)
    configs = {table: config_class(table) for table in reversed(tables())}  # of two with the name, the first holds
    places = {field.name: table for table, found in configs.items() if found for field in dataclasses.fields(found)}
    close = difflib.get_close_matches(key, places, n=1, cutoff=0.75)
    return (places[close[0]], close[0]) if close else None


def build(config: type[C], values: Mapping[str, Any], table: str) -> C:
    """Return a settings dataclass from plain values, each checked against its type.

    Raises:
        SettingsError: names the key, the type it must have and what was found.
    """
    known = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    if unknown := next((key for key in values if key not in known), None):
        raise SettingsError(f"unknown key `{table}.{unknown}`", hint=_suggest(table, unknown, known))
    return config(**{key: checked(config, key, value, table) for key, value in values.items()})


def stage_config(settings: Mapping[str, Mapping[str, Any]], stage: str, **flags: Any) -> Any:
    """Return a stage's settings: its table, then the flags that are not None."""
    values = dict(settings.get(stage, {})) | {key: value for key, value in flags.items() if value is not None}
    found = config_class(stage)
    assert found is not None, stage
    return build(found, values, stage)


def plugin_config(settings: Mapping[str, Mapping[str, Any]], kind: str, name: str) -> Any:
    """Return the settings of a plug-in from the table of its name; None if it has none."""
    found = load_attribute(CONFIGS[name], what="settings") if name in CONFIGS else settings_class(lookup(kind, name))
    return None if found is None else build(found, settings.get(name, {}), name)


def to_plain(config: Any) -> dict[str, Any]:
    """Return a settings dataclass as JSON-ready values."""
    return dataclasses.asdict(config) if config is not None else {}


def row_settings(config: Any) -> dict[str, Any]:
    """Return the settings that can change the rows, as a manifest holds them: no places, and files by digest elsewhere.

    Of a command's words that are whole paths the names stay: where a program lies changes no row.
    """
    if config is None:
        return {}
    aside = metadata_of(type(config), "place") | metadata_of(type(config), "file")
    found = {key: value for key, value in to_plain(config).items() if key not in aside}
    for key in metadata_of(type(config), "command") & found.keys():
        found[key] = tuple(" ".join(_name(word) for word in text.split(" ")) for text in found[key])
    return found


def _name(word: str) -> str:
    return word.rpartition("/")[2] if word.startswith("/") else word


def with_later_keys(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings without keys that are gone, and with the default of every key that came since.

    Args:
        recorded: Tables of a run or a manifest.
        wanted: Tables of now; keys that they do not have are not added.
    """
    found = dict(recorded)
    for table, keys in wanted.items():
        held = recorded.get(table)
        if not isinstance(held, Mapping) or not isinstance(keys, Mapping):
            continue
        held = {key: value for key, value in held.items() if GONE.get(f"{table}.{key}", _THERE) != value}
        if held.keys() != keys.keys() and (config := config_class(table)) is not None:
            defaults = {key: value for key, value in to_plain(config()).items() if key in keys}
            # A place may have been recorded before it was known to change nothing.
            held = defaults | {key: value for key, value in held.items() if key not in metadata_of(config, "place")}
        found[table] = held
    return found
