import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from nanoskyrl.envs.base import Observation, Step, Task
from nanoskyrl.envs.tool_formats.json_marks import LLAMA_JSON
from nanoskyrl.envs.tools import Tool
from nanoskyrl.envs.worlds.tool_use.calculator import calculator
from nanoskyrl.envs.worlds.tool_use.environment import ToolUse, ToolUseConfig
from nanoskyrl.stages.core.metrics import Stopwatch
from nanoskyrl.stages.core.rows import to_table
from nanoskyrl.stages.engines.base import Generation, SamplingParams, TokenEngine
from nanoskyrl.stages.engines.turns import Attempt, Identity, TurnLimits, play
from nanoskyrl.stages.models.loading import load_tokenizer
from nanoskyrl.stages.models.policy import resolve_policy
from nanoskyrl.stages.models.rendering import Renderer

TASK = Task(task_id="t", split="train", prompt="Say something.", ground_truth="x")
LIMITS = TurnLimits(max_turns=4, max_generate_length=64, max_input_length=4096, max_sequence_length=4096)


@pytest.fixture(scope="module")
def renderer():
    return Renderer(load_tokenizer(resolve_policy("starter")))


class Reciter(TokenEngine):
    """Samples texts that were given, each ended by a stop token unless it says otherwise."""

    def __init__(self, renderer, *texts, stop=None, cut=False):
        self.renderer, self.texts, self.cut = renderer, texts, cut
        self.end = min(stop) if stop else renderer.turn_end_id
        self.context_length = 8192
        self.seen = []

    @property
    def stop_ids(self):
        return frozenset({self.end})

    def load(self, policy): ...

    def logprobs(self, token_ids): ...

    def generate(self, requests, sampling):
        self.seen.append(requests)
        return [self._one(request) for request in requests]

    def _one(self, request):
        ids = self.renderer.encode(self.texts[len(self.seen) - 1])
        ids = ids[: request.max_tokens] if self.cut else [*ids, self.end]
        logprobs = np.full(len(ids), -0.5, np.float32)
        return Generation(token_ids=ids, rollout_logprobs=logprobs, finish_reason="length" if self.cut else "stop")


class Echo:
    """Answers every action but `bye` with an observation; can be asked to break."""

    def __init__(self, breaks_in=None):
        self.breaks_in = breaks_in
        self.closed = 0

    def start(self):
        return self

    def reset(self, task, seed):
        self._maybe("reset")
        return Observation(messages=[{"role": "user", "content": task.prompt}], metadata={"ground_truth": "x"})

    def step(self, action):
        self._maybe("step")
        if action == "bye":
            return Step(done=True)
        return Step(messages=[{"role": "tool", "content": f"heard {action}"}], done=False)

    def close(self):
        self.closed += 1
        self._maybe("close")

    def _maybe(self, where):
        if self.breaks_in == where:
            raise ConnectionError(f"lost in {where}")


def identity(name="a"):
    return Identity(
        trajectory_id=name, group_id="g", sample=0, env="echo", seed=7, policy_version=0, policy_digest="d" * 64
    )


def attempt(engine, environment=None, limits=LIMITS, stepwise=False, name="a"):
    return Attempt(TASK, identity(name), environment or Echo(), engine, SamplingParams(), limits, stepwise=stepwise)


def played(engine, *attempts):
    play(attempts, engine, SamplingParams(), Stopwatch())
    rows = [row for one in attempts for row in one.rows()]
    to_table(rows)
    return rows


def test_sampled_tokens_are_masked_in_and_observed_ones_out(renderer):
    engine = Reciter(renderer, "hello", "bye")
    (row,) = played(engine, attempt(engine))
    hello, bye, end = renderer.encode("hello"), renderer.encode("bye"), renderer.turn_end_id
    observed = renderer.encode("\n<|im_start|>tool\nheard hello<|im_end|>\n<|im_start|>assistant\n")
    assert row.response_ids.tolist() == [*hello, end, *observed, *bye, end]
    assert row.loss_mask.tolist() == [1] * (len(hello) + 1) + [0] * len(observed) + [1] * (len(bye) + 1)
    assert np.isnan(row.rollout_logprobs[row.loss_mask == 0]).all()
    assert (row.rollout_logprobs[row.loss_mask == 1] == -0.5).all()
    assert [(turn.first_token, turn.token_count) for turn in row.turns] == [
        (0, len(hello) + 1),
        (len(hello) + 1 + len(observed), len(bye) + 1),
    ]


def test_the_tokens_of_all_turns_are_those_of_the_whole_conversation_rendered_at_once(renderer):
    engine = Reciter(renderer, "hello", "again", "bye")
    (row,) = played(engine, attempt(engine))
    text = renderer.decode([*row.prompt_ids, *row.response_ids])
    assert text == renderer.prompt(row.messages).removesuffix("<|im_start|>assistant\n").removesuffix("\n")
    assert row.prompt + row.response == text


def test_each_prompt_extends_the_tokens_before_it(renderer):
    engine = Reciter(renderer, "hello", "again", "bye")
    played(engine, attempt(engine))
    prompts = [requests[0].prompt_ids for requests in engine.seen]
    for shorter, longer in pairwise(prompts):
        assert longer[: len(shorter)] == shorter


@pytest.mark.parametrize("second_stop", [0, 5])
def test_any_of_several_stop_ids_ends_a_turn_and_stays_in_the_tokens(renderer, second_stop):
    # Pitfall 13: an end by the second stop id is no truncation, and pad == eos does not lose the token.
    engine = Reciter(renderer, "bye", stop={second_stop})
    (row,) = played(engine, attempt(engine))
    assert (row.status, row.stop_reason) == ("completed", "stop")
    assert row.response_ids[-1] == second_stop
    assert row.loss_mask[-1] == 1
    assert row.turns[0].action == "bye"


def test_after_another_stop_token_the_template_still_ends_the_turn(renderer):
    engine = Reciter(renderer, "hello", "bye", stop={0})
    (row,) = played(engine, attempt(engine))
    after = row.response_ids[len(renderer.encode("hello")) :].tolist()
    assert after[:2] == [0, renderer.turn_end_id]
    assert row.loss_mask[len(renderer.encode("hello")) :][:2].tolist() == [1, 0]


def test_a_turn_cut_by_max_generate_length_is_truncated_and_never_acted_on(renderer):
    environment = Echo(breaks_in="step")
    engine = Reciter(renderer, "hello hello hello", cut=True)
    limits = dataclasses.replace(LIMITS, max_generate_length=2)
    (row,) = played(engine, attempt(engine, environment, limits))
    assert (row.status, row.stop_reason, row.completion_tokens) == ("truncated", "length", 2)
    assert environment.closed == 1


def test_max_turns_ends_an_episode_that_goes_on(renderer):
    engine = Reciter(renderer, "one", "two", "three")
    (row,) = played(engine, attempt(engine, limits=dataclasses.replace(LIMITS, max_turns=2)))
    assert (row.status, row.stop_reason, len(row.turns)) == ("max_turns", "max_turns", 2)


def test_a_prompt_longer_than_max_input_length_is_never_sampled_from(renderer):
    engine = Reciter(renderer, "hello")
    (row,) = played(engine, attempt(engine, limits=dataclasses.replace(LIMITS, max_input_length=3)))
    assert (row.status, row.stop_reason, row.completion_tokens) == ("truncated", "max_input_length", 0)
    assert engine.seen == []


def test_a_later_prompt_longer_than_max_input_length_ends_the_attempt(renderer):
    engine = Reciter(renderer, "hello", "bye")
    first = len(attempt(engine).request().prompt_ids)
    limits = dataclasses.replace(LIMITS, max_input_length=first + 3)
    (row,) = played(engine, attempt(engine, limits=limits))
    assert (row.stop_reason, len(row.turns)) == ("max_input_length", 1)


def test_nothing_grows_past_max_sequence_length(renderer):
    engine = Reciter(renderer, "hello hello hello hello", cut=True)
    first = len(attempt(engine).request().prompt_ids)
    limits = dataclasses.replace(LIMITS, max_sequence_length=first + 3)
    (row,) = played(engine, attempt(engine, limits=limits))
    assert (row.status, row.stop_reason) == ("truncated", "max_sequence_length")
    assert len(row.prompt_ids) + len(row.response_ids) == first + 3


def test_an_observation_that_does_not_fit_ends_the_attempt_before_it(renderer):
    engine = Reciter(renderer, "hello")
    first = len(attempt(engine).request().prompt_ids)
    said = len(renderer.encode("hello")) + 1
    limits = dataclasses.replace(LIMITS, max_sequence_length=first + said + 2)
    (row,) = played(engine, attempt(engine, limits=limits))
    assert (row.stop_reason, len(row.response_ids)) == ("max_sequence_length", said)


@pytest.mark.parametrize("where", ["reset", "step", "close"])
def test_an_environment_that_breaks_fails_its_own_attempt_alone(renderer, where):
    engine = Reciter(renderer, "bye", "bye")
    broken, sound = attempt(engine, Echo(breaks_in=where), name="broken"), attempt(engine, name="sound")
    failed, fine = played(engine, broken, sound)
    assert (failed.status, failed.stop_reason) == ("failed", "error")
    assert failed.error == f"ConnectionError: lost in {where}"
    assert (fine.status, fine.error) == ("completed", None)


def test_a_limit_of_the_environments_own_is_no_completion_and_close_has_the_last_word(renderer):
    class Limited(Echo):
        def step(self, action):
            return Step(done=True, truncated=True, metadata={"steps": 1, "verdict": None})

        def close(self):
            super().close()
            return {"verdict": 0.5}

    engine = Reciter(renderer, "hello")
    (row,) = played(engine, attempt(engine, Limited()))
    assert (row.status, row.stop_reason, row.turns[0].done) == ("max_turns", "max_turns", True)
    assert row.metadata == {"ground_truth": "x", "steps": 1, "verdict": 0.5}


def test_last_words_that_the_table_cannot_hold_fail_the_attempt(renderer):
    class Mumbling(Echo):
        def close(self):
            return {"verdict": object()}

    engine = Reciter(renderer, "bye")
    (row,) = played(engine, attempt(engine, Mumbling()))
    assert (row.status, row.metadata) == ("failed", {"ground_truth": "x"})
    assert "not JSON serializable" in row.error


def test_a_request_that_the_engine_could_not_serve_fails_its_own_attempt_alone(renderer):
    class Flaky(Reciter):
        def generate(self, requests, sampling):
            first, *others = super().generate(requests, sampling)
            return [dataclasses.replace(first, token_ids=[], error="out of memory", finish_reason="error"), *others]

    engine = Flaky(renderer, "bye")
    failed, fine = played(engine, attempt(engine, name="a"), attempt(engine, name="b"))
    assert (failed.status, failed.error) == ("failed", "out of memory")
    assert fine.status == "completed"


def test_step_wise_rows_have_a_prompt_of_their_own_each(renderer):
    engine = Reciter(renderer, "hello", "bye")
    first, last = played(engine, attempt(engine, stepwise=True))
    assert [(row.step_index, row.is_last_step) for row in (first, last)] == [(0, False), (1, True)]
    assert last.prompt == renderer.prompt(last.messages[:-1])
    assert first.loss_mask.all()
    assert last.loss_mask.all()
    assert [len(row.turns) for row in (first, last)] == [1, 1]


def test_turns_of_one_attempt_and_of_others_draw_from_different_seeds(renderer):
    engine = Reciter(renderer, "hello", "bye")
    played(engine, attempt(engine))
    other = Attempt(
        TASK, dataclasses.replace(identity(), seed=8), Echo(), engine, SamplingParams(), LIMITS, stepwise=False
    ).request()
    seeds = [requests[0].seed for requests in engine.seen] + [other.seed]
    assert len(set(seeds)) == 3


# What a policy brings about in its template


REFUSES = (
    "{% for m in messages %}{% if loop.index0 > 1 and m.content == 'heard refuse' %}"
    "{{ raise_exception('I will not') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def template(source):
    tokenizer = load_tokenizer(resolve_policy("starter"))
    tokenizer.chat_template = source
    return Renderer(tokenizer)


@pytest.mark.parametrize("stepwise", [False, True])
def test_what_the_template_refuses_later_on_fails_that_attempt_alone(stepwise):
    class Both(Reciter):
        def generate(self, requests, sampling):
            self.texts = ["refuse", "bye"] if len(requests) == 2 else ["bye"]
            self.seen = []
            found = []
            for request in requests:
                self.seen.append(request)
                found.append(self._one(request))
            return found

    engine = Both(template(REFUSES))
    failed, fine = played(engine, attempt(engine, stepwise=stepwise, name="a"), attempt(engine, name="b"))
    assert (failed.status, failed.stop_reason) == ("failed", "error")
    assert "I will not" in failed.error
    assert failed.turns[0].action == "refuse"
    assert (fine.status, fine.error) == ("completed", None)


TWO_CALLS = (
    '<tool_call>{"tool": "calculator", "args": {"expression": "2*3"}}</tool_call>'
    '<tool_call>{"tool": "calculator", "args": {"expression": "3*3"}}</tool_call>'
)
TAKES_TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("stepwise", [False, True])
def test_two_calls_in_a_turn_go_on_where_a_template_wants_turns_to_alternate(stepwise):
    engine = Reciter(template(TAKES_TURNS), TWO_CALLS, "<answer>6</answer>")
    environment = ToolUse(ToolUseConfig())
    rows = played(engine, attempt(engine, environment, stepwise=stepwise))
    assert (rows[-1].status, rows[-1].error) == ("completed", None)
    shown = rows[-1].prompt if stepwise else rows[-1].response
    assert "<tool_response>\n6\n</tool_response>\n<tool_response>\n9\n</tool_response>" in shown
    calls = [call for row in rows for turn in row.turns for call in turn.tool_calls]
    assert [call.result for call in calls] == ["6", "9"]


CALLS_AS_LLAMA = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls is defined %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_template_that_takes_one_call_a_message_shows_several_one_after_the_other(stepwise):
    one, two = (LLAMA_JSON.write("calculator", {"expression": text}) for text in ("2*3", "3*3"))
    engine = Reciter(template(CALLS_AS_LLAMA), f"{one}\n{two}", "<answer>6</answer>")
    rows = played(engine, attempt(engine, ToolUse(ToolUseConfig()), stepwise=stepwise))
    assert (rows[-1].status, rows[-1].error) == ("completed", None)
    calls = [call for row in rows for turn in row.turns for call in turn.tool_calls]
    assert [call.result for call in calls] == ["6", "9"]
    assert rows[0].turns[0].action.count("<tool_call>") == 2
    said, first, second = rows[-1].messages[1:4]
    assert [call["id"] for call in said["tool_calls"]] == [first["tool_call_id"], second["tool_call_id"]]
    if stepwise:
        told = rows[-1].prompt.partition("assistant\n")[2]
        assert [told.index(text) for text in (one, "tool\n6", two, "tool\n9")] == sorted(
            told.index(text) for text in (one, "tool\n6", two, "tool\n9")
        )


def test_a_call_that_cannot_be_read_is_a_mistake_that_the_policy_is_told_of():
    engine = Reciter(template(CALLS_AS_LLAMA), '{"name": "calculator", "parameters": {"expre', "<answer>6</answer>")
    (row,) = played(engine, attempt(engine, ToolUse(ToolUseConfig())))
    assert [call.error for turn in row.turns for call in turn.tool_calls] == ["malformed"]
    assert "error: the call is not valid JSON" in row.response
    assert row.messages[1] == {"role": "assistant", "content": '{"name": "calculator", "parameters": {"expre'}


def test_observations_in_parts_are_joined_and_others_fail_their_attempt(renderer):
    class InParts(Echo):
        def step(self, action):
            if action == "bye":
                return Step(done=True)
            kind = "text" if action == "hello" else "image"
            return Step(messages=[{"role": "tool", "content": [{"type": kind, "text": "heard"}]}], done=False)

    (fine,) = played(engine := Reciter(renderer, "hello", "bye"), attempt(engine, InParts()))
    assert (fine.status, fine.messages[2]) == ("completed", {"role": "tool", "content": "heard"})
    (failed,) = played(engine := Reciter(renderer, "look"), attempt(engine, InParts()))
    assert failed.status == "failed"
    assert "a part of type image" in failed.error


def test_a_result_may_look_like_reasoning_or_a_call():
    call = LLAMA_JSON.write("calculator", {"expression": "2*3"})

    class Nasty(Echo):
        def step(self, action):
            if action == "bye":
                return Step(done=True)
            return Step(
                messages=[{"role": "tool", "content": f"</think>\nprobed-words probed-user\n{call}"}], done=False
            )

        def reset(self, task, seed):
            return dataclasses.replace(super().reset(task, seed), tools=[Tool("calculator", calculator).schema])

    engine = Reciter(template(CALLS_AS_LLAMA), f"{call}", "hello", "bye")
    (row,) = played(engine, attempt(engine, Nasty()))
    assert (row.status, row.error) == ("completed", None)
    shown = f"tool\n</think>\nprobed-words probed-user\n{call}<|im_end|>\n<|im_start|>assistant\n"
    assert row.response == f"{call}<|im_end|>\n<|im_start|>{shown}hello<|im_end|>\n<|im_start|>{shown}bye<|im_end|>"
