"""Every benchmark on its sample rows: right answers, wrong ones, the starter policy, and what is kept of them."""

import csv
import json
import random

import numpy as np
import pytest
from benches import JUDGED, OWN, SAMPLES, STARTER, UNGRADED, Says, right, rows_file, run_bench, table_of, wrong
from running import skyrl

from nanoskyrl.eval.benchmarks.choices import answer_letter, official_chain, question_text
from nanoskyrl.stages.core.config import plugin_config
from nanoskyrl.stages.core.errors import ConflictError, InputError, SettingsError
from nanoskyrl.stages.core.manifest import STAYS_LOCAL, read_manifest, refuse_to_leave
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.core.trajectory import WITHHELD, Turn
from nanoskyrl.stages.engines.scripted import ScriptedConfig
from nanoskyrl.stages.eval import settings_of

ALL = (*SAMPLES, *OWN)
GRADED = [name for name in ALL if name not in UNGRADED]


def bench(name, **settings):
    return lookup("bench", name)(plugin_config({name: {"data": str(rows_file(name)), **settings}}, "env", name))


@pytest.mark.parametrize("name", GRADED)
def test_right_answers_in_the_words_of_a_model_score_one(name, tmp_path):
    found = run_bench(name, tmp_path / "out", engine=right(name), limit=0 if name != "humaneval" else 12)
    assert found["success"] == 1.0
    assert found["no_answer"] == 0.0
    assert found["not_scored"] == 0
    assert found["tasks"] == found["samples"] == len(found["task_ids"])


@pytest.mark.parametrize("name", GRADED)
def test_wrong_answers_score_zero(name, tmp_path):
    found = run_bench(name, tmp_path / "out", engine=wrong(name), limit=0 if name != "humaneval" else 12)
    assert found["success"] == 0.0
    assert found["not_scored"] == 0


@pytest.mark.parametrize("name", GRADED)
def test_whatever_a_model_writes_is_no_error_and_not_right(name, tmp_path):
    texts = [
        "",
        "\ud800 \x00 {{{{ ```",
        "Answer:",
        "#### ",
        "\\boxed{",
        "```python\n",
        "Confidence: 1e999%",
        "{" * 9999,
    ]
    turns = iter(texts)
    found = run_bench(name, tmp_path / "out", engine=Says(lambda task: next(turns)), limit=1, n_samples=len(texts))
    assert found["success"] == 0.0
    assert (found["not_scored"], found["samples"]) == (0, len(texts))


@pytest.mark.parametrize("name", ALL)
def test_the_starter_policy_runs_through_every_benchmark(name, tmp_path):
    out = tmp_path / "out"
    found = run_bench(
        name, out, engine_name="hf", policy=STARTER, limit=2, n_samples=2, max_generate_length=4, max_turns=1
    )
    table = table_of(out)
    assert found["samples"] == table.num_rows == 2 * found.get("tasks", 0) or name in UNGRADED
    assert table.column("prompt_tokens").to_pylist() != [0] * table.num_rows
    check(table, "eval")
    assert read_manifest(out).stage == "eval"


@pytest.mark.parametrize("name", ALL)
def test_the_tasks_are_the_first_of_a_seeded_shuffle_and_written_down(name, tmp_path):
    ids = [task.task_id for task in bench(name).tasks("test")]
    found = [
        run_bench(name, tmp_path / str(limit), engine=Says(lambda task: ""), limit=limit)["task_ids"]
        for limit in (1, 2, 0)
    ]
    assert found[0] == found[1][:1] == found[2][:1]
    assert found[1] == found[2][:2]
    assert sorted(found[2]) == sorted(ids)


def test_another_seed_chooses_other_tasks(tmp_path):
    ids = [
        run_bench("mmlu_pro", tmp_path / str(seed), engine=Says(lambda task: ""), limit=20, seed=seed)["task_ids"]
        for seed in (0, 1)
    ]
    assert ids[0] != ids[1]


def test_a_benchmark_is_not_trained_on():
    with pytest.raises(SettingsError, match="a benchmark is not trained on"):
        bench("gsm8k").tasks("train")


# Rows that are not what they should be


def test_a_missing_file_of_rows_names_the_benchmark(tmp_path):
    with pytest.raises(InputError, match=r"no file at `.*none\.csv`"):
        run_bench("mmlu", tmp_path / "out", tables={"mmlu": {"data": str(tmp_path / "none.csv")}})


def test_rows_of_another_benchmark_name_the_column(tmp_path):
    with pytest.raises(InputError, match="no column `choices`, which mmlu needs"):
        run_bench("mmlu", tmp_path / "out", tables={"mmlu": {"data": str(rows_file("gsm8k"))}})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answer": 4}, "the right option is 4 of 4"),
        ({"answer": "seven"}, "row 0 of mmlu"),
        ({"choices": None}, "row 0"),
    ],
)
def test_a_row_that_does_not_hold_what_it_should_is_named(change, says, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "?", "choices": ["a", "b", "c", "d"], "answer": 0, **change}) + "\n")
    with pytest.raises(InputError, match=says):
        run_bench("mmlu", tmp_path / "out", tables={"mmlu": {"data": str(path)}})


CHOICES = {
    "mmlu": ("choices", {"question": "Q?", "answer": 2}),
    "mmlu_pro": ("options", {"question_id": 1, "question": "Q?", "answer_index": 2, "category": "law"}),
}
"""Of the benchmarks whose rows hold lists: the list's column, and the rest of a row."""


def csv_of(name, cell, path):
    column, rest = CHOICES[name]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[column, *rest], [cell, *rest.values()]])
    return str(path)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(
    "cell", ["""['a, b', "it's", '[c]']""", '["a, b", "it\'s", "[c]"]', "('a, b', 'it\\'s', '[c]')"]
)
def test_options_in_a_csv_cell_are_a_list_of_json_or_python(name, cell, tmp_path):
    (task,) = bench(name, data=csv_of(name, cell, tmp_path / "rows.csv")).tasks("test")
    assert task.messages[0]["content"].endswith("\n\nA) a, b\nB) it's\nC) [c]")
    assert (task.ground_truth, task.metadata["options"]) == ("C", 3)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("cell", ["['a' 'b'\n 'c']", "[1 2 3]", "a, b, c", "", "3", '{"a": 1, "b": 2}', "[" * 9999])
def test_options_that_are_no_list_are_refused_by_file_and_row(name, cell, tmp_path):
    with pytest.raises(
        InputError, match=rf"(?s)row 0 of `.*rows\.csv`: `{CHOICES[name][0]}` must be a list of options"
    ):
        bench(name, data=csv_of(name, cell, tmp_path / "rows.csv")).tasks("test")


@pytest.mark.slow
def test_the_hub_being_off_names_the_way_out(tmp_path):
    found = skyrl(
        "eval", "--bench", "gsm8k", "--engine", "scripted", "--out", tmp_path / "out", "--run", tmp_path / "run",
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert found.returncode == 2
    assert "the rows of gsm8k (`openai/gsm8k` on the hub) cannot be had" in found.stderr
    assert "--set gsm8k.data=PATH" in found.stderr
    assert not (tmp_path / "out").exists()


def test_rows_that_changed_are_another_evaluation(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = rows_file("mmlu").read_text()
    path.write_text(lines)
    tables = {"mmlu": {"data": str(path)}}
    run_bench("mmlu", tmp_path / "out", tables=tables)
    path.write_text(lines.replace("LIFO", "last in, first out"))
    with pytest.raises(ConflictError, match="finished with another `inputs"):
        run_bench("mmlu", tmp_path / "out", tables=tables)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_every_kind_of_file_holds_the_same_tasks(kind, tmp_path):
    import pandas

    rows = [json.loads(line) for line in rows_file("gsm8k").read_text().splitlines()[:5]]
    path = tmp_path / f"rows.{kind}"
    frame = pandas.DataFrame(rows)
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        frame.to_parquet(path) if kind == "parquet" else frame.to_csv(path, index=False)
    found = run_bench("gsm8k", tmp_path / "out", tables={"gsm8k": {"data": str(path)}})
    assert (found["success"], found["tasks"]) == (1.0, 5)


def test_the_manifest_names_no_place_and_no_address(tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("{question}")
    out = tmp_path / "out"
    run_bench("gsm8k", out, limit=1, tables={"gsm8k": {"prompt": str(prompt)}})
    run_bench("hle", tmp_path / "hle", limit=1, tables={"hle": {"judge_prompt": str(prompt)}})
    run_bench("swe_bench_verified", tmp_path / "swe", tables={"swe_bench_verified": {"repositories": str(tmp_path)}})
    for place in (out, tmp_path / "hle", tmp_path / "swe"):
        text = (place / "_manifest.json").read_text() + (place / "_summary.json").read_text()
        assert str(tmp_path) not in text
        assert "docker.sock" not in text
    assert read_manifest(out).inputs.keys() == {"data", "prompt", "tasks"}
    prompt.write_text("Well: {question}")
    with pytest.raises(ConflictError, match="another `inputs"):
        run_bench("gsm8k", out, limit=1, tables={"gsm8k": {"prompt": str(prompt)}})


# Multiple choice


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: C", "C"), ("answer is (B)", "B"), ("The answer is **D**.", "D"), ("Answer: $A$", "A"),
        ("The final answer is \\boxed{C}", "C"), ("\\boxed{\\text{B}}", "B"), ("C", "C"), ("(d)", None), ("(D).", "D"),
        ("Answer: B\nNo, wait.\nAnswer: C", "C"), ("I think A lens would do.", None), ("I", "I"),
        ("Answer: I think it is C", None), ("A cat sat. Answer: J", "J"), ("Answer: K", None), ("", None),
        ("Answer: A because it fits", "A"), ("Answer: C. Option B is wrong, as is option D.", "C"),
    ],
)  # fmt: skip
def test_a_letter_counts_where_an_answer_is_given(text, letter):
    assert answer_letter(text, 10) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (C). Answer: D", "C"), ("Answer: D", "D"), ("so B it is, I say", "I"), ("A cat, then", "A"),
        ("nothing", "A"),
    ],
)  # fmt: skip
def test_the_official_chain_takes_stray_letters_and_guesses(text, letter):
    guess = "ABCDEFGHIJ"[random.Random(12345).randint(0, 9)]
    assert official_chain(text, 10) == (letter if text != "nothing" else guess)


def test_mmlu_pro_with_the_official_chain_gives_points_for_stray_letters(tmp_path):
    engine = Says(lambda task: f"It could be {task.ground_truth}, maybe")
    ours = run_bench("mmlu_pro", tmp_path / "ours", engine=engine)
    theirs = run_bench("mmlu_pro", tmp_path / "theirs", engine=engine, tables={"mmlu_pro": {"official_chain": True}})
    assert (ours["success"], ours["no_answer"]) == (0.0, 1.0)
    assert theirs["success"] == 1.0


@pytest.fixture
def shots_data(tmp_path):
    """Return a file with two worked examples of the category of the first sample row, and one of another."""
    row = json.loads(rows_file("mmlu_pro").read_text().splitlines()[0])
    worked = {**row, "options": ["x", "y"], "cot_content": "A: Let's think step by step. The answer is (A)."}
    shots = [
        {**worked, "question": "Worked one?"}, {**worked, "question": "Not this", "category": "another"},
        {**worked, "question": "Worked two?"},
    ]  # fmt: skip
    for name, rows in (("rows", [row]), ("shots", shots)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return {"data": str(tmp_path / "rows.jsonl"), "shots_data": str(tmp_path / "shots.jsonl")}


def test_mmlu_pro_with_shots_shows_worked_examples_of_the_category(shots_data):
    (task,) = bench("mmlu_pro", shots=2, **shots_data).tasks("test")
    text = task.messages[0]["content"]
    assert text.index("Worked one?") < text.index("Worked two?") < text.index(task.prompt)
    assert "Not this" not in text
    assert text.endswith("Answer: Let's think step by step.")


def test_mmlu_pros_shots_stand_in_a_prompt_of_the_users(shots_data, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("In their words:\n{question} Go.")
    (task,) = bench("mmlu_pro", shots=1, prompt=str(prompt), **shots_data).tasks("test")
    text = task.messages[0]["content"]
    worked = "Question:\nWorked one?\nOptions:\nA. x\nB. y\nAnswer: Let's think step by step. The answer is (A)."
    assert text.startswith(f"In their words:\n{worked}\n\nQuestion:\n{task.prompt}\nOptions:\nA. ")
    assert text.endswith("\nAnswer: Go.")


def test_fewer_worked_examples_than_asked_for_are_refused(shots_data):
    with pytest.raises(InputError, match=r"`.*shots\.jsonl` has 2 worked examples of the category `\w+`, and .* is 3"):
        bench("mmlu_pro", shots=3, **shots_data).tasks("test")


def test_the_question_shows_every_option_behind_its_letter():
    assert question_text("Q?", ["x", "y"]).endswith("Q?\n\nA) x\nB) y")


def test_gpqas_gold_goes_through_the_recorded_permutation():
    golds = set()
    for row, task in zip(bench("gpqa").rows, bench("gpqa").tasks("test"), strict=True):
        order = task.metadata["permutation"]
        place = "ABCD".index(task.ground_truth)
        assert sorted(order) == [0, 1, 2, 3]
        assert order[place] == 0
        shown = task.messages[0]["content"].split("\n")[-4:]
        assert shown[place] == f"{task.ground_truth}) {row['Correct Answer']}"
        golds.add(task.ground_truth)
    assert len(golds) > 1  # the right option is not always in one place


def test_a_prompt_of_the_users_takes_the_place_of_ours(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("In their words: {question}\nGo.")
    task = bench("gsm8k", prompt=str(path)).tasks("test")[0]
    assert task.messages[0]["content"] == f"In their words: {task.prompt}\nGo."
    path.write_text("nothing to ask")
    with pytest.raises(InputError, match=r"has no \{question\} in it"):
        _ = bench("gsm8k", prompt=str(path)).tasks("test")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("So \\boxed{42}. This took 3 days.", True), ("<answer>42</answer> after 3 tries", True),
        ("#### 42\nin 3 steps", True), ("#### 3\nor 42", False), ("So \\boxed{x}, not 42", False),
        ("3 tries, and it is 42", True), ("It is 42, after 3 tries", False), ("So it is 42.\n####", True),
        ("So \\boxed{4 of 42", True), ("no number", False),
    ],
)  # fmt: skip
def test_gsm8ks_last_number_counts_only_where_no_answer_is_stated(text, right):
    score = bench("gsm8k", last_number=True).verdict(text, {"ground_truth": "42"}, None)
    assert score.success is right


# What may not leave, and what may not be written


def test_gpqas_text_stays_on_this_machine(tmp_path):
    run_bench("gpqa", tmp_path / "out")
    with pytest.raises(InputError, match="stays on this machine"):
        refuse_to_leave(read_manifest(tmp_path / "out").facts.get(STAYS_LOCAL), tmp_path / "out")
    run_bench("gsm8k", tmp_path / "free", limit=1)
    refuse_to_leave(read_manifest(tmp_path / "free").facts.get(STAYS_LOCAL), tmp_path / "free")


@pytest.mark.parametrize("name", ["gpqa", "hle"])
def test_text_that_stays_is_not_written_to_another_machine(name):
    place = as_path(f"memory://evals/{name}")
    with pytest.raises(InputError, match="stays on this machine"):
        run_bench(name, place)
    assert not place.exists()


def test_what_may_leave_and_what_has_no_text_goes_to_a_url():
    for name in ("mmlu", "browsecomp"):
        assert run_bench(name, as_path(f"memory://evals/{name}"), limit=1)["samples"] == 1


@pytest.mark.parametrize("engine_name", ["scripted", "hf"])
def test_browsecomp_writes_down_no_text_and_no_token(engine_name, tmp_path):
    out = tmp_path / "out"
    policy = STARTER if engine_name == "hf" else None
    found = run_bench("browsecomp", out, engine_name=engine_name, policy=policy, max_generate_length=8)
    table = table_of(out)
    for name in (*WITHHELD, "prompt_ids", "response_ids", "loss_mask", "rollout_logprobs"):
        assert table.column(name).null_count == table.num_rows, name
    secrets = [text for task in bench("browsecomp").tasks("test") for text in (task.prompt, str(task.ground_truth))]
    assert len(secrets) == 6
    # Parts are compressed, so what they hold is read; everything else lies open.
    written = str(table.to_pylist()) + "".join(p.read_text() for p in out.glob("*.json"))
    assert not [text for text in secrets if text in written]
    assert (found["samples"], found["turns_mean"]) == (3, 1.0)
    check(table, "eval")


def test_text_is_withheld_only_where_nothing_is_trainable(tmp_path):
    run_bench("browsecomp", tmp_path / "out")
    table = table_of(tmp_path / "out")
    place = table.schema.get_field_index("trainable")
    import pyarrow as pa

    trainable = table.set_column(place, table.schema.field(place), pa.array([True] * table.num_rows))
    with pytest.raises(InputError, match="is trainable but has no"):
        check(trainable, "eval")


# The numbers do not depend on how they were come by


@pytest.mark.parametrize("name", ["gsm8k", "mmlu"])
def test_batches_of_1_and_32_give_the_same_tokens_grades_and_logprobs(name, tmp_path):
    tables = []
    for size in (1, 32):
        out = tmp_path / str(size)
        run_bench(
            name, out, engine_name="hf", policy=STARTER, limit=3, n_samples=4, max_generate_length=16,
            tables={"hf": {"batch_size": size}},
        )  # fmt: skip
        tables.append(table_of(out))
    for column in ("trajectory_id", "response_ids", "success", "reward", "turns"):
        assert tables[0].column(column).to_pylist() == tables[1].column(column).to_pylist(), column
    pairs = zip(*(table.column("rollout_logprobs").to_pylist() for table in tables), strict=True)
    assert max(abs(np.array(a) - np.array(b)).max() for a, b in pairs) < 1e-5


@pytest.mark.parametrize(("settings", "dtype"), [({}, "float64"), ({"dtype": "float32"}, "float32")])
def test_on_a_cpu_benchmarks_run_in_float64_unless_told_otherwise(settings, dtype, tmp_path):
    run_bench(
        "gsm8k", tmp_path / "out", engine_name="hf", policy=STARTER, limit=1, max_generate_length=4,
        tables={"hf": {"device": "cpu", **settings}},
    )  # fmt: skip
    assert read_manifest(tmp_path / "out").settings["hf"]["dtype"] == dtype
    given = {"hf": {"device": "cpu", **settings}}
    assert settings_of("text_math", "hf", given) == given  # what is no benchmark stays as it is trained


def test_an_evaluation_that_is_killed_keeps_what_was_done_by_default(tmp_path):
    class Dies(type(right("gsm8k"))):
        left = 40

        def reply(self, environment, task, turn):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return super().reply(environment, task, turn)

    with pytest.raises(KeyboardInterrupt):
        run_bench("gsm8k", tmp_path / "out", engine=Dies(ScriptedConfig()), limit=None)
    kept = table_of(tmp_path / "out")
    assert kept.num_rows == 2 * 16
    counts = Dies(ScriptedConfig())
    counts.left = 1000
    assert run_bench("gsm8k", tmp_path / "out", engine=counts, limit=None)["samples"] == 100
    assert counts.left == 1000 - (100 - 32)  # none was asked again


def test_a_killed_evaluation_goes_on_and_ends_with_the_same_bytes(tmp_path):
    kinds = {"rollout": {"rows_per_part": 4}, "limit": 12}
    run_bench("gsm8k", tmp_path / "whole", **kinds)

    class Dies(type(right("gsm8k"))):
        left = 6

        def reply(self, environment, task, turn):
            Dies.left -= 1
            if not Dies.left:
                raise KeyboardInterrupt
            return super().reply(environment, task, turn)

    with pytest.raises(KeyboardInterrupt):
        run_bench("gsm8k", tmp_path / "killed", engine=Dies(ScriptedConfig()), **kinds)
    assert [p.name for p in sorted((tmp_path / "killed").glob("part-*"))] == ["part-00000.parquet"]
    run_bench("gsm8k", tmp_path / "killed", **kinds)
    for path in (tmp_path / "whole").iterdir():
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "killed" / path.name).read_bytes(), path.name


def test_judged_benchmarks_without_a_judge_name_another_metric(tmp_path):
    for name in JUDGED:
        assert run_bench(name, tmp_path / name)["metric"] == "exact_match_no_judge"


# A benchmark of the user's


def test_a_benchmark_of_ones_own_is_a_class(tmp_path, monkeypatch):
    (tmp_path / "my_bench.py").write_text(
        "from nanoskyrl.envs.base import Task\n"
        "from nanoskyrl.eval.base import Benchmark, graded, user\n\n\n"
        "class Mine(Benchmark):\n"
        "    name = 'mine'\n"
        "    columns = ('q', 'a')\n\n"
        "    def pose(self, row, index):\n"
        "        task = dict(task_id=str(index), split='test', prompt=row['q'], ground_truth=row['a'])\n"
        "        return Task(**task, messages=user(row['q']))\n\n"
        "    def verdict(self, text, metadata, trajectory):\n"
        "        return graded(text == metadata['ground_truth'])\n\n"
        "    def gold(self, task):\n"
        "        return task.ground_truth\n"
    )
    (tmp_path / "rows.csv").write_text("q,a\nOne?,1\nTwo?,2\n")
    done = skyrl(
        "eval", "--bench", "my_bench:Mine", "--data", "my_bench:Mine=rows.csv", "--engine", "scripted", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["numbers"]["my_bench:Mine"]["success"] == 1.0


@pytest.mark.parametrize(
    ("name", "reply", "gold", "right"),
    [
        ("mmlu", "<think>Answer: A</think>\nAnswer: B", "B", True),
        ("mmlu", "Answer: A</think>\nAnswer: B", "A", False),
        ("gsm8k", "<think>#### 4</think>\n#### 5", "4", False), ("math", "<think>\\boxed{4}</think> No.", "4", False),
        ("gsm8k", "so it is **5**.\nAnswer: $5$", "5", True), ("math", "The final answer is $5$.", "5", True),
    ],
)  # fmt: skip
def test_benchmarks_read_no_reasoning_and_the_same_forms_as_rewards(name, reply, gold, right, make_trajectory):
    turns = [Turn(action=reply, observation="", done=True)]
    row = make_trajectory(turns=turns, metadata={"ground_truth": gold, "options": 4})
    assert bench(name).score(row).success is right


def test_a_confidence_and_a_patch_in_reasoning_are_none(make_trajectory):
    patch = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
    reply = f"<think>Confidence: 10%\n```diff\n{patch}```</think>\nAnswer: x\nConfidence: 90%"
    row = make_trajectory(turns=[Turn(action=reply, observation="", done=True)], metadata={"ground_truth": "x"})
    assert bench("hle").score(row).parts["confidence"] == 0.9
    assert bench("swe_bench_verified").patch_of(row) == ""
