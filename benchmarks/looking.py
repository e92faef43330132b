"""`skyrl diff` and `skyrl sql` on a run of a million trajectories, beside plain DuckDB on the same files.

    python benchmarks/looking.py                  # a million: 5 GB of disk in the temporary folder
    python benchmarks/looking.py --rows 100000    # a look

The rows are those of `shards.py`, with responses of 32 to 224 tokens: a few parts are made whole, and the rest are
copies of them with ids and rewards of their own, 16,384 rows each in 16 parts a step. The second run is a copy of the
first in which one reward in a thousand of every step is another, and one token of the last step. Every command is a
process of its own, timed from its start, with the most memory that it held; the files are in the system's cache.
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
from nanoskyrl.stages.core.output import open_output
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.trajectory import schema_of

PART, PARTS_A_STEP, MADE = 16_384, 16, 2
QUERIES = {
    "mean reward by step": "select step, avg(reward), count(*) from trajectories group by step order by step",
    "failed calls by tool": "select tool, error, count(*) from tool_calls where not ok group by all",
    "one trajectory": "select * from trajectories where trajectory_id = '{id}'",
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
    "one trajectory": "select * from read_parquet('{files}') where trajectory_id = '{id}'",
    "sum of all log-probs": "select sum(list_sum(rollout_logprobs)) from read_parquet('{files}')",
}


def whole_parts(rng: np.random.Generator) -> list[pa.Table]:
    """Return a few parts with the columns of `score`."""
    shards.RESPONSE_TOKENS = (32, 224)
    schema, found = schema_of("score"), []
    for _ in range(MADE):
        tokens = shards.token_rows(PART, rng)
        others = shards.other_columns(tokens, "short", rng)
        others |= {
            "reward": rng.integers(0, 2, PART).astype(float).tolist(), "success": [True] * PART,
            "reward_parts": ["{}"] * PART, "score_status": ["scored"] * PART,
        }  # fmt: skip
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
                for index, number in enumerate(here):
                    table = made[number % MADE]
                    ids = [digest_bytes(f"{number} {row}".encode())[:32] for row in range(PART)]
                    rewards = np.random.default_rng(number).random(PART).round(3)
                    if run is theirs:
                        rewards[::1000] += 1
                    table = with_column(with_column(table, "trajectory_id", ids), "reward", rewards)
                    if run is theirs and number == parts - 1:
                        responses = table.column("response_ids").to_pylist()
                        responses[77][5] += 1
                        table = with_column(table, "response_ids", responses)
                    out.write_part(index, table)
                out.finish(rows_in=len(here) * PART)
    return digest_bytes(f"{parts // 2} 5".encode())[:32]


def measured(*command: str) -> tuple[float, float, str]:
    """Return seconds, the most memory in MB, and what a process printed."""
    program = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], capture_output=True, text=True)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)\n"
        "print(done.stdout + done.stderr, end='')"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=True)
    return time.perf_counter() - start, int(done.stderr.split()[-1]) / 1024, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="about (%(default)s)")
    options = parser.parse_args()
    skyrl = [sys.executable, "-c", "from nanoskyrl_cli.main import main; main()"]
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Run(Path(folder) / "ours"), Run(Path(folder) / "theirs")
        name = write_runs(ours, theirs, options.rows, np.random.default_rng(0))
        files = f"{ours.root}/step-*/score/*.parquet"
        size = sum(path.stat().st_size for path in ours.root.rglob("*.parquet")) / 1e6
        rows = measured(*skyrl, "sql", str(ours.root), "select count(*) from trajectories", "--json")[2]
        print(f"{next(iter(json.loads(rows)[0].values())):,} rows, {size:,.0f} MB a run, {os.cpu_count()} cores\n")
        print("| | seconds | memory, MB | plain DuckDB, seconds | memory, MB |\n| --- | --- | --- | --- | --- |")
        for what, query in QUERIES.items():
            mine = measured(*skyrl, "sql", str(ours.root), query.format(id=name), "--json")
            plain = PLAIN[what].format(files=files, id=name)
            other = measured(sys.executable, "-c", f"import duckdb; duckdb.sql({plain!r}).fetchall()")
            print(f"| sql: {what} | {mine[0]:.1f} | {mine[1]:.0f} | {other[0]:.1f} | {other[1]:.0f} |", flush=True)
        for question in ("signal", "never-solved", "failed-calls", "length", "environments"):
            mine = measured(*skyrl, "sql", str(ours.root), "--question", question)
            print(f"| sql: question {question} | {mine[0]:.1f} | {mine[1]:.0f} | | |", flush=True)
        pairs = "a join read_parquet('{}') b using (trajectory_id, step_index)".format(files.replace("ours", "theirs"))
        plain = (
            f"select count(*) filter (a.reward is distinct from b.reward), "
            f"count(*) filter (a.response_ids is distinct from b.response_ids) from read_parquet('{files}') {pairs}"
        )
        other = measured(sys.executable, "-c", f"import duckdb; print(duckdb.sql({plain!r}).fetchall())")
        for what, pair in (("itself", (ours, ours)), ("the other", (ours, theirs))):
            mine = measured(*skyrl, "diff", *(str(run.root) for run in pair))
            beside = f"{other[0]:.1f} | {other[1]:.0f}" if pair[1] is theirs else "|"
            print(f"| diff with {what} | {mine[0]:.1f} | {mine[1]:.0f} | {beside} |", flush=True)
            last = mine[2].splitlines()
        print("\n" + "\n".join(last[-4:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
