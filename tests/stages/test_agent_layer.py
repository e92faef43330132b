"""What a policy is shown of earlier turns, and texts that end a turn."""

import numpy as np
import pytest
from tolerances import LOGITS, PASS, assert_close

from nanoskyrl.envs.base import Observation, Step, Task
from nanoskyrl.envs.memory import Memory
from nanoskyrl.envs.worlds.tool_use.environment import ToolUse, ToolUseConfig
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.metrics import Stopwatch
from nanoskyrl.stages.core.rows import to_table
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.engines.base import Generation, HfConfig, Request, SamplingParams, TokenEngine
from nanoskyrl.stages.engines.hf import HfEngine
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.engines.turns import Attempt, Identity, TurnLimits, play
from nanoskyrl.stages.models.policy import STARTER, resolve_policy
from nanoskyrl.stages.rollout import rollout


@pytest.fixture(scope="module")
def engine():
    found = HfEngine(HfConfig(device="cpu"))
    found.load(resolve_policy(STARTER))
    return found


def message(role, content):
    return {"role": role, "content": content}


FIRST = [message("system", "s"), message("user", "q")]
TURNS = [[message("assistant", f"a{i}"), message("tool", f"o{i}")] for i in range(3)]


@pytest.mark.parametrize(
    ("memory", "summary", "shown"),
    [
        (Memory(), "ignored", "s q a0 o0 a1 o1 a2 o2"),
        (Memory(kind="last_turns", turns=1), None, "s q a2 o2"),
        (Memory(kind="last_turns", turns=9), None, "s q a0 o0 a1 o1 a2 o2"),
        (Memory(kind="summary", turns=1), "knows", "s q\n\nSo far: knows a2 o2"),
        (Memory(kind="summary", turns=2), None, "s q a1 o1 a2 o2"),
    ],
)
def test_what_each_memory_shows(memory, summary, shown):
    assert " ".join(m["content"] for m in memory.view(FIRST, TURNS, summary)) == shown
    assert [m["content"] for m in FIRST] == ["s", "q"]


class Counter:
    """Counts turns and keeps a summary of them."""

    def start(self):
        self.turn = 0
        return self

    def reset(self, task, seed):
        return Observation(messages=[message("user", "begin")])

    def step(self, action):
        self.turn += 1
        reply = [message("user", f"seen {self.turn}")]
        return Step(messages=reply, done=self.turn == 4, summary=f"{self.turn} turns")

    def close(self):
        """Nothing is held."""


class Silent(TokenEngine):
    """Says `hi` every time, and keeps what it was asked."""

    def __init__(self, renderer):
        self.renderer, self.prompts, self.context_length = renderer, [], 4096

    @property
    def stop_ids(self):
        return frozenset({self.renderer.turn_end_id})

    def load(self, policy): ...

    def logprobs(self, token_ids): ...

    def generate(self, requests, sampling):
        ids = [*self.renderer.encode("hi"), self.renderer.turn_end_id]
        self.prompts += [self.renderer.decode(request.prompt_ids) for request in requests]
        return [
            Generation(token_ids=ids, rollout_logprobs=np.zeros(len(ids), np.float32), finish_reason="stop")
            for _ in requests
        ]


def attempt_with(engine, memory):
    identity = Identity(trajectory_id="t", group_id="g", sample=0, env="e", seed=1, policy_version=0, policy_digest="d")
    limits = TurnLimits(max_turns=9, max_generate_length=9, max_input_length=4096, max_sequence_length=4096)
    task = Task(task_id="t", split="train", prompt="p")
    attempt = Attempt(task, identity, Counter(), engine, SamplingParams(), limits, stepwise=True, memory=memory)
    play([attempt], engine, SamplingParams(), Stopwatch())
    return attempt


def test_a_prompt_holds_what_the_memory_shows_and_the_row_holds_the_prompt(engine):
    told = Silent(engine.renderer)
    rows = attempt_with(told, Memory(kind="last_turns", turns=1)).rows()
    assert ["seen 1" in prompt for prompt in told.prompts] == [False, True, False, False]
    assert ["seen 3" in prompt for prompt in told.prompts] == [False, False, False, True]
    assert [row.prompt for row in rows] == told.prompts
    assert len(rows[-1].messages) == 1 + 2 * 4  # the whole conversation stays in the row
    to_table(rows)
    told = Silent(engine.renderer)
    attempt_with(told, Memory(kind="summary", turns=1))
    assert [f"So far: {i} turns" in told.prompts[i] for i in (1, 2, 3)] == [True] * 3


def test_tool_use_keeps_a_summary_of_what_its_tools_said():
    environment = ToolUse(ToolUseConfig(n_train=1))
    episode = environment.start()
    episode.reset(environment.tasks("train")[0], 0)
    assert episode.step("<tool_call>{</tool_call>").summary is None
    step = episode.step('<tool_call>{"tool": "calculator", "args": {"expression": "2*3"}}</tool_call>')
    assert step.summary == 'calculator {"expression": "2*3"} gave 6'


@pytest.mark.parametrize("mode", ["auto", "step"])
def test_a_rollout_without_history_is_stepwise(tmp_path, mode):
    config = RolloutConfig(
        env="tool_use", memory="last_turns", memory_turns=1, trajectory_mode=mode, train_batch_size=4,
        n_samples_per_prompt=4, max_generate_length=48, max_turns=3,
    )  # fmt: skip
    manifest = rollout(resolve_policy(STARTER), tmp_path / mode, config, engine=HfEngine(HfConfig(device="cpu")))
    rows = [row for table in read_parts(tmp_path / mode, manifest) for row in table.to_pylist()]
    assert {len(row["turns"]) for row in rows} == {1}
    assert max(row["step_index"] for row in rows) > 0


def test_settings_that_exclude_each_other_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="does not begin with the one before"):
        RolloutConfig(memory="summary", trajectory_mode="whole")
    with pytest.raises(SettingsError, match=r"rollout\.memory"):
        RolloutConfig(memory="all")
    with pytest.raises(SettingsError, match="empty text"):
        RolloutConfig(stop_strings=("",))


# Stop strings


def sampled(engine, stop_strings, max_tokens=48):
    prompt = engine.renderer.prompt_ids(
        [message("user", "What is 17 + 25?\nGive the final answer in <answer></answer> tags.")]
    )
    requests = [Request(prompt_ids=prompt, seed=seed, max_tokens=max_tokens) for seed in range(32)]
    return engine.generate(requests, SamplingParams(stop_strings=stop_strings))


def test_a_turn_ends_with_a_stop_string_and_is_the_same_until_then(engine):
    free, stopped = sampled(engine, ()), sampled(engine, ("</answer>",))
    assert {g.finish_reason for g in stopped} >= {"stop_string"}
    for one, other in zip(free, stopped, strict=True):
        text = engine.renderer.decode(other.token_ids)
        assert one.token_ids[: len(other.token_ids)] == other.token_ids
        assert_close(one.rollout_logprobs[: len(other.rollout_logprobs)], other.rollout_logprobs, PASS, scale=LOGITS)
        assert (other.finish_reason == "stop_string") == text.endswith("</answer>")
        assert text.count("</answer>") <= 1


def test_a_stop_string_that_spans_tokens_is_found_also_in_the_last_one(engine):
    free = engine.renderer.decode(sampled(engine, ())[0].token_ids)
    stop = free[3:8]
    first = sampled(engine, (stop,))[0]
    assert engine.renderer.decode(first.token_ids).endswith(stop)
    assert first.finish_reason == "stop_string"
    assert sampled(engine, (stop,), max_tokens=len(first.token_ids))[0].finish_reason == "stop_string"
    assert sampled(engine, (stop,), max_tokens=len(first.token_ids) - 1)[0].finish_reason == "length"


def test_a_conversation_goes_on_behind_a_stop_string(tmp_path):
    config = RolloutConfig(
        env="tool_use", stop_strings=("</tool_call>",), train_batch_size=4, n_samples_per_prompt=4,
        max_generate_length=64, max_turns=3,
    )  # fmt: skip
    manifest = rollout(resolve_policy(STARTER), tmp_path / "r", config, engine=HfEngine(HfConfig(device="cpu")))
    rows = [row for table in read_parts(tmp_path / "r", manifest) for row in table.to_pylist()]
    called = [row for row in rows if len(row["turns"]) > 1]
    assert called
    for row in called:
        assert row["turns"][0]["action"].endswith("</tool_call>")
        assert "</tool_call><|im_end|>" in row["response"]  # the template ends the turn; it is not trained on


def test_an_engine_without_stop_strings_says_so(tmp_path, engine, monkeypatch):
    monkeypatch.setattr(HfEngine, "takes_stop_strings", False)
    config = RolloutConfig(stop_strings=("x",), train_batch_size=1, n_samples_per_prompt=1)
    with pytest.raises(SettingsError, match=r"takes no `rollout\.stop_strings`"):
        rollout(resolve_policy(STARTER), tmp_path / "r", config, engine=engine)
