"""Ways to make a run false: each changes a copy of an honest run and says what has to be named.

A forger who knows the format also fixes digests and seals: `forge` and `fix_parts` do so for one output, `relink` for
all that were made from it.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nanoskyrl.stages.core.digests import digest_file
from nanoskyrl.stages.core.manifest import MANIFEST, Manifest, read_manifest
from nanoskyrl.stages.core.pipeline import OURS, STAGES
from nanoskyrl.stages.core.runs import Run

Way = Callable[[Path, Path, random.Random], str]
"""Changes the first run, may take from the second, and returns words that must be in what is broken."""


def write(folder: Path, manifest: Manifest) -> None:
    replace_file(folder / MANIFEST, manifest.sealed().to_bytes())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that shares no bytes with others under other names."""
    path.unlink()
    path.write_bytes(data)


def forge(folder: Path, **changes) -> None:
    """Change what a manifest says, and give it the seal of what it says now."""
    value = json.loads((folder / MANIFEST).read_text()) | {"seal": None}
    for name, change in changes.items():
        value[name] = change(value[name]) if callable(change) else change
    replace_file(folder / MANIFEST, json.dumps(value).encode())
    write(folder, read_manifest(folder))


def fix_parts(folder: Path) -> None:
    """Let a manifest name the parts and files as they are now."""
    forge(
        folder,
        parts=lambda parts: [
            part
            | {"digest": digest_file(folder / part["name"]), "rows": pq.read_metadata(folder / part["name"]).num_rows}
            for part in parts
        ],
        files=lambda files: {name: digest_file(folder / name) for name in files},
    )


def relink(run: Path, first: int = 0) -> None:
    """Let every output name its inputs as they are now."""
    layout = Run(run)
    for step in layout.steps()[first:]:
        for stage in STAGES:
            folder = layout.stage(step, stage)
            parent = OURS[stage].input
            parents = {parent: layout.stage(step, parent)} if parent else {}
            if stage == "train" and step:
                parents["state"] = layout.stage(step - 1, "train")
            digests = {name: read_manifest(place).digest for name, place in parents.items()}
            forge(folder, inputs=lambda inputs, digests=digests: inputs | digests)


def edit_part(folder: Path, change: Callable[[pa.Table], pa.Table], name: str = "part-00000.parquet") -> None:
    replace_file(folder / name, _parquet(change(pq.read_table(folder / name))))
    fix_parts(folder)


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def with_value(table: pa.Table, name: str, row: int, value) -> pa.Table:
    values = table.column(name).to_pylist()
    values[row] = value
    place = table.column_names.index(name)
    return table.set_column(place, table.field(name), pa.array(values, table.field(name).type))


def flipped(place: str) -> Way:
    """Flip one bit of a file."""

    def way(run: Path, other: Path, draw: random.Random) -> str:
        data = bytearray((run / place).read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        replace_file(run / place, bytes(data))
        return place.rpartition("/")[0] if place.startswith("policies") else place

    return way


def removed(place: str) -> Way:
    def way(run: Path, other: Path, draw: random.Random) -> str:
        found = run / place
        shutil.rmtree(found) if found.is_dir() else found.unlink()
        return place.removesuffix(f"/{MANIFEST}")

    return way


def exchanged(one: str, two: str) -> Way:
    def way(run: Path, other: Path, draw: random.Random) -> str:
        (run / one).rename(run / "aside")
        (run / two).rename(run / one)
        (run / "aside").rename(run / two)
        return one

    return way


def copied(place: str, named: str = "", *, foreign: bool = True, source: str | None = None) -> Way:
    """Put what lies elsewhere in the place of what is there."""

    def way(run: Path, other: Path, draw: random.Random) -> str:
        shutil.rmtree(run / place, ignore_errors=True)
        shutil.copytree((other if foreign else run) / (source or place), run / place)
        return named or place

    return way


def forged(place: str, *, linked: bool = False, **changes) -> Way:
    """Let a manifest say something else, and seal it again; `linked`: what was made from it names it anew."""

    def way(run: Path, other: Path, draw: random.Random) -> str:
        forge(run / place, **changes)
        if linked:
            relink(run)
        return place

    return way


def rewritten(place: str, change: Callable[[pa.Table], pa.Table]) -> Way:
    """Change the rows of an output, and fix its digests and all links."""

    def way(run: Path, other: Path, draw: random.Random) -> str:
        edit_part(run / place, change)
        relink(run)
        return place.partition("/")[0]

    return way


def summary_forged(run: Path, other: Path, draw: random.Random) -> str:
    place = run / "evals/00000002/text_math"
    numbers = json.loads((place / "_summary.json").read_text())
    replace_file(place / "_summary.json", json.dumps(numbers | {"success": 0.99}).encode())
    fix_parts(place)
    return "evals/00000002/text_math: success is 0.99"


def part_too_many(run: Path, other: Path, draw: random.Random) -> str:
    place = run / "step-000001/score"
    shutil.copy(place / "part-00001.parquet", place / "part-00002.parquet")
    return "step-000001/score/part-00002.parquet is in no manifest"


def scored_again(run: Path, other: Path, draw: random.Random) -> str:
    """Change the rewards of a step that was trained on, as `score --force` with other code would."""
    edit_part(run / "step-000000/score", lambda table: with_value(table, "reward", 0, 7.0))
    return "step-000000/advantage: its parent `score`"


def policy_of_another_parent(run: Path, other: Path, draw: random.Random) -> str:
    for place in (run / "step-000001/train/policy", run / "policies/00000002"):
        info = json.loads((place / "policy.json").read_text())
        replace_file(place / "policy.json", (json.dumps(info | {"parent": "0" * 64}, sort_keys=True) + "\n").encode())
    fix_parts(run / "step-000001/train")
    relink(run)
    return "names another parent"


def another_first_policy(run: Path, other: Path, draw: random.Random) -> str:
    place = run / "policies/00000000/policy.json"
    replace_file(place, place.read_text().replace("starter", "startes").encode())
    return "policies/00000000"


def facts(**changed):
    return lambda held: held | changed


def dropped_row(table: pa.Table) -> pa.Table:
    return table.slice(1)


def first_kept(table: pa.Table) -> int:
    return table.column("kept").to_pylist().index(True)


def left_out(table: pa.Table) -> pa.Table:
    row = first_kept(table)
    found = with_value(with_value(table, "kept", row, False), "drop_reason", row, "overlong")
    return with_value(found, "advantages", row, None)


ONE, TWO = "step-000000", "step-000001"
WAYS: dict[str, Way] = {
    **{f"a bit of {stage}'s part": flipped(f"{TWO}/{stage}/part-00000.parquet") for stage in STAGES[:4]},
    **{f"a bit of {stage}'s manifest": flipped(f"{ONE}/{stage}/{MANIFEST}") for stage in STAGES},
    "a bit of the newest sync's manifest": flipped(f"{TWO}/sync/{MANIFEST}"),
    "a bit of the newest train's manifest": flipped(f"{TWO}/train/{MANIFEST}"),
    "a bit of an evaluation's part": flipped("evals/00000002/text_math/part-00000.parquet"),
    "a bit of an evaluation's manifest": flipped(f"evals/00000002/text_math/{MANIFEST}"),
    "a bit of an evaluation's numbers": flipped("evals/00000001/text_math/_summary.json"),
    "a bit of the first policy's weights": flipped("policies/00000000/model.safetensors"),
    "a bit of a policy's weights": flipped("policies/00000001/model.safetensors"),
    "a bit of a policy's tokenizer": flipped("policies/00000002/tokenizer.json"),
    "a bit of a policy's config": flipped("policies/00000001/config.json"),
    "a bit of the first policy.json": flipped("policies/00000000/policy.json"),
    "a bit of a policy.json": flipped("policies/00000002/policy.json"),
    "a bit of the optimizer's state": flipped(f"{TWO}/train/state/optimizer.pt"),
    "a bit of the policy that was trained": flipped(f"{ONE}/train/policy/model.safetensors"),
    **{f"no {stage}": removed(f"{ONE}/{stage}") for stage in STAGES},
    "no newest rollout": removed(f"{TWO}/rollout"),
    "no newest sync": removed(f"{TWO}/sync"),
    "no first policy": removed("policies/00000000"),
    "no policy between": removed("policies/00000001"),
    "no newest policy": removed("policies/00000002"),
    "no part": removed(f"{ONE}/score/part-00001.parquet"),
    "no manifest": removed(f"{ONE}/advantage/{MANIFEST}"),
    "no numbers of an evaluation": removed("evals/00000001/text_math/_summary.json"),
    "no trained policy": removed(f"{ONE}/train/policy"),
    "evaluations exchanged": exchanged("evals/00000001", "evals/00000002"),
    "an evaluation of another policy": copied("evals/00000002", foreign=False, source="evals/00000000"),
    "an evaluation of another run": copied("evals/00000001"),
    "parts exchanged": exchanged(f"{ONE}/rollout/part-00000.parquet", f"{ONE}/rollout/part-00001.parquet"),
    "rollouts exchanged": exchanged(f"{ONE}/rollout", f"{TWO}/rollout"),
    "scores exchanged": exchanged(f"{ONE}/score", f"{TWO}/score"),
    "steps exchanged": exchanged(ONE, TWO),
    "policies exchanged": exchanged("policies/00000001", "policies/00000002"),
    "trained policies exchanged": exchanged(f"{ONE}/train/policy", f"{TWO}/train/policy"),
    "states exchanged": exchanged(f"{ONE}/train/state", f"{TWO}/train/state"),
    "a policy of another run": copied("policies/00000002"),
    "a train of another run": copied(f"{TWO}/train"),
    "a rollout of another run": copied(f"{TWO}/rollout", f"{TWO}/"),
    "a part too many": part_too_many,
    "rewards changed after they were trained on": scored_again,
    "a policy of another parent": policy_of_another_parent,
    "another name of the first policy": another_first_policy,
    "an evaluation's success": summary_forged,
    "an evaluation's policy": forged("evals/00000001/text_math", policy="0" * 64),
    "an evaluation's environment": forged(
        "evals/00000001/text_math", settings=lambda s: s | {"rollout": s["rollout"] | {"env": "tool_use"}}
    ),
    "rows given": forged(f"{ONE}/score", rows_in=15, linked=True),
    "rows of a rollout": forged(f"{ONE}/rollout", rows_out=17, linked=True),
    "rows left out": forged(f"{ONE}/advantage", dropped={"overlong": 1}, linked=True),
    "rows that were too old": forged(f"{TWO}/train", facts=facts(stale_rows=3), linked=True),
    "the policy that training started from": forged(f"{TWO}/train", policy="0" * 64, linked=True),
    "the optimizer that training continued from": forged(f"{TWO}/train", inputs=facts(state="0" * 64)),
    "the policy that was sampled from": forged(f"{TWO}/rollout", policy="0" * 64, linked=True),
    "the step of a rollout": forged(
        f"{TWO}/rollout", settings=lambda s: s | {"rollout": s["rollout"] | {"step": 7}}, linked=True
    ),
    "the version that was published": forged(f"{TWO}/sync", facts=facts(version=9)),
    "the parent of what was published": forged(f"{TWO}/sync", facts=facts(parent="0" * 64)),
    "whether the step changed anything": forged(f"{TWO}/sync", facts=facts(changed=False)),
    "a reward": rewritten(f"{ONE}/score", lambda table: with_value(table, "reward", 0, 0.25)),
    "an answer": rewritten(f"{ONE}/rollout", lambda table: with_value(table, "response", 0, "<answer>1</answer>")),
    "a row less": rewritten(f"{ONE}/score", dropped_row),
    "a row that is not kept": rewritten(f"{ONE}/advantage", left_out),
    "a row less that was learned from": rewritten(f"{ONE}/train", dropped_row),
    "tokens that were trained": rewritten(f"{ONE}/train", lambda table: with_value(table, "tokens", 0, 10_000)),
    "the policy that a row names": rewritten(f"{TWO}/rollout", lambda table: with_value(table, "policy_version", 0, 7)),
}  # fmt: skip
"""Every way, by what is made false."""
