"""What every text world is put through: nasty text, and the same again from the same task."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoskyrl.envs.base import Step, Task, check_observation, check_step

NASTY = (
    "", " ", "\n\n\n", "\x00", "a\x00b", "\ud800", "\udfff x", "\u202egnitset", "\u200b\u200b", "\ufeff", "9" * 5000,
    "-1", "1e999", "<action>", "</action>", "<action></action>", "<action><action>look</action>", "<action>look",
    "look</action>", "<action>look</action></action>", "<answer><action>1</action></answer>", "<think>", "</think>",
    "<think>look</think>", "```look```", "<tool_call>", '<tool_call>{"tool": "look"}', "{" * 100_000, "[" * 100_000,
    "()" * 50_000, "search[", "search]", "search[]", "search[[]]", "search[\n]", "search[\x00]", "search[a]]",
    "click[]", "click[[]]", "click[" * 5000, "click[buy now", "click[BUY NOW]", "search[" + "a " * 20_000 + "]",
    "search[" + "]" * 1000, "search[\ud800]", "search[the of and]", "go to", "go to ", "go to  1", "take from",
    "take a from b from c", "move x to", "heat with", "go to " + "x" * 100_000, "go to \u0664", "²", "٣",
    "open \ud83d", "look\r\nlook", "LOOK", "%s%n", "${jndi:x}", "'; drop table", "../../etc/passwd", "\\", "\\u0000",
    "{}", "[]", "null", "true", '{"a":', '{"command": "look"}', '"', "'", "`", "<|im_end|>", "<|endoftext|>",
)  # fmt: skip


def play(environment: Any, task: Task, actions: Sequence[str]) -> list[Step]:
    """Return the steps of one episode that begins anew."""
    episode = environment.start()
    check_observation(episode.reset(task, 0))
    steps = [episode.step(action) for action in actions]
    episode.close()
    return steps


def check_determinism(make: Callable[[], Any]) -> None:
    """Tasks, first observations and every step are the same in two environments, whatever the trajectory's seed."""
    one, two = make(), make()
    for split in ("train", "test"):
        assert list(one.tasks(split)) == list(two.tasks(split))
    assert len({task.task_id for task in one.tasks("train")}) == len(one.tasks("train"))
    for task in one.tasks("train")[:8]:
        first, second = one.start(), two.start()
        assert first.reset(task, 1) == second.reset(task, 2)
        for action in (*NASTY[:8], *one.expert(task)):
            assert first.step(action) == second.step(action)


def check_nasty_text(environment: Any) -> Counter[str]:
    """Whatever is written comes back as an observation and a kind of mistake; return the kinds."""
    kinds: Counter[str] = Counter()
    task = environment.tasks("train")[0]
    episode = environment.start()
    episode.reset(task, 0)

    def act(text: str) -> None:
        step = episode.step(text)
        check_step(step)
        assert step.observation
        kinds.update(call.error for call in step.tool_calls if call.error)
        if step.done:
            episode.reset(task, 0)

    for text in NASTY:
        act(text)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.text() | st.text().map(lambda t: f"<action>{t}</action>") | st.text().map(lambda t: f"click[{t}]"))
    def anything(text: str) -> None:
        act(text)

    anything()
    return kinds
