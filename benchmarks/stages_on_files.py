"""score, advantage, show and verify on made-up rollouts of 1,000 to 1,000,000 trajectories of 100 tokens.

    python benchmarks/stages_on_files.py --rows 1000,10000,100000 --directory /tmp/made_up
    python benchmarks/stages_on_files.py --rows 1000000           # 20 GB of disk are not needed: 1.5 do

Each command runs in a process of its own, whose processor time and largest memory are taken; start-up (the command on
16 rows) is taken off its time. Beside score and advantage stands numpy without loops over rows, with our own reader
and writer, in a process of its own too: it reads a part, grades by a regular expression or takes the rewards of whole
groups, and writes the part with the new columns. It checks nothing, resumes nothing and logs nothing. What advantage
writes must equal what numpy gets. `--code DIR` measures another checkout of the project, `--schema-1` one of before
that schema, such as commit 306e4ba: it is given the same rows as it would have written them.
"""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from made_up import GROUP, made_up_rollout

from nanoskyrl.stages.core.digests import digest_file
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.rows import one_chunk
from nanoskyrl.stages.core.shards import read_part, write_part
from nanoskyrl.stages.core.trajectory import SCHEMA_KEY, schema_of, tokens
from nanoskyrl.stages.engines.rollout_config import ROWS_PER_PART

COMMANDS = ("score", "advantage", "show", "show --row", "verify")


class Spent(NamedTuple):
    """What a process took."""

    wall: float
    cpu: float
    megabytes: float


def spent(arguments: list[str], code: Path | None) -> Spent:
    """Run Python with these arguments and return what it took."""
    paths = {} if code is None else {"PYTHONPATH": str(code)}
    began = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **paths}
    )
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - began
    if status:
        raise SystemExit(f"failed: {' '.join(arguments)}")
    return Spent(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def command(name: str, root: Path) -> list[str]:
    """Return the arguments of a command of the project."""
    places = {
        "score": ["score", str(root / "rollout"), "--out", str(root / "score"), "--force"],
        "advantage": ["advantage", str(root / "score"), "--out", str(root / "advantage"), "--force"],
        "show": ["show", str(root / "advantage")],
        "show --row": ["show", str(root / "score"), "--row", "3"],
        "verify": ["verify", str(root / "score")],
    }
    return ["-m", "nanoskyrl_cli.main", *places[name]]


def numpy_score(root: Path) -> None:
    """Grade answers in tags against the ground truth, part by part."""
    for path in sorted((root / "rollout").glob("part-*.parquet")):
        table = read_part(path, digest_file(path))
        actions = one_chunk(table.column("turns")).flatten().field("action")
        answers = pc.extract_regex(actions, r"<answer>(?P<said>[^<]*)</answer>").field("said")
        truths = (
            pc.extract_regex(table.column("metadata"), r'"ground_truth": "(?P<is>[^"]*)"').combine_chunks().field("is")
        )
        right, answered = (np.asarray(of) for of in (pc.equal(answers, truths), pc.is_valid(answers)))
        reward = (1 - 0.1) * right + 0.1 * answered
        texts = np.array(
            [f'{{"answer": {float(r)}, "format": {float(a)}, "answered": {float(a)}}}' for r in (0, 1) for a in (0, 1)]
        )
        added = {
            "reward": pa.array(reward), "reward_parts": pa.array(texts[2 * right.astype(int) + answered]),
            "success": pa.array(right), "score_status": pa.array(["scored"] * len(right)),
        }  # fmt: skip
        schema = schema_of("score")
        columns = [added[name] if name in added else table.column(name) for name in schema.names]
        (root / "numpy").mkdir(exist_ok=True)
        write_part(root / "numpy" / path.name, pa.Table.from_arrays(columns, schema=schema))


def numpy_advantage(root: Path) -> None:
    """Give each token its trajectory's advantage within whole groups, part by part; the last bits are numpy's."""
    for path in sorted((root / "score").glob("part-*.parquet")):
        table = read_part(path, digest_file(path))
        rewards = table.column("reward").to_numpy().reshape(-1, GROUP)
        centred = rewards - rewards.mean(1, keepdims=True)
        scaled = np.where(
            np.ptp(rewards, 1, keepdims=True) > 0, centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-6), 0
        )
        masks = one_chunk(table.column("loss_mask"))
        lengths = pc.list_value_length(masks).to_numpy()
        flat = np.repeat(scaled.ravel().astype(np.float32), lengths) * masks.flatten().to_numpy()
        lists = pa.ListArray.from_arrays(masks.offsets, pa.array(flat), type=tokens(pa.float32()))
        schema = schema_of("advantage")
        added = {
            "shaped_reward": table.column("reward"), "advantages": lists,
            "kept": pa.array(np.ones(table.num_rows, bool)),
        }  # fmt: skip
        columns = [
            added[name] if name in added
            else table.column(name) if name in table.column_names
            else pa.nulls(table.num_rows, schema.field(name).type)
            for name in schema.names
        ]  # fmt: skip
        (root / "numpy").mkdir(exist_ok=True)
        write_part(root / "numpy" / path.name, pa.Table.from_arrays(columns, schema=schema))


def schema_1(source: Path, target: Path) -> None:
    """Write a finished rollout as the code of schema 1 did, unless it is there."""
    manifest = read_manifest(source)
    parts = []
    for part in manifest.parts if not (target / "manifest.json").is_file() else ():
        table = read_part(source / part.name)
        table = table.rename_columns(["logprobs" if n == "rollout_logprobs" else n for n in table.column_names])
        target.mkdir(parents=True, exist_ok=True)
        write_part(target / part.name, table.replace_schema_metadata({SCHEMA_KEY: b"1"}))
        parts.append(dataclasses.replace(part, digest=digest_file(target / part.name)))
    if parts:
        then = dataclasses.replace(manifest, schema_version=1, parts=tuple(parts))
        (target / "manifest.json").write_text(json.dumps(dataclasses.asdict(then), indent=2, sort_keys=True) + "\n")


def check_equal(root: Path) -> None:
    """Hold what `advantage` wrote against what numpy got."""
    for path in sorted((root / "numpy").glob("part-*.parquet")):
        ours, theirs = (read_part(of, columns=["advantages"]) for of in (root / "advantage" / path.name, path))
        mine, other = (np.asarray(one_chunk(of.column(0)).flatten()) for of in (ours, theirs))
        assert np.allclose(mine, other, rtol=1e-5, atol=1e-6), path


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="score, advantage, show and verify on made-up rollouts")
    parser.add_argument("--rows", default="1000,10000,100000", help="sizes (%(default)s)")
    parser.add_argument("--rows-per-part", type=int, default=ROWS_PER_PART, help="of each part (%(default)s)")
    parser.add_argument("--directory", type=Path, default=Path("/tmp/made_up"), help="where they lie (%(default)s)")
    parser.add_argument("--code", type=Path, help="a folder in which `nanoskyrl` is another checkout")
    parser.add_argument("--schema-1", action="store_true", help="that checkout knows no other schema")
    parser.add_argument("--numpy", choices=("score", "advantage"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.numpy:
        (numpy_score if options.numpy == "score" else numpy_advantage)(options.directory)
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, parts of {options.rows_per_part:,} rows")
    print(f"{'':12}{'rows':>10}{'wall s':>9}{'cpu s':>9}{'us a row':>10}{'MB':>8}{'numpy: wall, cpu':>20}{'ratios':>9}")
    started: dict[str, Spent] = {}
    for rows in (GROUP, *(int(rows) // GROUP * GROUP for rows in options.rows.split(","))):
        root = options.directory / str(rows)
        made_up_rollout(root / "rollout", rows, rows_per_part=options.rows_per_part)
        if options.schema_1:
            schema_1(root / "rollout", (root := options.directory / f"{rows}-schema-1") / "rollout")
        for name in COMMANDS:
            took = spent(command(name, root), options.code)
            if rows == GROUP:
                started[name] = took
                continue
            line = f"{name:12}{rows:10,}{took.wall:9.1f}{took.cpu:9.1f}"
            line += f"{1e6 * max(0.0, took.cpu - started[name].cpu) / rows:10.1f}{took.megabytes:8.0f}"
            if name in ("score", "advantage") and not options.schema_1:
                theirs = spent([__file__, "--numpy", name, "--directory", str(root)], None)
                line += f"{theirs.wall:12.1f}{theirs.cpu:8.1f}"
                for what in ("wall", "cpu"):
                    ours, other = (
                        getattr(of, what) - getattr(began, what)
                        for of, began in ((took, started[name]), (theirs, started["numpy"]))
                    )
                    line += f"{ours / other:6.2f}"
            print(line, flush=True)
        if options.schema_1:
            continue
        if rows == GROUP:
            started["numpy"] = spent([__file__, "--numpy", "advantage", "--directory", str(root)], None)
        check_equal(root)


if __name__ == "__main__":
    main()
