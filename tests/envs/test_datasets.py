import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import data_file

from nanoskyrl.envs.datasets import read_rows, read_tasks
from nanoskyrl.envs.graders.answers import same_answer
from nanoskyrl.envs.worlds.text_math.environment import TextMath, TextMathConfig
from nanoskyrl.stages.core.errors import InputError

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One plus one?"}]


@pytest.fixture(params=["jsonl", "parquet"])
def tasks_of(request, tmp_path):
    """Write rows in either format and read the tasks."""

    def read(*rows, split="train"):
        file = tmp_path / f"tasks.{request.param}"
        if request.param == "jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        else:
            pq.write_table(pa.Table.from_pylist(list(rows)), file)
        return read_tasks(str(file), split)

    return read


def read_bytes(tmp_path, content, name="tasks.jsonl"):
    file = tmp_path / name
    file.write_bytes(content)
    return read_tasks(str(file), "train")


# Layouts


def test_prompt_and_ground_truth_make_a_task(tasks_of):
    (task,) = tasks_of({"id": "a", "prompt": "One plus one?", "ground_truth": "2"}, split="test")
    assert (task.task_id, task.split, task.prompt, task.ground_truth) == ("a", "test", "One plus one?", "2")
    assert task.messages == ()


@pytest.mark.parametrize("prompt", ["prompt", "question", "problem"])
@pytest.mark.parametrize("truth", ["ground_truth", "final", "answer", "solution"])
def test_columns_may_have_any_usual_name(tasks_of, prompt, truth):
    (task,) = tasks_of({prompt: "One plus one?", truth: "2"})
    assert (task.prompt, task.ground_truth) == ("One plus one?", "2")


def test_rows_keep_their_order(tasks_of):
    tasks = tasks_of(*({"task_id": f"{i}", "prompt": f"{i} + 0?", "answer": f"{i}"} for i in range(20)))
    assert [task.task_id for task in tasks] == [str(i) for i in range(20)]
    assert [task.ground_truth for task in tasks] == [str(i) for i in range(20)]


def test_numbers_serve_as_ids_and_ground_truths(tasks_of):
    first, second = tasks_of({"id": 7, "prompt": "a", "answer": 0}, {"id": 8, "prompt": "b", "answer": 3})
    assert (first.task_id, first.ground_truth) == ("7", "0")
    assert (second.task_id, second.ground_truth) == ("8", "3")


def test_rows_without_ids_get_ids_that_last(tasks_of):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}]
    first, second = tasks_of(*rows)
    assert first.task_id != second.task_id
    assert [task.task_id for task in tasks_of(*reversed(rows))] == [second.task_id, first.task_id]


def test_gsm8k_s_answer_is_what_stands_after_the_last_mark(tasks_of):
    (task,) = tasks_of({"question": "q", "answer": "5 #### is not it\nso 500 * 2 = <<500*2=1000>>1000\n#### 1,000"})
    assert task.ground_truth == "1,000"


def test_messages_may_be_the_prompt(tasks_of):
    (task,) = tasks_of({"prompt": QUESTION, "answer": "2"})
    assert list(task.messages) == QUESTION
    assert task.prompt == "One plus one?"


def test_skyrl_s_layout_is_read(tasks_of):
    (task,) = tasks_of(
        {
            "data_source": "openai/gsm8k", "prompt": QUESTION, "env_class": "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": "2"}, "extra_info": {"split": "train", "index": 0},
        }
    )  # fmt: skip
    assert (list(task.messages), task.ground_truth) == (QUESTION, "2")


def test_verl_s_layout_is_read(tasks_of):
    (task,) = tasks_of(
        {
            "data_source": "openai/gsm8k", "prompt": QUESTION, "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"split": "train", "index": 0, "answer": "#### 3", "question": "another"},
        }
    )  # fmt: skip
    assert (list(task.messages), task.ground_truth) == (QUESTION, "2")


def test_a_data_set_of_the_hub_is_read_by_its_split(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "sums"
    folder.mkdir()
    for split, answer in (("train", "2"), ("test", "4")):
        (folder / f"{split}.jsonl").write_text(json.dumps({"question": f"{split}?", "answer": f"so\n#### {answer}"}))
    tasks = {split: read_tasks(f"hub:{folder}", split) for split in ("train", "test")}
    assert [(task.prompt, task.ground_truth) for split in tasks.values() for task in split] == [
        ("train?", "2"),
        ("test?", "4"),
    ]
    with pytest.raises(InputError, match="cannot be had from the hub"):
        read_tasks(f"hub:{tmp_path / 'nowhere'}", "train")


def test_a_row_keeps_where_it_comes_from_and_how_it_is_graded(tasks_of):
    rows = [
        {"prompt": QUESTION, "data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "72"}},
        {"prompt": QUESTION, "env_class": "gsm8k", "reward_spec": {"method": "rule", "ground_truth": "73"}},
    ]
    assert [task.metadata for row in rows for task in tasks_of(row)] == [
        {"grader": "stated_answer", "kind": "openai/gsm8k"},
        {"grader": "stated_answer", "kind": "gsm8k"},
    ]
    assert tasks_of({"prompt": "x", "ground_truth": "1"})[0].metadata == {"grader": "final_answer"}


def test_ground_truth_in_json_text_or_in_a_box_is_found(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "a", "reward_model": json.dumps({"ground_truth": "7"})},
        {"problem": "b", "solution": r"so it is \boxed{\frac{1}{2}}."},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [task.ground_truth for task in read_tasks(str(path), "train")] == ["7", r"\frac{1}{2}"]


def test_gsm8k_s_rows_are_read_with_the_right_answers(tmp_path):
    path = data_file("gsm8k/test_shared.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    tasks = read_tasks(str(path), "test")
    assert [task.task_id for task in tasks] == [row["id"] for row in rows]
    assert [task.prompt for task in tasks] == [row["question"] for row in rows]
    assert [task.ground_truth for task in tasks] == [row["final"] for row in rows]
    assert all(
        same_answer(row["final"].replace(",", ""), task.ground_truth) for row, task in zip(rows, tasks, strict=True)
    )
    # As the hub has it, with the answer inside the solution only, as JSON lines and as Parquet.
    plain = [{"question": row["question"], "answer": row["answer"]} for row in rows]
    (tmp_path / "hub.jsonl").write_text("\n".join(map(json.dumps, plain)))
    pq.write_table(pa.Table.from_pylist(plain), tmp_path / "hub.parquet")
    for name in ("hub.jsonl", "hub.parquet"):
        again = read_tasks(str(tmp_path / name), "test")
        assert [task.ground_truth for task in again] == [row["final"] for row in rows]


# Lines


def test_a_file_is_read_again_only_once_it_has_changed(tmp_path, monkeypatch):
    path, read = tmp_path / "tasks.jsonl", []
    real = read_rows
    monkeypatch.setattr("nanoskyrl.envs.datasets.read_rows", lambda *a, **k: read.append(a) or real(*a, **k))
    for answers in (["1"], ["1"], ["2"], ["2", "3"], ["2", "3"]):  # with a size that stays, and one that does not
        lines = [json.dumps({"question": f"q{i}", "answer": answer}) for i, answer in enumerate(answers)]
        if not path.exists() or path.read_text() != "\n".join(lines):
            path.write_text("\n".join(lines))
        tasks = read_tasks(str(path), "train")
        assert [task.ground_truth for task in tasks] == answers
        tasks.clear()  # what one caller does with its list, another does not see
    assert len(read) == 3
    assert read_tasks(str(path), "test")[0].split == "test"
    assert read_tasks(str(path), "train", {"prompt": "answer"})[0].prompt == "2"


def test_a_file_that_changes_while_it_is_read_is_refused_and_read_anew(tmp_path, monkeypatch):
    path, real = tmp_path / "tasks.jsonl", read_rows
    lines = [json.dumps({"question": "q", "answer": answer}) for answer in ("1", "2")]
    path.write_text(lines[0])

    def overtaken(*args, **settings):
        path.write_text(lines[1])
        return real(*args, **settings)

    monkeypatch.setattr("nanoskyrl.envs.datasets.read_rows", overtaken)
    with pytest.raises(InputError, match="changed while it was read"):
        read_tasks(str(path), "train")
    monkeypatch.undo()
    path.write_text(lines[0])
    assert read_tasks(str(path), "train")[0].ground_truth == "1"


def test_windows_line_ends_and_blank_lines_mean_nothing(tmp_path):
    tasks = read_bytes(tmp_path, b'{"prompt": "a", "answer": "1"}\r\n\r\n{"prompt": "b", "answer": "2"}\r\n')
    assert [(task.prompt, task.ground_truth) for task in tasks] == [("a", "1"), ("b", "2")]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c"])
def test_a_line_separator_inside_a_string_ends_no_line(tmp_path, separator):
    text = json.dumps({"prompt": f"a{separator}b", "answer": "1"}, ensure_ascii=False)
    (task,) = read_bytes(tmp_path, text.encode())
    assert task.prompt == f"a{separator}b"


def test_the_last_line_needs_no_line_end(tmp_path):
    assert len(read_bytes(tmp_path, b'{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}')) == 2


# What cannot be read


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n \n"])
def test_an_empty_file_is_refused(tmp_path, content):
    with pytest.raises(InputError, match="is empty"):
        read_bytes(tmp_path, content)


def test_an_empty_parquet_file_is_refused(tmp_path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "tasks.parquet")
    with pytest.raises(InputError, match="is empty"):
        read_tasks(str(tmp_path / "tasks.parquet"), "train")


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.jsonl"):
        read_tasks(str(tmp_path / "nowhere.jsonl"), "train")


@pytest.mark.parametrize(
    "line", ["not json", '{"prompt": "a"', "{'prompt': 'a'}", '{"prompt": "a"} {}', "[1, 2]", "null", '"text"', "{"]
)
def test_a_line_that_is_no_json_object_is_named(tmp_path, line):
    content = f'{{"prompt": "a", "answer": "1"}}\n\n{line}\n'
    with pytest.raises(InputError, match=r"line 3 of `.*tasks\.jsonl` is not"):
        read_bytes(tmp_path, content.encode())


@pytest.mark.parametrize("row", [{"answer": "1"}, {"prompt": "", "answer": "1"}, {"prompt": None, "answer": "1"}])
def test_a_row_without_a_prompt_is_named(tmp_path, row):
    lines = [{"prompt": "a", "answer": "1"}, row]
    with pytest.raises(InputError, match=r"line 2 of .* has no prompt"):
        read_bytes(tmp_path, "\n".join(map(json.dumps, lines)).encode())


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "b"},
        {"prompt": "b", "answer": None},
        {"prompt": "b", "reward_spec": {"method": "rule"}},
        {"prompt": "b", "reward_model": None},
        {"prompt": "b", "reward_spec": "2"},
    ],
)
def test_a_row_without_a_ground_truth_is_named(tmp_path, row):
    lines = [{"prompt": "a", "answer": "1"}, row]
    with pytest.raises(InputError, match=r"line 2 of .* has no ground truth") as caught:
        read_bytes(tmp_path, "\n".join(map(json.dumps, lines)).encode())
    assert "reward_spec" in caught.value.hint


def test_a_parquet_row_without_a_ground_truth_is_named(tmp_path):
    table = pa.table({"prompt": ["a", "b"], "answer": ["1", None]})
    pq.write_table(table, tmp_path / "tasks.parquet")
    with pytest.raises(InputError, match=r"row 1 of .* has no ground truth"):
        read_tasks(str(tmp_path / "tasks.parquet"), "train")


@pytest.mark.parametrize("prompt", [5, True, {"role": "user", "content": "x"}, ["x"], [{"role": "user"}]], ids=str)
def test_a_prompt_that_is_neither_text_nor_messages_is_refused(tmp_path, prompt):
    with pytest.raises(InputError, match=r"line 1 of .* neither text nor messages"):
        read_bytes(tmp_path, json.dumps({"prompt": prompt, "answer": "1"}).encode())


def test_rows_with_one_id_are_both_named(tmp_path):
    lines = [{"id": "x", "prompt": "a", "answer": "1"}, {"id": "y", "prompt": "b", "answer": "1"}]
    lines.append({"id": "x", "prompt": "c", "answer": "1"})
    with pytest.raises(InputError, match=r"line 3 of .* has the id `x` of line 1"):
        read_bytes(tmp_path, "\n".join(map(json.dumps, lines)).encode())


def test_text_that_is_not_utf_8_is_refused(tmp_path):
    with pytest.raises(InputError, match="is not UTF-8"):
        read_bytes(tmp_path, b'{"prompt": "caf\xe9", "answer": "1"}')


def test_a_broken_parquet_file_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"tasks\.parquet` cannot be read as Parquet"):
        read_bytes(tmp_path, b"PAR1 and then nothing", "tasks.parquet")


def test_a_null_id_gives_way_to_task_id(tasks_of):
    (task,) = tasks_of({"id": None, "task_id": "t", "prompt": "a", "answer": "1"})
    assert task.task_id == "t"


def test_a_lone_surrogate_in_a_prompt_is_read(tmp_path):
    (task,) = read_bytes(tmp_path, b'{"prompt": "a\\ud800", "answer": "1"}')
    assert task.prompt.startswith("a")


def test_a_line_nested_too_deeply_is_named(tmp_path):
    with pytest.raises(InputError, match="line 1 of"):
        read_bytes(tmp_path, b'{"prompt": "a", "answer": ' + b"[" * 100_000 + b"}")


@pytest.mark.parametrize("empty", [{}, {"ground_truth": None}, {"method": "rule"}])
def test_a_reward_spec_without_ground_truth_leaves_it_to_the_reward_model(tmp_path, empty):
    row = {"prompt": "1 + 1?", "reward_spec": empty, "reward_model": {"ground_truth": "2"}}
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(row))
    assert read_tasks(str(path), "train")[0].ground_truth == "2"


@pytest.mark.parametrize(
    ("row", "golds"),
    [
        ({"reward_model": {"ground_truth": {"target": ["Jane Austen", "Austen"]}}}, ["Jane Austen", "Austen"]),
        ({"answer": ["Jane Doe", "J. Doe"]}, ["Jane Doe", "J. Doe"]),
        ({"ground_truth": ["12", "twelve"]}, ["12", "twelve"]),
        ({"answer": {"value": "NYC", "aliases": ["New York", "NYC"]}}, ["NYC", "New York"]),
        ({"answer": ["so\n#### 5"]}, "5"), ({"answer": {"text": ["Bob"], "answer_start": [3]}}, "Bob"),
    ],
)  # fmt: skip
def test_a_ground_truth_of_several_texts_is_kept_as_several(tmp_path, row, golds):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "?", **row}))
    (task,) = read_tasks(str(path), "train")
    assert task.ground_truth == golds
    environment = TextMath(TextMathConfig(data=str(path)))
    assert environment.expert(task) == [f"<answer>{golds if isinstance(golds, str) else golds[0]}</answer>"]


@pytest.mark.parametrize("value", [[], {}, {"label": 3}, [None], {"target": []}, [[]]])
def test_a_ground_truth_that_holds_no_text_is_refused_by_its_place(tmp_path, value):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "?", "answer": value}))
    with pytest.raises(InputError, match=r"the ground truth of line 1 of"):
        read_tasks(str(path), "train")


# Messages

PARTS = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?", "image_url": None}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "that"}'}}
HISTORY = [
    {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Look."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": [{"type": "text", "text": "seen"}], "tool_call_id": "c1", "name": "look"},
    {"role": "user", "content": PARTS, "name": None, "tool_calls": None},
]  # fmt: skip
KEPT = [
    *HISTORY[:2],
    {
        "role": "assistant", "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "that"}}}],
    },
    {"role": "tool", "content": "seen", "tool_call_id": "c1", "name": "look"},
    {"role": "user", "content": "What is 2+2?"},
]  # fmt: skip


def test_text_parts_are_joined_and_a_history_of_calls_is_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": HISTORY, "answer": "4"}))
    (task,) = read_tasks(str(path), "train")
    assert list(task.messages) == KEPT
    assert task.prompt == "What is 2+2?"


def test_a_history_in_parquet_is_kept_without_the_nulls_of_its_columns(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    arguments = [{"at": "that", "of": None}, {"at": None, "of": "this"}]
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": each}} for each in arguments]
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": calls},
        {"role": "user", "content": "?"},
    ]
    pq.write_table(pa.Table.from_pylist([{"prompt": messages, "answer": "4"}]), tmp_path / "rows.parquet")
    (task,) = read_tasks(str(tmp_path / "rows.parquet"), "train")
    user, said, last = task.messages
    assert (user, last) == ({"role": "user", "content": "Look."}, {"role": "user", "content": "?"})
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == [{"at": "that"}, {"of": "this"}]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "user", "content": None}, "message 0 of role user has no content"),
        ({"role": "assistant", "content": None}, "no content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "no content"),
        ({"role": "user"}, "neither text nor messages"),
        ({"role": "user", "content": [{"type": "image", "image": "x.png"}]}, "a part of type image"),
        ({"role": "user", "content": [PARTS[0], {"type": "image_url", "image_url": {"url": "x"}}]}, "type image_url"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "type input_audio"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "a part of type text"),
        ({"role": "user", "content": [5]}, "a part of type int"),
        ({"role": "user", "content": {"type": "text", "text": "2+2?"}}, "neither text nor a list of parts"),
        ({"role": "user", "content": 4}, "neither text nor a list of parts"),
        ({"role": None, "content": "x"}, "no message with role"),
        ({"role": "tool", "content": "x", "name": 5}, "`name` of message 0"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]}, "names no function"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "no func",
        ),
        ({"role": "assistant", "content": "", "tool_calls": "f()"}, "which is no list"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_its_row(tmp_path, message, why):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": [each], "answer": "4"}) for each in (HISTORY[0], message)))
    with pytest.raises(InputError, match=f"line 2 of .*{why}"):
        read_tasks(str(path), "train")
