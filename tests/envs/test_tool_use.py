import json
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from nanoskyrl.envs.worlds.tool_use.environment import ToolUse, ToolUseConfig
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.rows import from_table, to_table
from nanoskyrl.stages.core.trajectory import Trajectory, Turn


def attempt(environment, task, actions):
    """Play the actions against a fresh episode, and return what a rollout would store."""
    episode = environment.start()
    observation = episode.reset(task, seed=0)
    turns = []
    for action in actions:
        step = episode.step(action)
        turns.append(Turn(action=action, observation=step.observation, done=step.done, tool_calls=step.tool_calls))
    episode.close()
    return stored(turns, dict(observation.metadata))


def stored(turns, metadata):
    done = bool(turns) and turns[-1].done
    return Trajectory(
        trajectory_id="t", group_id="g", sample=0, env="tool_use", task_id="task", split="train", seed=0,
        policy_version=None, policy_digest=None, temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed",
        prompt_ids=None, response_ids=None, loss_mask=None, rollout_logprobs=None, prompt="", response="", messages=[],
        turns=turns, status="completed" if done else "max_turns", stop_reason="stop" if done else "max_turns",
        trainable=False, prompt_tokens=0, completion_tokens=0, metadata=metadata,
    )  # fmt: skip


def call(tool, args):
    return f"<tool_call>{json.dumps({'tool': tool, 'args': args})}</tool_call>"


def step(action, environment=None):
    environment = environment or ToolUse(ToolUseConfig(n_train=1))
    episode = environment.start()
    episode.reset(environment.tasks("train")[0], seed=0)
    return episode.step(action)


@pytest.fixture
def environment():
    return ToolUse(ToolUseConfig(n_train=50))


@pytest.fixture
def task(environment):
    return environment.tasks("train")[0]


# Rewards


@pytest.mark.parametrize(
    "config",
    [
        ToolUseConfig(n_train=50),
        ToolUseConfig(n_train=50, level=5),
        ToolUseConfig(n_train=50, kinds=("search",)),
        ToolUseConfig(n_train=50, kinds=("search", "calculator"), call_weight=0.5),
    ],
    ids=["calculator", "calculator-5", "search", "both"],
)
def test_the_expert_earns_everything_and_the_tool_tells_it_the_answer(config):
    environment = ToolUse(config)
    tasks = environment.tasks("train")
    assert len(tasks) == 50
    for task in tasks:
        trajectory = attempt(environment, task, environment.expert(task))
        score = environment.score(trajectory)
        assert (score.reward, score.success) == (1.0, True)
        assert score.parts == {"answer": 1.0, "calls": 1.0, "answered": 1.0}
        assert [turn.done for turn in trajectory.turns] == [False, True]
        assert task.ground_truth in trajectory.turns[0].observation


def test_a_wrong_answer_earns_nothing(environment):
    for task in environment.tasks("train"):
        score = environment.score(attempt(environment, task, [f"<answer>{int(task.ground_truth) + 1}</answer>"]))
        assert (score.reward, score.success) == (0.0, False)


def test_a_wrong_answer_after_valid_calls_earns_the_calls_share(environment, task):
    actions = [call("calculator", {"expression": "1+1"}), "<answer>2</answer>"]
    score = environment.score(attempt(environment, task, actions))
    assert score.reward == pytest.approx(0.1)
    assert score.success is False
    assert score.parts == {"answer": 0.0, "calls": 1.0, "answered": 1.0}


def test_a_right_answer_without_a_call_lacks_the_calls_share(environment, task):
    score = environment.score(attempt(environment, task, [f"<answer>{task.ground_truth}</answer>"]))
    assert score.reward == pytest.approx(0.9)
    assert score.success is True
    assert score.parts == {"answer": 1.0, "calls": 0.0, "answered": 1.0}


@pytest.mark.parametrize(
    "bad",
    [
        "<tool_call>oops</tool_call>",
        call("abacus", {}),
        call("calculator", {}),
        call("calculator", {"expression": "1/0"}),
    ],
)
def test_one_failed_call_loses_the_calls_share(environment, task, bad):
    good, answer = environment.expert(task)
    score = environment.score(attempt(environment, task, [good, bad, answer]))
    assert score.reward == pytest.approx(0.9)
    assert score.parts == {"answer": 1.0, "calls": 0.0, "answered": 1.0}


def test_an_answer_in_a_tool_s_words_does_not_count(environment, task):
    right = f"<answer>{task.ground_truth}</answer>"
    turns = [
        Turn(action=call("search", {"query": "x"}), observation=right, done=False),
        Turn(action="There it stands.", observation=right, done=True),
    ]
    score = environment.score(stored(turns, {"ground_truth": task.ground_truth}))
    assert (score.reward, score.success) == (0.0, False)


def test_an_answer_that_a_tool_is_made_to_echo_does_not_count(environment, task):
    trajectory = attempt(environment, task, [call(f"<answer>{task.ground_truth}</answer>", {})])
    assert f"<answer>{task.ground_truth}</answer>" in trajectory.turns[0].observation
    assert (environment.score(trajectory).reward, environment.score(trajectory).success) == (0.0, False)


def test_an_answer_in_an_earlier_turn_does_not_count(environment, task):
    answered = f"{call('search', {'query': 'Kenya'})} <answer>{task.ground_truth}</answer>"
    score = environment.score(attempt(environment, task, [answered, "I am done."]))
    assert score.success is False


def test_an_attempt_without_a_turn_earns_nothing(environment):
    score = environment.score(stored([], {"ground_truth": "1"}))
    assert (score.reward, score.success) == (0.0, False)


# Calls


def test_mistakes_are_counted_by_kind():
    found = step(
        " ".join(
            [
                "<tool_call>{'tool': 1}</tool_call>",
                "<tool_call>[]</tool_call>",
                '<tool_call>{"args": {}}</tool_call>',
                call("calculator", [1]),
                call("calculator", {"expr": "1"}),
                call("abacus", {}),
                call("calculator", {"expression": "1/0"}),
                call("calculator", {"expression": "6*7"}),
                '<tool_call>{"tool": "calculator", "args": {"expression": "1',
            ]
        )
    )
    assert Counter(one.error for one in found.tool_calls) == {
        "malformed": 4, "bad_arguments": 2, "unknown_tool": 1, "tool_error": 1, None: 1,
    }  # fmt: skip
    assert [one.ok for one in found.tool_calls] == [False] * 7 + [True, False]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, ["expression", "missing"]),
        ({"expression": 5}, ["expression", "string"]),
        ({"expression": None}, ["expression", "string"]),
        ({"expression": ["1+1"]}, ["expression", "string"]),
        ({"expression": "1+1", "digits": 3}, ["digits", "unexpected"]),
        ([1, 2], ['"args"', "object"]),
        ("1+1", ['"args"', "object"]),
    ],
    ids=str,
)
def test_wrong_arguments_come_back_as_an_observation_that_says_what_is_wrong(args, words):
    found = step(call("calculator", args))
    assert not found.done
    (message,) = found.messages
    assert message["role"] == "tool"
    assert message["content"].startswith("error: ")
    for word in words:
        assert word in message["content"]
    assert [(one.ok, one.error) for one in found.tool_calls] == [(False, "bad_arguments")]


def test_an_unknown_tool_is_answered_with_the_tools_there_are():
    found = step(call("calculater", {"expression": "1"}))
    assert "calculater" in found.observation
    assert "calculator, search" in found.observation


def test_several_calls_are_answered_one_by_one_in_their_order():
    found = step(call("calculator", {"expression": "6*7"}) + call("calculator", {"expression": "6/0"}))
    assert [dict(message) for message in found.messages] == [
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": "error: division by zero"},
    ]
    assert [(one.tool, one.args, one.result, one.ok, one.error) for one in found.tool_calls] == [
        ("calculator", {"expression": "6*7"}, "42", True, None),
        ("calculator", {"expression": "6/0"}, "division by zero", False, "tool_error"),
    ]


@pytest.mark.parametrize("action", ["", "I give up.", "<answer>5</answer>", "<think><tool_call>{}</tool_call></think>"])
def test_an_action_without_a_call_ends_the_episode(action):
    found = step(action)
    assert found.done
    if action == "<answer>5</answer>":
        assert (list(found.messages), list(found.tool_calls)) == ([], [])
    else:
        assert list(found.messages) == [{"role": "tool", "content": "error: no answer was found"}]
        assert [(call.tool, call.ok, call.error) for call in found.tool_calls] == [(None, False, "no_answer")]


def test_valid_calls_keep_their_share_where_the_answer_is_missing(environment, task):
    calls = environment.expert(task)[:-1]
    assert environment.score(attempt(environment, task, [*calls, "I do not know"])).parts == {
        "answer": 0.0,
        "calls": 1.0,
        "answered": 0.0,
    }
    assert environment.score(attempt(environment, task, ["I do not know"])).parts == {
        "answer": 0.0,
        "calls": 0.0,
        "answered": 0.0,
    }


def test_answers_that_need_no_tags_are_never_recorded_as_missing(environment, task):
    episode = environment.start(in_tags=False)
    episode.reset(task, seed=0)
    assert not episode.step("It is B.").tool_calls


def test_only_the_tools_of_the_settings_are_offered():
    environment = ToolUse(ToolUseConfig(tools=("search",), n_train=1))
    offered = environment.start().reset(environment.tasks("train")[0], seed=0).tools
    assert [tool["function"]["name"] for tool in offered] == ["search"]
    found = step(call("calculator", {"expression": "1"}), environment)
    assert [one.error for one in found.tool_calls] == ["unknown_tool"]


PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", '{"tool": "calculator", "args": ', '{"expression": ',
        '{"tool": "search", "args": {"query": ', '"1+1"', "1e999", "NaN", "{", "}}", "[", "]", '"', "\\ud800", "\0",
        "\ud800", call("calculator", {"expression": "1"}),
    ]
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(PIECES | st.text(st.characters(), max_size=4), max_size=20).map("".join))
def test_no_text_raises_and_all_of_it_can_be_stored(action):
    environment = ToolUse(ToolUseConfig(n_train=1))
    (task,) = environment.tasks("train")
    trajectory = attempt(environment, task, [action])
    (again,) = from_table(to_table([trajectory]))
    assert environment.score(again) == environment.score(trajectory)
    assert [one.error for one in again.turns[0].tool_calls] == [one.error for one in trajectory.turns[0].tool_calls]


def test_deeply_nested_arguments_can_be_stored():
    environment = ToolUse(ToolUseConfig(n_train=1))
    (task,) = environment.tasks("train")
    nested = '{"tool": "calculator", "args": {"expression": ' + "[" * 700 + "]" * 700 + "}}"
    trajectory = attempt(environment, task, [f"<tool_call>{nested}</tool_call>"])
    assert not trajectory.turns[0].tool_calls[0].ok
    to_table([trajectory])


# Tasks and settings


@pytest.mark.parametrize("kind", ["calculator", "search"])
def test_train_and_test_share_no_question(kind):
    environment = ToolUse(ToolUseConfig(kinds=(kind,)))
    train, test = environment.tasks("train"), environment.tasks("test")
    assert train
    assert test
    assert not {task.prompt for task in train} & {task.prompt for task in test}
    assert len({task.task_id for task in train}) == len(train)


def test_kinds_of_tasks_take_turns():
    tasks = ToolUse(ToolUseConfig(kinds=("search", "calculator"), n_train=6)).tasks("train")
    assert [task.metadata["kind"] for task in tasks] == ["search", "calculator"] * 3


def test_tasks_are_the_same_every_time():
    config = ToolUseConfig(kinds=("calculator", "search"), n_train=40)
    assert list(ToolUse(config).tasks("train")) == list(ToolUse(config).tasks("train"))


def test_products_are_right_and_as_long_as_the_level_says():
    for level in (1, 3):
        for task in ToolUse(ToolUseConfig(level=level, n_train=50)).tasks("train"):
            left, right = task.prompt.removeprefix("What is ").removesuffix("?").split(" * ")
            assert len(left) == len(right) == level + 1
            assert task.ground_truth == str(int(left) * int(right))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("level", 0),
        ("level", 6),
        ("call_weight", -0.1),
        ("call_weight", 1.5),
        ("call_weight", float("nan")),
        ("kinds", ("calculator", "juggling")),
    ],
)
def test_settings_out_of_range_are_refused_by_name(key, value):
    with pytest.raises(SettingsError, match=f"`tool_use.{key}`") as caught:
        ToolUseConfig(**{key: value})
    assert caught.value.hint


@pytest.mark.parametrize("values", [{"kinds": ()}, {"n_train": -1}, {"n_test": -1}], ids=str)
def test_settings_that_leave_no_tasks_are_refused(values):
    with pytest.raises(SettingsError):
        ToolUse(ToolUseConfig(**values)).tasks("train")


def test_a_misspelt_tool_gets_a_suggestion():
    with pytest.raises(SettingsError, match="`calculater`") as caught:
        ToolUse(ToolUseConfig(tools=("calculater",)))
    assert caught.value.hint == "Did you mean `calculator`?"
