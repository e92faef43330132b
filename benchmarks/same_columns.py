"""Do two runs hold the same? Every column of every shard, and every file of a policy, whatever schema wrote them.

    python benchmarks/same_columns.py RUN OTHER

Columns are compared under the names they have now, number by number; manifests are not, for they name the code.
Prints what differs, then a count; exits with 1 if anything does.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from nanoskyrl.stages.core.manifest import PART_NAME
from nanoskyrl.stages.core.shards import read_part

ASIDE = ("metrics.jsonl", "run.toml", "resolved.json", "optimizer.pt", "starter.json", "train.log")
"""Clocks, settings as they were typed, and what a pickle may order otherwise."""
OF_MANIFESTS = ("manifest.json", "started.json", "summary.json")


def files(run: Path) -> dict[str, Path]:
    """Return what is compared, by its place in the run."""
    names = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file()}
    return {
        name: path for name, path in names.items() if path.name not in ASIDE and not path.name.endswith(OF_MANIFESTS)
    }


def differences(one: Path, other: Path) -> Iterator[str]:
    """Yield what two files do not have in common, column by column where they are shards."""
    if not PART_NAME.fullmatch(one.name):
        if one.read_bytes() != other.read_bytes():
            yield "other bytes"
        return
    ours, theirs = read_part(one), read_part(other)
    for name in dict.fromkeys([*ours.column_names, *theirs.column_names]):
        if name not in ours.column_names or name not in theirs.column_names:
            yield f"column `{name}` is in one alone"
        # As text, for NaN is no number that equals itself, and -0.0 equals 0.0.
        elif repr(ours.column(name).to_pylist()) != repr(theirs.column(name).to_pylist()):
            yield f"column `{name}`"


def main() -> int:
    """Compare the runs that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs=2)
    ours, theirs = map(files, parser.parse_args().runs)
    found = [f"{name}: in one alone" for name in sorted({*ours} ^ {*theirs})]
    found += [
        f"{name}: {what}" for name in sorted({*ours} & {*theirs}) for what in differences(ours[name], theirs[name])
    ]
    print(*found, f"{len({*ours} & {*theirs})} files compared, {len(found)} differences", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
