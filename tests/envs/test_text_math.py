import json

import pytest
from hypothesis import given, strategies as st

from nanoskyrl.envs.actions import final_answer
from nanoskyrl.envs.base import Task
from nanoskyrl.envs.worlds.text_math.environment import TextMath, TextMathConfig
from nanoskyrl.envs.worlds.text_math.problems import FAMILIES
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.trajectory import Trajectory, Turn


def attempt(environment, task, actions, *, status="completed"):
    """Play the actions against a fresh episode, and return what a rollout would store."""
    episode = environment.start()
    observation = episode.reset(task, seed=0)
    turns = []
    for action in actions:
        step = episode.step(action)
        turns.append(Turn(action=action, observation=step.observation, done=step.done, tool_calls=step.tool_calls))
    episode.close()
    return Trajectory(
        trajectory_id="t", group_id="g", sample=0, env="text_math", task_id=task.task_id, split=task.split, seed=0,
        policy_version=None, policy_digest=None, temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed",
        prompt_ids=None, response_ids=None, loss_mask=None, rollout_logprobs=None, prompt="", response="", messages=[],
        turns=turns, status=status, stop_reason="stop" if status == "completed" else "length", trainable=False,
        prompt_tokens=0, completion_tokens=0, metadata=dict(observation.metadata),
    )  # fmt: skip


@pytest.fixture
def environment():
    return TextMath(TextMathConfig())


@pytest.fixture
def task(environment):
    return environment.tasks("train")[0]


@pytest.mark.parametrize(
    ("grader", "action", "error"),
    [
        (None, "<answer>5</answer>", None), (None, "<answer></answer>", None), (None, "5", "no_answer"),
        (None, "<answer>5", "no_answer"), (None, r"\boxed{5}", "no_answer"), ("final_answer", "#### 5", "no_answer"),
        ("stated_answer", r"\boxed{5}", None), ("stated_answer", "#### 5", None), ("stated_answer", "5", "no_answer"),
    ],
)  # fmt: skip
def test_a_missing_answer_is_observed_and_counted(grader, action, error):
    episode = TextMath(TextMathConfig()).start()
    episode.reset(Task(task_id="t", split="train", prompt="2 + 3?", ground_truth="5", metadata={"grader": grader}), 0)
    step = episode.step(action)
    assert step.done
    assert [call.error for call in step.tool_calls] == ([error] if error else [])
    assert step.observation == ("error: no answer was found" if error else "")


@pytest.mark.parametrize("family", ["addition", *FAMILIES])
def test_the_expert_earns_everything(family):
    environment = TextMath(TextMathConfig(family=family, n_train=50))
    tasks = environment.tasks("train")
    assert len(tasks) == 50
    for task in tasks:
        score = environment.score(attempt(environment, task, environment.expert(task)))
        assert (score.reward, score.success) == (1.0, True)
        assert score.parts == {"answer": 1.0, "format": 1.0, "answered": 1.0}


def test_a_wrong_answer_earns_nothing(environment):
    strict = TextMath(TextMathConfig(format_weight=0))
    for task in strict.tasks("test")[:50]:
        wrong = f"<answer>{int(task.ground_truth) + 1}</answer>"
        score = strict.score(attempt(strict, task, [wrong]))
        assert (score.reward, score.success) == (0.0, False)


def test_a_wrong_answer_in_tags_earns_the_format_s_share_and_is_no_success(environment, task):
    score = environment.score(attempt(environment, task, ["<answer>no idea</answer>"]))
    assert score.reward == pytest.approx(0.1)
    assert score.success is False
    assert score.parts == {"answer": 0.0, "format": 1.0, "answered": 1.0}


@pytest.mark.parametrize(
    "form", ["{}", "<answer>{}", "```<answer>{}</answer>```", "<think><answer>{}</answer></think>"]
)
def test_the_right_number_outside_the_tags_earns_nothing(environment, task, form):
    score = environment.score(attempt(environment, task, [form.format(task.ground_truth)]))
    assert (score.reward, score.success) == (0.0, False)


def test_a_right_answer_in_a_truncated_text_lacks_the_format(environment, task):
    score = environment.score(attempt(environment, task, environment.expert(task), status="truncated"))
    assert score.reward == pytest.approx(0.9)
    assert score.success is True
    assert score.parts == {"answer": 1.0, "format": 0.0, "answered": 1.0}


def test_an_attempt_without_a_turn_earns_nothing(environment, task):
    score = environment.score(attempt(environment, task, [], status="truncated"))
    assert (score.reward, score.success) == (0.0, False)


def test_the_question_is_posed_with_the_form_of_the_answer(environment, task):
    observation = environment.start().reset(task, seed=0)
    assert observation.messages == (
        {"role": "user", "content": f"{task.prompt}\nGive the final answer in <answer></answer> tags."},
    )
    assert observation.tools == ()
    assert observation.metadata == {"ground_truth": task.ground_truth, "kind": "addition"}


@given(st.text(st.characters()))
def test_any_text_ends_the_episode(action):
    environment = TextMath(TextMathConfig(n_train=1))
    (task,) = environment.tasks("train")
    trajectory = attempt(environment, task, [action])
    assert trajectory.turns[0].done
    assert bool(trajectory.turns[0].observation) == (final_answer(action) is None)
    assert environment.score(trajectory).reward is not None


def test_scoring_again_gives_the_same(environment, task):
    trajectory = attempt(environment, task, environment.expert(task))
    assert environment.score(trajectory) == environment.score(trajectory)


def test_tasks_have_ids_of_their_own_and_splits_share_no_question(environment):
    train, test = environment.tasks("train"), environment.tasks("test")
    assert len({task.task_id for task in train}) == len(train)
    assert not {task.prompt for task in train} & {task.prompt for task in test}
    assert {task.split for task in test} == {"test"}
    assert len(test) >= 500


def test_a_data_set_takes_the_place_of_generated_tasks(tmp_path):
    file = tmp_path / "tasks.jsonl"
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One plus one?"}]
    file.write_text(json.dumps({"id": "a", "prompt": conversation, "answer": "steps #### 2"}))
    environment = TextMath(TextMathConfig(data=str(file)))
    (task,) = environment.tasks("train")
    assert list(environment.start().reset(task, seed=0).messages) == conversation
    assert environment.score(attempt(environment, task, ["<answer>2.0</answer>"])).success


@pytest.mark.parametrize(
    "values",
    [
        {"level": 0},
        {"level": 6},
        {"level": -1},
        {"format_weight": -0.1},
        {"format_weight": 1.1},
        {"format_weight": float("nan")},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(values):
    with pytest.raises(SettingsError, match=f"`text_math.{next(iter(values))}`") as caught:
        TextMathConfig(**values)
    assert caught.value.hint


@pytest.mark.parametrize("values", [{"n_train": -1}, {"n_test": -1}], ids=str)
def test_negative_numbers_of_tasks_are_refused(values):
    with pytest.raises(SettingsError):
        TextMathConfig(**values)


def test_an_unknown_family_is_refused():
    with pytest.raises(SettingsError, match="`algebra`"):
        TextMath(TextMathConfig(family="algebra")).tasks("train")
