"""Which judge a benchmark asks, and the words it is asked in; `envs/graders/judge.py` does the asking."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanoskyrl.envs.base import VerifierTimeout
from nanoskyrl.envs.graders.judge import Judge, JudgeConfig, JudgeFailed
from nanoskyrl.eval.base import ToolsConfig
from nanoskyrl.stages.core.checked import FILE, PLACE
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.storage import read_named

TIMEOUT_SECONDS = 600.0
WORKERS = 16
"""Judgements asked for at once."""
MAX_TOKENS = 4096
"""Of a verdict, as HLE's authors give."""


@dataclass(frozen=True, kw_only=True)
class JudgedConfig(ToolsConfig):
    """What benchmarks with a judge take."""

    judge_endpoint: str | None = field(default=None, metadata=PLACE)
    """OpenAI-compatible address of the judge; None: no judge."""
    judge_model: str | None = None
    """Its name there; given with the address, and only with it."""
    judge_key_env: str = field(default="OPENAI_API_KEY", metadata=PLACE)
    """Environment variable that holds the key."""
    judge_prompt: str | None = field(default=None, metadata=FILE)
    """A text file with {question}, {response} and {correct_answer} that takes the place of our words."""


def judge_of(config: JudgedConfig) -> Judge | None:
    """Return the judge that the settings name, if any; its verdicts are written to no disk.

    Raises:
        SettingsError: an endpoint without a model, or a model without an endpoint.
    """
    if not config.judge_endpoint:
        # The manifest leaves addresses out: a model without one would look judged there.
        if config.judge_model:
            raise SettingsError(
                f"the judge `{config.judge_model}` has no endpoint to be asked at",
                hint="Name it with `--judge-endpoint`, or leave the judge's model out to compare words",
            )
        return None
    if not config.judge_model:
        raise SettingsError("a judge's endpoint needs its model", hint="Name it with `--judge-model`")
    return Judge(
        JudgeConfig(
            endpoint=config.judge_endpoint, model=config.judge_model, key_env=config.judge_key_env,
            # The authors' judge reasons: it takes neither a temperature nor the old name of the limit.
            temperature=None, max_tokens_name="max_completion_tokens", max_tokens=MAX_TOKENS,
            timeout_seconds=TIMEOUT_SECONDS, concurrency=WORKERS,
        )
    )  # fmt: skip


def verdict_of(
    judge: Judge, prompt: str, schema: Mapping[str, Any], check: Callable[[dict[str, Any]], None]
) -> dict[str, Any] | None:
    """Return the fields of a verdict, or None where none could be had, for whatever reason."""
    try:
        return judge.ask(prompt, schema, check)
    except (JudgeFailed, VerifierTimeout):
        return None


def filled(config: JudgedConfig, ours: str, **fields: str) -> str:
    """Return the judge's prompt: our words, or the user's file, with the fields in place.

    Raises:
        InputError: the file is missing.
    """
    named = config.judge_prompt
    template = ours if named is None else read_named(named, "prompt", "Name a text file")
    # Only the fields that are known: what a model wrote may hold braces, and templates hold JSON.
    return re.sub(r"\{([^{}]*)\}", lambda found: fields.get(found[1], found[0]), template)
