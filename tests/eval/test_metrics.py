"""The numbers of an evaluation, their table, prices, and two evaluations side by side."""

import json

import numpy as np
import pytest
from benches import Says, run_bench
from running import skyrl

from nanoskyrl.eval.compare import bootstrap_95, paired
from nanoskyrl.eval.metrics import cost, summarize
from nanoskyrl.eval.prices import read_prices
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.registry import names
from nanoskyrl.stages.core.rows import to_table
from nanoskyrl.stages.core.trajectory import ToolCall, Turn
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.eval import EvalConfig, evaluate
from nanoskyrl.stages.looking.eval_report import LINES, compare, comparison, summary_of, table
from nanoskyrl.stages.models.policy import STARTER_DIRECTORY, PolicyInfo, model_name, write_info


@pytest.fixture
def shard(group):
    """Return scored rows of several tasks as a table."""

    def make(rewards, **changes):
        rows = [
            row for task, values in rewards.items() for row in group(values, name=task, task_id=task, **changes)
        ]  # fmt: skip
        return to_table(rows, "score")

    return make


def turn(*calls):
    return Turn(action="a", observation="", done=False, tool_calls=calls)


OK = ToolCall(tool="t", result="1", ok=True)
BAD = ToolCall(tool=None, ok=False, error="malformed")
LATE = ToolCall(tool="t", ok=False, error="tool_error")


def test_numbers_by_hand(shard):
    tables = [shard({"a": [1, 1, 0, 0], "b": [0, 0, 0, 0]}, turns=[turn(OK, OK), turn(BAD), turn(LATE)])]
    found, scored = summarize(tables, 4, prices={"prompt": 2.0, "completion": 10.0})
    assert (found["tasks"], found["samples"], found["success"], len(scored)) == (2, 8, 0.25, 8)
    # Of task a, one of two samples is right with 1 - C(2,2)/C(4,2) = 5/6.
    assert (found["pass_at_1"], found["pass_at_2"], found["pass_at_4"]) == pytest.approx((0.25, 5 / 12, 0.5))
    assert [found[f"tool_calls_{kind}"] for kind in ("valid", "invalid", "failed")] == [16, 8, 8]
    assert (found["turns_mean"], found["turns_p95"]) == (3.0, 3.0)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (24, 16)
    assert found["cost"] == pytest.approx((24 * 2 + 16 * 10) / 1e6)


def evaluated(name, output, says):
    """Return the summary of an environment's evaluation, of four tasks and with three turns at most."""
    config = EvalConfig(limit=4, max_turns=3)
    evaluate(None, output, config, RolloutConfig(engine="scripted"), name=name, engine=Says(says))
    return summary_of(output)


def test_a_reply_without_an_answer_is_no_call_and_no_answer(tmp_path):
    replies = iter(["five", "<answer>x</answer>", "<answer>", "<answer>y</answer>"])
    found = evaluated("text_math", tmp_path / "out", lambda task: next(replies))
    assert found["no_answer"] == 0.5
    assert [found[f"tool_calls_{kind}"] for kind in ("valid", "invalid", "failed")] == [0, 0, 0]


def test_calls_to_the_last_turn_are_no_answer(tmp_path):
    call = '<tool_call>{"tool": "calculator", "args": {"expression": "1/0"}}</tool_call>'
    found = evaluated("tool_use", tmp_path / "out", lambda task: call)
    assert (found["no_answer"], found["turns_mean"], found["tool_calls_failed"]) == (1.0, 3.0, 12)


def test_an_environment_without_answers_has_no_share_of_them(tmp_path):
    assert evaluated("webshop_lite", tmp_path / "out", lambda task: "search[red shoes]")["no_answer"] is None


def test_the_95th_percentile_of_steps(shard):
    tables = [shard({f"t{n}": [1.0]}, turns=[turn()] * n) for n in range(1, 21)]
    found, _ = summarize(tables, 1)
    assert found["turns_p95"] == pytest.approx(float(np.percentile(range(1, 21), 95)))
    assert found["turns_mean"] == 10.5


def test_what_was_not_judged_is_no_zero(shard):
    found, _ = summarize([shard({"a": [1, None], "b": [None, None]})], 2)
    assert (found["success"], found["tasks"], found["not_scored"], found["samples"]) == (1.0, 1, 3, 4)
    assert found["pass_at_2"] is None  # no task has two judged samples


def test_tokens_that_were_not_counted_are_no_zeros(shard):
    known = shard({"a": [1, 0]}, prompt_tokens=10, completion_tokens=4)
    unknown = shard({"b": [1]}, prompt_tokens=None, completion_tokens=None)
    prices = {"prompt": 1.0, "completion": 1.0}
    found, _ = summarize([known, unknown], 1, prices=prices)
    assert (found["samples"], found["prompt_tokens"], found["completion_tokens"]) == (3, 20, 8)
    assert (found["completion_tokens_mean"], found["cost"]) == (4.0, None)
    none, _ = summarize([unknown], 1, prices=prices)
    assert [none[key] for key in ("prompt_tokens", "completion_tokens", "completion_tokens_mean", "cost")] == [None] * 4


def test_all_right_still_has_an_interval(shard):
    found, _ = summarize([shard({f"t{i}": [1.0] for i in range(10)})], 1)
    low, high = found["success_95"]
    assert high == pytest.approx(1.0)
    assert low == pytest.approx(0.7225, abs=1e-3)  # Wilson, 10 of 10


def test_nothing_has_no_numbers_and_no_zeros():
    found, _ = summarize([], 1)
    assert found["samples"] == 0
    assert [found[key] for key in ("success", "success_95", "turns_mean", "turns_p95", "truncated")] == [None] * 5


def test_pass_at_k_needs_k_samples():
    with pytest.raises(SettingsError, match="pass@8 needs at least 8 samples") as error:
        EvalConfig(n_samples=4, pass_k=(8,))
    assert error.value.hint == "Give `--n-samples 8`"


def test_chosen_k_are_given_and_no_others(shard):
    found, _ = summarize([shard({"a": [1, 0, 0]})], 3, ks=(3,))
    assert [key for key in found if key.startswith("pass_at_")] == ["pass_at_3"]


# Prices


def test_a_price_table_is_read_by_model(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text('["a/model-1"]\nprompt = 0.5\ncompletion = 2\n')
    assert read_prices(str(path), "a/model-1") == {"prompt": 0.5, "completion": 2.0}
    assert read_prices(None, "a/model-1") is None
    with pytest.raises(InputError, match="no prices of `a/model-2`") as error:
        read_prices(str(path), "a/model-2")
    assert error.value.hint == "Did you mean `a/model-1`?"


def test_without_a_model_a_table_is_read_and_nothing_is_looked_up(tmp_path):
    (tmp_path / "prices.toml").write_text("[m]\nprompt = 1\ncompletion = 1\n")
    assert read_prices(str(tmp_path / "prices.toml"), None) is None
    with pytest.raises(InputError, match="there is no table of prices"):
        read_prices(str(tmp_path / "none.toml"), None)


def test_a_policys_model_is_called_what_its_run_began_with(tmp_path):
    published, elsewhere = tmp_path / "policies" / "00000003", tmp_path / "mine"
    for place in (published, elsewhere):
        place.mkdir(parents=True)
    write_info(published, PolicyInfo(source="owner/a-model"))
    kept = tmp_path / "models--owner--a-model" / "snapshots" / "0a1b"
    assert [model_name(place) for place in (STARTER_DIRECTORY, published, kept, elsewhere)] == [
        "starter", "owner/a-model", "owner/a-model", "mine",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "prompt = [",
        '[m]\nprompt = "much"\ncompletion = 1',
        "[m]\nprompt = 1",
        "m = 3",
        "[m]\nprompt = -1\ncompletion = 1",
    ],
)
def test_prices_that_are_none_are_refused(text, tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"prices\.toml"):
        read_prices(str(path), "m")


def test_without_prices_there_is_no_cost():
    assert cost(1000, 1000, None) is None
    assert cost(2_000_000, 1_000_000, {"prompt": 1.0, "completion": 4.0}) == 6.0


# Side by side


def test_paired_differences_by_hand():
    found = paired(
        {"a": [1, 1], "b": [0, 1], "c": [0], "only1": [1]}, {"a": [1, 1], "b": [1, 1], "c": [1], "only2": [0]}
    )
    assert (found.tasks, found.first, found.second) == (3, 0.5, 1.0)
    assert found.difference == 0.5
    assert (found.improved, found.worsened) == (("b", "c"), ())
    assert (found.only_first, found.only_second) == (("only1",), ("only2",))


def test_a_bootstrap_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(60):
        low, high = bootstrap_95(rng.choice([-1.0, 0.0, 1.0], p=[0.1, 0.6, 0.3], size=60))
        covered += low <= 0.2 <= high
    assert covered >= 51  # 95% of 60 is 57; fewer than 51 comes by chance once in a thousand times


def test_the_bootstrap_repeats_itself():
    values = np.array([0.0, 1.0, 1.0, -1.0])
    assert bootstrap_95(values) == bootstrap_95(values)


@pytest.fixture
def two(tmp_path):
    """Return two evaluations of the same 20 tasks: the second knows half of the letters."""
    run_bench("mmlu_pro", tmp_path / "a", engine=Says(lambda task: "Answer: A"), limit=20)
    run_bench(
        "mmlu_pro", tmp_path / "b", limit=20,
        engine=Says(lambda task: f"Answer: {task.ground_truth if task.ground_truth < 'E' else 'none'}"),
    )  # fmt: skip
    return tmp_path / "a", tmp_path / "b"


def test_two_evaluations_are_compared_task_by_task(two):
    found = compare(*two)
    assert found["tasks"] == 20
    assert found["difference"] == pytest.approx(found["second"] - found["first"])
    assert len(found["improved"]) - len(found["worsened"]) == round(20 * found["difference"])
    text = comparison(found)
    assert all(task in text for task in found["improved"])
    assert "which leaves out 0" in text
    assert compare(two[0], two[0])["difference_95"] == (0.0, 0.0)


def test_compare_prints_json(two):
    done = skyrl("eval", "--compare", *two, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["benchmark"] == "mmlu_pro"


def test_other_benchmarks_are_not_compared(two, tmp_path):
    run_bench("mmlu", tmp_path / "c")
    with pytest.raises(InputError, match="is of `mmlu_pro`"):
        compare(two[0], tmp_path / "c")
    run_bench("mmlu_pro", tmp_path / "d", limit=2, seed=9)
    if not set(summary_of(tmp_path / "d")["task_ids"]) & set(summary_of(two[0])["task_ids"]):
        with pytest.raises(InputError, match="share no judged task"):
            compare(two[0], tmp_path / "d")


def test_another_way_of_grading_is_noted(two, tmp_path):
    run_bench("mmlu_pro", tmp_path / "c", limit=20, tables={"mmlu_pro": {"official_chain": True}})
    assert compare(two[0], tmp_path / "c")["graded_otherwise"] == ["official_chain"]
    assert comparison(compare(two[0], tmp_path / "c")).endswith("note: the two differ in `mmlu_pro.official_chain`")
    assert "note:" not in comparison(compare(*two))


def test_a_table_of_all_benchmarks_keeps_names_and_labels_whole():
    own = {"accuracy_of_all_half_width": 0.1, "calibration_error_official": None}
    numbers = {"metric": "exact_match_no_judge", "success": 0.5, "success_95": [0.25, 0.75], "tasks": 100, **own}
    benches = names("bench")
    assert len(benches) >= 13
    text = table({name: {**numbers, "note": f"of {name}"} if name == "hle" else numbers for name in benches})
    blocks = text.rpartition("\n")[0].split("\n\n")
    assert text.endswith("\nhle: of hle")
    assert [block.splitlines()[0].split() for block in blocks] == [
        benches[i : i + 4] for i in range(0, len(benches), 4)
    ]
    labels = [label for label, _, _ in LINES] + list(own)
    for block in blocks:
        lines = block.splitlines()
        assert lines[1].split() == ["exact_match_no_judge"] * len(lines[0].split())
        assert [line.strip().partition("  ")[0] for line in lines[3:]] == labels
        assert max(map(len, lines)) <= 130


def test_the_table_has_a_column_an_evaluation(two):
    text = table({"first": summary_of(two[0]), "second": summary_of(two[1])})
    lines = text.splitlines()
    assert "first" in lines[0]
    assert "second" in lines[0]
    assert any(line.split()[:1] == ["pass@1"] for line in lines)
    assert max(map(len, lines)) <= 120
