"""Settings of the stage `rollout`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from nanoskyrl.stages.core.checked import (
    ONCE,
    PLACE,
    Checked,
    NonEmptyText,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.trajectory import LogprobsMode, Split

LEAST_TEMPERATURE, LEAST_TOP_P = 1e-3, 1e-6
"""Below these, float32 can no longer tell the logits apart."""
ROWS_PER_PART = 512
TEMPLATE_OWN = (
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are no template's."""
NO_LIMIT = 1 << 30
"""Tokens; the engine's context ends before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(Checked):
    """What is attempted, how often, and how it is sampled."""

    env: str | dict[str, float] = "text_math"
    """Name of the environment; its settings are in the table of that name. Several by weight, such as
    { text_math = 1, tool_use = 2 }: of which one a prompt is, is drawn by the run's seed."""
    split: Split = field(default="train", metadata=ONCE)
    """Which of the environment's tasks; those of test are not trained on."""
    engine: str = "hf"
    """hf, vllm, openai or scripted; its settings are in the table of that name."""
    step: NonNegativeInt = field(
        default=0, metadata={"of_run": "The next step of the run is taken; `--run` names another run"}
    )
    """Which step of the run this is: moves the cursor over the tasks, and the seeds."""
    seed: int = field(default=0, metadata={"of_run": "Set `run.seed`"})
    """The run's seed."""
    train_batch_size: PositiveInt = 16
    """Prompts in a step."""
    n_samples_per_prompt: PositiveInt = 16
    """Attempts at each prompt; together they are a group."""
    tasks: tuple[str, ...] = field(default=(), metadata=ONCE)
    """Attempt exactly these task ids, in this order, in place of the next of the permutation."""
    temperature: NonNegativeFloat = 1.0
    """Logits are divided by it; 0 is greedy, 1 samples as the model says."""
    top_p: Annotated[float, Meta(ge=LEAST_TOP_P, le=1)] = 1.0
    """Nucleus mass; 1 is off. Below 1, `train` refuses the rows."""
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Candidates; 0 is off. If on, `train` refuses the rows."""
    logprobs_mode: LogprobsMode = "processed"
    """processed (of the distribution drawn from), raw, or recomputed (left null)."""
    max_turns: PositiveInt = 8
    """Turns of an attempt."""
    max_generate_length: PositiveInt = 512
    """Tokens sampled in one turn."""
    max_input_length: PositiveInt | None = None
    """Longest prompt of a turn in tokens; None: the model's context."""
    max_sequence_length: PositiveInt | None = None
    """Prompt and response together in tokens; None: the model's context."""
    trajectory_mode: Literal["auto", "whole", "step"] = "auto"
    """whole (a row an attempt), step (a row a turn), or auto: whole unless the chat template rewrites earlier turns."""
    memory: Literal["full", "last_turns", "summary"] = "full"
    """What later prompts show of earlier turns: full, last_turns, or summary, the environment's with the last turns."""
    memory_turns: PositiveInt = 4
    """Turns that `last_turns` and `summary` show."""
    stop_strings: tuple[NonEmptyText, ...] = ()
    """Texts that end a turn as soon as they are written, such as </tool_call>; on engines hf, vllm and openai."""
    tool_format: str = "auto"
    """How a policy's calls of tools are read: auto (as its chat template writes them), a name of `skyrl list
    tool_format`, or module:attribute."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What the chat template is given beside the messages, such as {enable_thinking = false}; values may be tables."""
    rows_per_part: PositiveInt = ROWS_PER_PART
    """Trajectories in a part, rounded up to whole groups; in a benchmark 16 unless it is set."""
    concurrency: PositiveInt = field(default=32, metadata=PLACE)
    """Episodes of the environment that step at once, on every engine; one that says `serial = True` steps alone."""
    dynamic_sampling: bool | None = None
    """Sample in rounds until train_batch_size groups have spread in success; None: with dapo."""
    max_sample_batches: PositiveInt = 30
    """Rounds of dynamic sampling after which it continues with what there is."""

    def check(self) -> None:
        """Refuse settings that do not go together, and what no file of settings can hold."""
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
        if self.memory != "full" and self.trajectory_mode == "whole":
            raise SettingsError(
                f"`rollout.memory` is {self.memory}, so a prompt does not begin with the one before",
                hint="Leave `rollout.trajectory_mode` at auto, or set it to step",
            )
        check_template_arguments("rollout", self.chat_template_kwargs)


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
            raise SettingsError(f"the weight of environment `{name}` must be above 0, not {weight}")
