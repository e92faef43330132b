"""Files and folders of rows, in every form that people have them in."""

import bz2
import gzip
import json
import lzma

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanoskyrl.envs.datasets import read_rows, read_tasks
from nanoskyrl.eval.benchmarks.mmlu_pro import MmluPro, MmluProConfig
from nanoskyrl.stages.core.digests import digest_path
from nanoskyrl.stages.core.errors import InputError, SettingsError

ROWS = [{"question": 'One, plus "one"?', "answer": "2"}, {"question": "a\u2028b", "answer": "007"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
TABLE = pa.Table.from_pylist(ROWS)


def csv_text(separator):
    return "".join(
        separator.join(f'"{value}"' for value in line) + "\r\n"
        for line in (("question", "answer"), ('One, plus ""one""?', "2"), ("a\u2028b", "007"))
    ).encode()


def parquet():
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink)
    return sink.getvalue().to_pybytes()


def arrow(new):
    sink = pa.BufferOutputStream()
    with new(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return sink.getvalue().to_pybytes()


FILES = {
    "a.jsonl": lambda: LINES, "a.JSONL": lambda: LINES, "a.ndjson": lambda: LINES, "a.json": lambda: LINES,
    "a": lambda: LINES,
    "array.json": lambda: json.dumps(ROWS).encode(), "bom.jsonl": lambda: b"\xef\xbb\xbf" + LINES,
    "a.jsonl.gz": lambda: gzip.compress(LINES), "a.jsonl.bz2": lambda: bz2.compress(LINES),
    "a.jsonl.xz": lambda: lzma.compress(LINES), "array.json.gz": lambda: gzip.compress(json.dumps(ROWS).encode()),
    "a.csv": lambda: csv_text(","), "a.CSV": lambda: csv_text(","), "a.tsv": lambda: csv_text("\t"),
    "a.csv.gz": lambda: gzip.compress(csv_text(",")), "a.parquet": parquet, "a.PARQUET": parquet, "a.pq": parquet,
    "named_wrongly.jsonl": parquet, "a.arrow": lambda: arrow(pa.ipc.new_stream),
    "a.feather": lambda: arrow(pa.ipc.new_file),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_as_what_it_is(name, tmp_path):
    (tmp_path / name).write_bytes(FILES[name]())
    assert [row for _, row in read_rows(str(tmp_path / name))] == ROWS
    tasks = read_tasks(str(tmp_path / name), "train")
    assert [(task.prompt, task.ground_truth) for task in tasks] == [tuple(row.values()) for row in ROWS]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_folder_of_save_to_disk_is_read(tmp_path, split):
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=one, test=one.select([0])).save_to_disk(str(tmp_path / "two"))
    assert [row for _, row in read_rows(str(tmp_path / "one"), split=split)] == ROWS
    assert len(read_tasks(str(tmp_path / "two"), split)) == (2 if split == "train" else 1)


@pytest.mark.usefixtures("cache")
def test_a_folder_of_files_is_read_by_its_splits(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(LINES)
    assert len(read_tasks(str(folder), "test")) == 2  # the only split there is
    before = digest_path(folder)
    (folder / "test.jsonl").write_bytes(LINES.split(b"\n")[0])
    assert len(read_tasks(str(folder), "test")) == 1
    assert len(read_tasks(str(folder), "train")) == 2
    assert digest_path(folder) != before


@pytest.mark.usefixtures("cache")
def test_a_folder_without_the_split_or_without_data_says_so(tmp_path):
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(easy=one, hard=one).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(InputError, match="has no split `train`, but easy, hard"):
        read_rows(str(tmp_path / "two"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="is a folder that holds no data set"):
        read_rows(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("content", "name", "says"),
    [
        (b"PK\x03\x04....", "a.xlsx", "is a zip archive, or a workbook"), (b"%PDF-1.7", "a.pdf", "is a PDF"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a.parquet", "is a pointer of git-lfs"),
        (b"<!DOCTYPE html><html>", "a.jsonl", "is a page of HTML"),
        ("{}".encode("utf-16"), "a.jsonl", "is text in UTF-16"),
        (b"caf\xe9", "a.jsonl", "is not UTF-8 text"), (b"\x1f\x8b broken", "a.jsonl.gz", "cannot be decompressed"),
        (b"{}", "a.parquet", "cannot be read as Parquet"), (b"ARROW1 broken", "a.arrow", "cannot be read as Arrow"),
        (b"[1]", "a.json", "item 0 of .* is not a JSON object"),
        (b'a,b\n1\n', "a.csv", "row 0 of .* has not as many fields"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_named_for_what_it_is(content, name, says, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=says):
        read_rows(str(tmp_path / name))


def test_columns_are_named_by_a_setting(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"frage": "1 + 1?", "loesung": "2", "answer": "no", "nr": 7}))
    (task,) = read_tasks(str(path), "train", {"prompt": "frage", "answer": "loesung", "id": "nr"})
    assert (task.prompt, task.ground_truth, task.task_id) == ("1 + 1?", "2", "7")
    with pytest.raises(InputError, match=r"line 1 of .* has no column `fragen`"):
        read_tasks(str(path), "train", {"prompt": "fragen"})
    with pytest.raises(SettingsError, match="`columns` names `promt`"):
        read_tasks(str(path), "train", {"promt": "frage"})


def test_a_question_of_mmlu_pro_may_have_one_option(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"question_id": 2129, "question": "?", "options": ["only"], "answer_index": 0, "category": "law"}
    path.write_text(json.dumps(row))
    (task,) = MmluPro(MmluProConfig(data=str(path))).tasks("test")
    assert (task.ground_truth, task.metadata["options"]) == ("A", 1)
