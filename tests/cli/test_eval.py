"""`skyrl eval` and `skyrl grade` as a user meets them."""

import json
import shutil

import pytest
from benches import rows_file
from endpoints import endpoint
from running import as_flags, data_file, skyrl_here as skyrl


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_several_benchmarks_make_one_table_and_shards_beside_the_policy(tmp_path):
    done = skyrl(
        "eval", "--bench", "mmlu,gpqa", "--engine", "scripted", "--run", tmp_path / "run",
        "--data", f"mmlu={rows_file('mmlu')}", "--data", f"gpqa={rows_file('gpqa')}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["mmlu", "gpqa"]
    for name in ("mmlu", "gpqa"):
        summary = json.loads((tmp_path / "run" / "evals" / "scripted" / name / "_summary.json").read_text())
        assert (summary["benchmark"], summary["success"]) == (name, 1.0)


def test_json_holds_the_summaries(tmp_path):
    done = skyrl(
        "eval", "--bench", "gsm8k", "--data", rows_file("gsm8k"), "--engine", "scripted", "--limit", 3, "--json",
        "--out", tmp_path / "out", "--run", tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["numbers"]["gsm8k"]["tasks"] == 3
    assert (tmp_path / "out" / "gsm8k" / "_manifest.json").is_file()


def test_an_endpoint_without_further_words_gets_the_default_benchmarks(tmp_path):
    with endpoint(lambda body: "Answer: 15\nConfidence: 80%") as server:
        done = skyrl(
            "eval", "--endpoint", server.url, "--model", "some/model", "--run", tmp_path / "run",
            "--data", f"hle={rows_file('hle')}", "--data", f"swe_bench_verified={rows_file('swe_bench_verified')}",
            "--set", "swe_bench_verified.harness=never",
        )  # fmt: skip
    assert done.returncode == 3, done.stderr  # nothing said what is resolved
    assert sorted(p.name for p in (tmp_path / "run" / "evals" / "some_model").iterdir()) == [
        "hle",
        "swe_bench_verified",
    ]
    assert "No resolve rate" in done.stdout
    assert "exact_match_no_judge" in done.stdout


def test_an_endpoint_that_the_engine_would_not_ask_is_refused(tmp_path):
    found = skyrl(
        "eval", "--bench", "gsm8k", "--engine", "hf", "--endpoint", "http://127.0.0.1:9/v1", "--run", tmp_path
    )
    assert found.returncode == 2
    assert "`--endpoint` is asked by the engine openai, and `--engine` is hf" in found.stderr


def test_a_dead_endpoint_ends_with_3_and_a_count(tmp_path):
    done = skyrl(
        "eval", "--bench", "gsm8k,mmlu", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--limit", 2,
        "--data", f"gsm8k={rows_file('gsm8k')}", "--data", f"mmlu={rows_file('mmlu')}", "--run", tmp_path / "run",
        "--set", "openai.retries=0",
    )  # fmt: skip
    assert done.returncode == 3
    assert "error: 2 of 2 attempts at gsm8k were not answered" in done.stderr
    assert "error: 2 of 2 attempts at mmlu were not answered" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("name", "setting", "code", "says"),
    [
        ("mmlu", "data", 2, "/none.txt.jsonl`"), ("mmlu", "prompt", 2, "/none.txt`"),
        ("hle", "judge_prompt", 1, "/none.txt`: No such file"),
    ],
)  # fmt: skip
def test_a_later_benchmark_that_cannot_begin_is_named_before_the_first_begins(name, setting, code, says, tmp_path):
    rows = {"data": rows_file(name), setting: "none.txt.jsonl" if setting == "data" else "none.txt"}
    done = skyrl(
        "eval", "--bench", f"gsm8k,{name}", "--engine", "scripted", "--limit", 1, "--run", tmp_path / "run",
        "--data", f"gsm8k={rows_file('gsm8k')}", *as_flags({name: rows}),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert not (tmp_path / "run").exists()


def test_what_is_finished_is_printed_when_a_later_benchmark_ends_the_command(tmp_path):
    common = (
        "eval", "--bench", "gsm8k,mmlu", "--engine", "scripted", "--run", tmp_path / "run",
        "--data", f"gsm8k={rows_file('gsm8k')}", "--data", f"mmlu={rows_file('mmlu')}",
    )  # fmt: skip
    assert skyrl(*common, "--limit", 1).returncode == 0
    shutil.rmtree(tmp_path / "run" / "evals" / "scripted" / "gsm8k")
    for flags in ((), ("--json",)):
        done = skyrl(*common, "--limit", 2, *flags)  # mmlu is there already, of another number of tasks
        assert done.returncode == 2
        assert "error: `" in done.stderr
        assert "mmlu` is finished with another" in done.stderr
        if flags:
            assert [(name, found["tasks"]) for name, found in json.loads(done.stdout)["numbers"].items()] == [
                ("gsm8k", 2)
            ]
        else:
            assert done.stdout.split()[:2] == ["gsm8k", "accuracy"]


def test_a_judge_is_named_by_flags(tmp_path):
    def judge(body):
        fields = {"extracted_final_answer": "1", "reasoning": "", "correct": "yes", "confidence": 50, "strict": True}
        return json.dumps(fields)

    with endpoint(judge) as server:
        done = skyrl(
            "eval", "--bench", "hle", "--data", rows_file("hle"), "--engine", "scripted", "--run", tmp_path / "run",
            "--judge-endpoint", server.url, "--judge-model", "j", "--limit", 2, "--json",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["numbers"]["hle"]
    assert (found["metric"], found["success"], found["calibration_error"]) == ("accuracy", 1.0, 0.5)


def test_a_misspelt_benchmark_gets_a_suggestion(tmp_path):
    done = skyrl("eval", "--bench", "gsm8", "--run", tmp_path / "run")
    assert done.returncode == 2
    assert "Did you mean `gsm8k`?" in done.stderr


def test_data_of_a_benchmark_that_is_not_run_is_refused(tmp_path):
    done = skyrl("eval", "--bench", "gsm8k,mmlu", "--data", "rows.jsonl", "--run", tmp_path / "run")
    assert done.returncode == 2
    assert "BENCH=FILE" in done.stderr


def test_a_cost_is_given_where_prices_are(tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text("[m]\nprompt = 1000\ncompletion = 10000\n")
    with endpoint(lambda body: "Answer: A") as server:
        done = skyrl(
            "eval", "--bench", "mmlu", "--data", rows_file("mmlu"), "--endpoint", server.url, "--model", "m",
            "--prices", prices, "--run", tmp_path / "run", "--json",
        )  # fmt: skip
    assert json.loads(done.stdout)["numbers"]["mmlu"]["cost"] == pytest.approx(3 * (7 * 1000 + 3 * 10000) / 1e6)


def test_a_policy_is_priced_by_its_name_and_gold_answers_need_no_price(tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text("[starter]\nprompt = 1000\ncompletion = 10000\n")
    common = (
        "--bench", "mmlu", "--data", rows_file("mmlu"), "--prices", prices, "--limit", 1, "--run", tmp_path / "run",
        "--json",
    )  # fmt: skip
    asked = skyrl("eval", "--policy", "starter", *common, "--set", "eval.max_generate_length=4")
    assert asked.returncode == 0, asked.stderr
    found = json.loads(asked.stdout)["numbers"]["mmlu"]
    assert found["cost"] == pytest.approx((found["prompt_tokens"] * 1000 + found["completion_tokens"] * 10000) / 1e6)
    gold = skyrl("eval", "--engine", "scripted", *common)
    assert gold.returncode == 0, gold.stderr
    assert json.loads(gold.stdout)["numbers"]["mmlu"]["cost"] is None


def own_tasks(path, count):
    return lines(path, [{"prompt": f"{i} + 1", "ground_truth": str(i + 1)} for i in range(count)])


@pytest.mark.parametrize(
    ("limit", "tasks", "says"), [((), 5, None), (("--limit", 9), 5, "`eval.limit` is 9, and there are 5 tasks"), (("--limit", 3), 3, None)]
)  # fmt: skip
def test_an_environment_gives_at_most_the_tasks_it_has(limit, tasks, says, tmp_path):
    file, run = own_tasks(tmp_path / "tasks.jsonl", 5), tmp_path / "run"
    done = skyrl("eval", "--engine", "scripted", "--run", run, *limit, "--set", f"text_math.data={file}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("`eval.limit`") == (says is not None)
    assert says is None or says in done.stderr
    out = run / "evals" / "scripted" / "text_math"
    assert len(json.loads((out / "_summary.json").read_text())["task_ids"]) == tasks
    manifest = json.loads((out / "_manifest.json").read_text())
    assert (manifest["settings"]["rollout"]["train_batch_size"], manifest["rows_out"]) == (tasks, tasks)


@pytest.mark.parametrize("own_test", [False, True])
def test_an_environment_is_reported_as_a_benchmark_is_and_says_which_tasks_they_were(own_test, tmp_path):
    file, test, run = own_tasks(tmp_path / "tasks.jsonl", 5), own_tasks(tmp_path / "test.jsonl", 4), tmp_path / "run"
    data = ("--set", f"text_math.data={file}", *(("--set", f"text_math.test_data={test}") if own_test else ()))
    common = ("eval", "--engine", "scripted", "--n-samples", 2, "--run", run, *data)
    kind, tasks = ("held-out", 4) if own_test else ("training", 5)
    done = skyrl(*common)
    assert done.returncode == 0, done.stderr
    out = run / "evals" / "scripted" / "text_math"
    assert (
        f"success 1.000 [{'0.510' if own_test else '0.566'}, 1.000] on {tasks} {kind} tasks of text_math" in done.stderr
    )
    assert done.stdout.startswith(" ")
    assert f"success on {kind} tasks" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["pass@2", "1.000"] in rows
    assert ["samples", str(2 * tasks)] in rows
    as_json = skyrl(*common, "--json")
    summary = json.loads((out / "_summary.json").read_text())
    assert json.loads(as_json.stdout) == {"output": {"text_math": str(out)}, "numbers": {"text_math": summary}}
    shown = skyrl("show", out, "--limit", 1)
    assert shown.returncode == 0, shown.stderr
    assert done.stdout.rstrip() in shown.stdout
    assert "pass@2" not in skyrl("show", out, "--row", 0).stdout


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_the_rows_of_an_evaluation_are_shown_without_its_summary(text, tmp_path):
    file, out = own_tasks(tmp_path / "tasks.jsonl", 5), tmp_path / "out"
    skyrl("eval", "--engine", "scripted", "--run", tmp_path / "run", "--out", out, "--set", f"text_math.data={file}")
    (out / "_summary.json").unlink()
    if text is not None:
        (out / "_summary.json").write_text(text)
    shown = skyrl("show", out)
    assert shown.returncode == 0, shown.stderr
    assert "5 rows of `eval`" in shown.stdout
    assert shown.stdout.count("completed") == 5


# skyrl grade

ROWS = [
    ({"kind": "math", "gold": "\\frac{1}{2}", "pred": "0.5"}, True),
    ({"kind": "set", "gold": "1, 2", "pred": "{2, 1}"}, True),
    ({"kind": "tuple", "gold": "(1, 2)", "pred": "(2, 1)"}, False),
    ({"kind": "mcq", "gold": "C", "pred": "Answer: C"}, True),
    ({"kind": "mcq", "gold": 0, "pred": "Answer: B"}, False),
    ({"kind": "number", "gold": "#### 1,000", "pred": "so #### 1000"}, True),
    ({"kind": "number", "gold": "7", "pred": 7}, True),
    ({"kind": "code", "gold": {"inputs": ["2"], "outputs": ["4"]}, "pred": "print(int(input()) ** 2)"}, True),
    ({"kind": "tool_call", "gold": {"name": "f", "arguments": {"x": 1}}, "pred": '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'}, True),
    ({"kind": "final_answer", "gold": "Nairobi", "pred": "<answer>nairobi</answer>"}, True),
    ({"kind": "final_answer", "gold": "Nairobi", "pred": None}, False),
]  # fmt: skip


def test_rows_are_graded_by_kind(tmp_path):
    path = lines(tmp_path / "rows.jsonl", [{"id": i, **row} for i, (row, _) in enumerate(ROWS)])
    done = skyrl("grade", path)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["correct"] for row in found] == [right for _, right in ROWS]
    assert [row["id"] for row in found] == list(range(len(ROWS)))
    assert all(row["why"] for row in found)
    assert "8 right, 3 wrong, 0 without a verdict" in done.stderr


@pytest.mark.slow
def test_a_power_that_never_ends_has_no_verdict(tmp_path):
    path = lines(tmp_path / "rows.jsonl", [{"kind": "math", "gold": "1", "pred": "9^{9^{9^{9}}} - 9^{9^{9^{9}}} + 1"}])
    done = skyrl("grade", path)
    row = json.loads(done.stdout)
    assert row["correct"] in (None, False)
    assert done.returncode == (3 if row["correct"] is None else 0)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"kind": "maths", "gold": "1", "pred": "1"}, "Did you mean `math`?"),
        ({"kind": "math", "pred": "1"}, "line 1 of"), ({"kind": "mcq", "gold": "AB", "pred": "A"}, "is no letter"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_graded_is_named(row, says, tmp_path):
    done = skyrl("grade", lines(tmp_path / "rows.jsonl", [row]))
    assert done.returncode == 2
    assert says in done.stderr


def test_a_malformed_row_ends_nothing_and_a_user_s_column_stays(tmp_path):
    good = {"kind": "math", "gold": "1", "pred": "Answer: 1", "why": "mine"}
    done = skyrl("grade", lines(tmp_path / "rows.jsonl", [good, {"kind": "math", "gold": "1"}, good]), "--explain")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["correct"] for row in found] == [True, None, True]
    assert (found[0]["why"], found[0]["graded_why"]) == ("mine", "right")
    assert (found[0]["taken"], found[0]["form"], found[0]["compared_as"]) == ("1", "answer line", "spelling")
    assert "there is no `pred`" in found[1]["why"]
    assert done.returncode == 2
    assert "2 right, 0 wrong, 1 without a verdict" in done.stderr
    assert "line 2 of" in done.stderr


def test_a_missing_file_is_named(tmp_path):
    done = skyrl("grade", tmp_path / "none.jsonl")
    assert done.returncode == 2
    assert "no file at" in done.stderr


@pytest.mark.slow
def test_all_gold_solutions_of_gsm8k_are_graded_right(tmp_path):
    rows = [json.loads(line) for line in data_file("gsm8k/test_shared.jsonl").read_text().splitlines()]
    path = lines(tmp_path / "r.jsonl", [{"kind": "number", "gold": r["answer"], "pred": r["answer"]} for r in rows])
    done = skyrl("grade", path)
    assert "1000 right, 0 wrong, 0 without a verdict" in done.stderr
