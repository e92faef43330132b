"""Settings of the stage `rollout`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanoskyrl.envs.memory import KINDS as MEMORIES
from nanoskyrl.stages.core.errors import SettingsError, check_numbers, check_words
from nanoskyrl.stages.core.trajectory import LOGPROBS_MODES, SPLITS

LEAST_TEMPERATURE, LEAST_TOP_P = 1e-3, 1e-6
"""Below these, float32 can no longer tell the logits apart."""
ROWS_PER_PART = 512
TEMPLATE_OWN = (
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are no template's."""
TRAJECTORY_MODES = ("auto", "whole", "step")
NO_LIMIT = 1 << 30
"""Tokens; the engine's context ends before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What is attempted, how often, and how it is sampled."""

    env: str | dict[str, float] = "text_math"
    """Name of the environment; its settings stand in the table of that name. Several by weight, such as
    { text_math = 1, tool_use = 2 }: of which one a prompt is, is drawn by the run's seed."""
    split: str = "train"
    """train or test."""
    engine: str = "hf"
    """hf, vllm, openai or scripted; its settings stand in the table of that name."""
    step: int = 0
    """Which step of the run this is: moves the cursor over the tasks, and the seeds."""
    seed: int = 0
    """The run's seed."""
    train_batch_size: int = 16
    """Prompts in a step."""
    n_samples_per_prompt: int = 16
    """Attempts at each prompt; together they are a group."""
    tasks: tuple[str, ...] = ()
    """Attempt exactly these task ids, in this order, in place of the next of the permutation."""
    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass; below 1, `train` refuses the rows."""
    top_k: int = 0
    """Candidates; 0 is off. If on, `train` refuses the rows."""
    logprobs_mode: str = "processed"
    """processed (of the distribution drawn from), raw, or recomputed (left null)."""
    max_turns: int = 8
    """Turns of an attempt."""
    max_generate_length: int = 512
    """Tokens sampled in one turn."""
    max_input_length: int | None = None
    """Longest prompt of a turn in tokens; None: the model's context."""
    max_sequence_length: int | None = None
    """Prompt and response together in tokens; None: the model's context."""
    trajectory_mode: str = "auto"
    """whole (a row an attempt), step (a row a turn), or auto: whole unless the chat template rewrites earlier turns."""
    memory: str = "full"
    """What later prompts show of earlier turns: full, last_turns, or summary, the environment's with the last turns."""
    memory_turns: int = 4
    """Turns that `last_turns` and `summary` show."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a turn as soon as they are written, such as </tool_call>; on engines hf, vllm and openai."""
    tool_format: str = "auto"
    """How a policy's calls of tools are read: auto (as its chat template writes them), a name of `skyrl list
    tool_format`, or module:attribute."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What the chat template is given beside the messages, such as {enable_thinking = false}; values may be tables."""
    rows_per_part: int = ROWS_PER_PART
    """Trajectories in a part, rounded up to whole groups; in a benchmark 16 unless it is set."""
    dynamic_sampling: bool | None = None
    """Sample in rounds until train_batch_size groups have spread in success; None: with dapo."""
    max_sample_batches: int = 30
    """Rounds of dynamic sampling after which it goes on with what there is."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant."""
        check_numbers(
            "rollout", self, "train_batch_size", "n_samples_per_prompt", "max_turns", "max_generate_length",
            "rows_per_part", "max_sample_batches", "memory_turns", least=1,
        )  # fmt: skip
        check_numbers(
            "rollout", self, "max_input_length", "max_sequence_length", least=1,
            hint="Leave it out for the model's context",
        )  # fmt: skip
        check_numbers("rollout", self, "step", least=0, hint="Steps count from 0")
        check_numbers("rollout", self, "temperature", least=0, hint="0 is greedy, 1 samples as the model says")
        check_numbers("rollout", self, "top_p", least=LEAST_TOP_P, most=1, hint="1 is off")
        check_numbers("rollout", self, "top_k", least=0, most=2**31 - 1, hint="0 is off")
        if isinstance(self.env, dict):
            check_weights(self.env)
            if self.tasks:
                raise SettingsError(
                    "`rollout.tasks` names tasks, and `rollout.env` several environments",
                    hint="Name the environment that they are of",
                )
        if twice := [task for task, count in Counter(self.tasks).items() if count > 1]:
            raise SettingsError(
                f"`rollout.tasks` names `{twice[0]}` twice", hint="More attempts at a task are `--n-samples-per-prompt`"
            )
        if 0 < self.temperature < LEAST_TEMPERATURE or self.temperature == float("inf"):
            raise SettingsError(
                f"`rollout.temperature` must be 0 or {LEAST_TEMPERATURE} to a finite number, not {self.temperature}",
                hint="0 is greedy",
            )
        if self.dynamic_sampling and self.n_samples_per_prompt < 2:
            raise SettingsError(
                "`rollout.dynamic_sampling` looks for spread, and `rollout.n_samples_per_prompt` is 1",
                hint="Give it at least 2, or set `rollout.dynamic_sampling = false`",
            )
        check_words(
            "rollout",
            self,
            split=SPLITS,
            logprobs_mode=LOGPROBS_MODES,
            trajectory_mode=TRAJECTORY_MODES,
            memory=MEMORIES,
        )
        if self.memory != "full" and self.trajectory_mode == "whole":
            raise SettingsError(
                f"`rollout.memory` is {self.memory}, so a prompt does not begin with the one before",
                hint="Leave `rollout.trajectory_mode` at auto, or set it to step",
            )
        check_template_arguments("rollout", self.chat_template_kwargs)
        if not all(self.stop_strings):
            raise SettingsError("`rollout.stop_strings` holds an empty text", hint="Leave it out")


def check_template_arguments(table: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a chat template that are ours to give, and those that no file of settings can hold.

    Raises:
        SettingsError: names the first.
    """
    for name, value in arguments.items():
        if _has_null(value):
            raise SettingsError(f"`{table}.chat_template_kwargs` has a null in `{name}`", hint="Leave it out")
        if name in TEMPLATE_OWN:
            raise SettingsError(
                f"`{table}.chat_template_kwargs` has `{name}`, which follows from the conversation", hint="Leave it out"
            )


def _has_null(value: Any) -> bool:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_null, inside))


def check_weights(weights: Mapping[str, float]) -> None:
    """Raise SettingsError unless these are environments with weights above 0."""
    if not weights:
        raise SettingsError("`rollout.env` is empty", hint="Write, for instance, env = { text_math = 1, tool_use = 2 }")
    for name, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise SettingsError(f"the weight of environment `{name}` is {weight}", hint="Give a number above 0")
