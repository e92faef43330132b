"""`show`, `sql`, `diff` and `report` on a run of a million trajectories, beside plain DuckDB on the same files.

    python benchmarks/looking.py                  # a million: 5 GB of disk in the temporary folder
    python benchmarks/looking.py --rows 100000    # a look
    python benchmarks/looking.py --out DIR        # keeps the runs, and resumes where it was stopped

The rows are those of `shards.py`, with responses of 32 to 224 tokens, and one call in ten fails: a few parts are made
whole, and the rest are copies of them with ids, groups and rewards of their own, 16,384 rows each in 16 parts a step.
The second run is a copy of the first in which one reward in a thousand of every step is another, and one token of the
last step. Every command is a process of its own, timed from its start, with the most memory that it held; the files are
in the system's cache.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import shards

from nanoskyrl.stages.core.digests import digest_bytes
from nanoskyrl.stages.core.manifest import Head
from nanoskyrl.stages.core.metrics import MetricsLog
from nanoskyrl.stages.core.output import open_output
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.trajectory import schema_of

PART, PARTS_A_STEP, MADE = 16_384, 16, 2
FAILED = '"ok": false, "error": "bad_arguments"'
ONE = "one trajectory"
QUERIES = {
    "mean reward by step": "select step, avg(reward), count(*) from trajectories group by step order by step",
    "failed calls by tool": "select tool, error, count(*) from tool_calls where not ok group by all",
    ONE: "select * from trajectories where trajectory_id = '{id}'",
    "sum of all log-probs": "select sum(list_sum(rollout_logprobs)) from trajectories",
}
PLAIN = {
    "mean reward by step": "select filename, avg(reward) from read_parquet('{files}', filename = true) group by 1",
    "failed calls by tool": (
        "select c.tool, c.error, count(*) from (select unnest(from_json(t.tool_calls, "
        '\'[{{"tool":"VARCHAR","ok":"BOOLEAN","error":"VARCHAR"}}]\')) as c from '
        "(select unnest(turns) as t from read_parquet('{files}')) where t.tool_calls <> '[]') where not c.ok "
        "group by all"
    ),
    ONE: "select * from read_parquet('{files}') where trajectory_id = '{id}'",
    "sum of all log-probs": "select sum(list_sum(rollout_logprobs)) from read_parquet('{files}')",
}
SHOWN: dict[str, tuple[tuple[str, ...], str]] = {
    "a run": ((), "select filename, avg(reward) from read_parquet('{files}', filename = true) group by 1"),
    ONE: ((), PLAIN[ONE]),
    "--where --sort": (
        ("--where", "reward < 0.01 and tool_calls > 0", "--sort", "-tokens"),
        "select * from read_parquet('{files}') where reward < 0.01 and list_bool_or(list_transform(turns, "
        "lambda t: t.tool_calls <> '[]')) order by completion_tokens desc limit 10",
    ),
    "--by task": (
        ("--by", "task"),
        "select task_id, count(*), avg(success::int), avg(reward), min(reward), max(reward), avg(len(turns)), "
        "avg(completion_tokens) from read_parquet('{files}') group by 1 order by 3 limit 10",
    ),
    "--by group": (
        ("--by", "group"),
        "select group_id, count(*), avg(success::int), avg(reward), min(reward), max(reward), avg(len(turns)), "
        "avg(completion_tokens) from read_parquet('{files}') group by 1 order by 3 limit 10",
    ),
    "--failed-calls": (("--failed-calls",), PLAIN["failed calls by tool"]),
}
"""Arguments of `skyrl show RUN`, and about the same of DuckDB."""
STEP_BY_ENV = (
    "select env, count(*), avg(success::int), avg(reward), avg(len(turns)), avg(completion_tokens) "
    "from read_parquet('{files}') group by 1"
)


def whole_parts(rng: np.random.Generator) -> list[pa.Table]:
    """Return a few parts with the columns of `score`."""
    shards.RESPONSE_TOKENS = (32, 224)
    schema, found = schema_of("score"), []
    for _ in range(MADE):
        tokens = shards.token_rows(PART, rng)
        others = shards.other_columns(tokens, "short", rng)
        others |= {
            "reward": [0.0] * PART, "success": (rng.random(PART) < 0.7).tolist(),
            "reward_parts": ["{}"] * PART, "score_status": ["scored"] * PART,
        }  # fmt: skip
        for turns in others["turns"][1::20]:
            turns[0]["tool_calls"] = turns[0]["tool_calls"].replace('"ok": true, "error": null', FAILED)
        columns = shards.token_columns(tokens)
        columns |= {name: pa.array(of, schema.field(name).type) for name, of in others.items()}
        found.append(pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema))
    return found


def with_column(table: pa.Table, name: str, values: Sequence[Any]) -> pa.Table:
    field = table.schema.field(name)
    return table.set_column(table.column_names.index(name), field, pa.array(values, field.type))


def write_runs(ours: Run, theirs: Run, rows: int, rng: np.random.Generator) -> str:
    """Write both runs; return the id of a trajectory in the middle."""
    made = whole_parts(rng)
    parts = max(1, rows // PART)
    for step in range(-(-parts // PARTS_A_STEP)):
        here = range(step * PARTS_A_STEP, min(parts, (step + 1) * PARTS_A_STEP))
        for run in (ours, theirs):
            head = Head(stage="score", settings={"score": {"rewards": {"env": 1.0}}, "step": step})
            with open_output(run.stage(step, "score"), head) as out:
                if out.manifest is not None:
                    continue
                numbers = {"reward/success": 0.7, "reward/mean": 0.5, "timing/total": 60.0}
                MetricsLog(run.metrics, step).write("score", numbers)
                for index, number in enumerate(here):
                    if out.has_part(index):
                        continue
                    table = made[number % MADE]
                    ids = [digest_bytes(f"{number} {row}".encode())[:32] for row in range(PART)]
                    rewards = np.random.default_rng(number).random(PART).round(3)
                    if run is theirs:
                        rewards[::1000] += 1
                    groups = [digest_bytes(f"{number} group {row // 16}".encode())[:32] for row in range(PART)]
                    for column, values in (("trajectory_id", ids), ("group_id", groups), ("reward", rewards)):
                        table = with_column(table, column, values)
                    if run is theirs and number == parts - 1:
                        responses = table.column("response_ids").to_pylist()
                        responses[77][5] += 1
                        table = with_column(table, "response_ids", responses)
                    out.write_part(index, table)
                out.finish(rows_in=len(here) * PART)
    return digest_bytes(f"{parts // 2} 5".encode())[:32]


Measured = tuple[float, float, str]
"""Seconds, the most memory in MB, and what a process printed."""


def measured(*command: str) -> Measured:
    """Run a process."""
    program = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], capture_output=True, text=True)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)\n"
        "print(done.stdout + done.stderr, end='')"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=True)
    if "error: " in done.stdout:
        raise SystemExit(done.stdout)
    return time.perf_counter() - start, int(done.stderr.split()[-1]) / 1024, done.stdout


def plainly(query: str) -> Measured:
    """Ask DuckDB as it comes."""
    return measured(sys.executable, "-c", f"import duckdb; print(duckdb.sql({query!r}).fetchall())")


def line(what: str, mine: Measured, plain: Measured | None = None) -> None:
    """Print a line of the table."""
    beside = "| | |" if plain is None else f"| {plain[0]:.1f} | {plain[1]:.0f} | {mine[0] / plain[0]:.1f} |"
    print(f"| {what} | {mine[0]:.1f} | {mine[1]:.0f} {beside}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="about (%(default)s)")
    parser.add_argument("--out", type=Path, help="a folder that keeps the runs: what it has is not made again")
    options = parser.parse_args()
    skyrl = [sys.executable, "-c", "from nanoskyrl_cli.main import main; main()"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        ours, theirs = Run(folder / "ours"), Run(folder / "theirs")
        name = write_runs(ours, theirs, options.rows, np.random.default_rng(0))
        files = f"{ours.root}/step-*/score/*.parquet"
        size = sum(path.stat().st_size for path in ours.root.rglob("*.parquet")) / 1e6
        rows = measured(*skyrl, "sql", str(ours.root), "select count(*) from trajectories", "--json")[2]
        print(f"{next(iter(json.loads(rows)[0].values())):,} rows, {size:,.0f} MB a run, {os.cpu_count()} cores\n")
        print("| | seconds | memory, MB | plain DuckDB, seconds | memory, MB | ratio of seconds |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        for what, query in QUERIES.items():
            mine = measured(*skyrl, "sql", str(ours.root), query.format(id=name), "--json")
            line(f"sql: {what}", mine, plainly(PLAIN[what].format(files=files, id=name)))
        for question in ("signal", "never-solved", "failed-calls", "length", "environments"):
            line(f"sql: question {question}", measured(*skyrl, "sql", str(ours.root), "--question", question))
        for what, (arguments, plain) in SHOWN.items():
            place = [name, "--run", str(ours.root)] if what == ONE else [str(ours.root)]
            mine = measured(*skyrl, "show", *place, *arguments)
            line(f"show {what}", mine, plainly(plain.format(files=files, id=name)))
        step = ours.root / "step-000000"
        mine = measured(*skyrl, "show", str(step))
        line("show a step", mine, plainly(STEP_BY_ENV.format(files=f"{step}/score/*.parquet")))
        line("report", measured(*skyrl, "report", str(ours.root)), plainly(STEP_BY_ENV.format(files=files)))
        pairs = "a join read_parquet('{}') b using (trajectory_id, step_index)".format(files.replace("ours", "theirs"))
        plain = (
            f"select count(*) filter (a.reward is distinct from b.reward), "
            f"count(*) filter (a.response_ids is distinct from b.response_ids) from read_parquet('{files}') {pairs}"
        )
        other = plainly(plain)
        for what, pair in (("itself", (ours, ours)), ("the other", (ours, theirs))):
            mine = measured(*skyrl, "diff", *(str(run.root) for run in pair))
            line(f"diff with {what}", mine, other if pair[1] is theirs else None)
            last = mine[2].splitlines()
        print("\n" + "\n".join(last[-4:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
