"""What one update learns from: the advantages of one step, or of several steps and policies.

Several are a replay window: rows that are staler than allowed are left out. Old log-probs
that were written for one of them are of another policy than training starts from now, so
they are recomputed; without them, ratios are against whoever sampled, row by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.manifest import Manifest, read_manifest
from nanoskyrl.stages.core.metrics import Value
from nanoskyrl.stages.core.runs import step_of, version_of
from nanoskyrl.stages.learning.recipe import Recipe, check_start, read_kept


@dataclass(frozen=True, slots=True)
class Sources:
    """The inputs of one update; the first is the step's own."""

    places: list[Path]
    manifests: list[Manifest]
    recompute: bool
    """Whether old log-probs are those of the policy that training starts from, computed before it."""

    @property
    def rows(self) -> int:
        """Rows of all inputs, kept or not."""
        return sum(manifest.rows_out for manifest in self.manifests)

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each input's manifest, by the name it has in ours."""
        return {
            manifest.stage if index == 0 else f"{manifest.stage}.{index}": manifest.digest
            for index, manifest in enumerate(self.manifests)
        }

    def read(self, recipe: Recipe, policy: Path) -> tuple[pa.Table, list[int], dict[str, Value]]:
        """Return the rows to learn from, the tokens of one row, and what is to be said of their age.

        Args:
            recipe: Which rows are too old, and what the others must hold.
            policy: What training starts from.

        Raises:
            InputError: as in `read_kept`, or every row is too old.
        """
        tables, tokens = [], []
        for index, (place, manifest) in enumerate(zip(self.places, self.manifests, strict=True)):
            table, found = read_kept(place, manifest, recipe, policy, recomputed=self.recompute)
            if index:
                # A prompt of another step is another prompt, whatever its name.
                names = pa.array([f"{index}/{name}" for name in table.column("group_id").to_pylist()], pa.string())
                table = table.set_column(table.column_names.index("group_id"), table.field("group_id"), names)
            tables.append(table)
            tokens = tokens or found
        table = pa.concat_tables(tables).combine_chunks()
        limit, age = recipe.config.max_staleness, staleness(table, policy)
        if age is None:
            if limit is not None:
                raise InputError(
                    f"`train.max_staleness` is {limit}, and `{policy}` has no version",
                    hint="Name a policy of a run, as RUN/policies/00000003, or leave the setting out",
                )
            return table, tokens, {}
        fresh = age <= (limit if limit is not None else np.iinfo(np.int32).max)
        if table.num_rows and not fresh.any():
            raise InputError(
                f"every row is more than {limit} policies old", hint="Raise `train.max_staleness`, or sample anew"
            )
        kept = age[fresh]
        numbers: dict[str, Value] = {"train/staleness/dropped": int((~fresh).sum())}
        if len(kept):
            numbers |= {"train/staleness/mean": float(kept.mean()), "train/staleness/max": int(kept.max())}
        return table.filter(pa.array(fresh)), tokens, numbers


def open_sources(places: Sequence[Path], recipe: Recipe, policy: Path) -> Sources:
    """Return the inputs, after refusing those whose settings are not the algorithm's.

    Raises:
        InputError: one is missing or unfinished, or holds what belongs to another policy.
        SettingsError: one comes twice, or is of another estimator.
    """
    manifests = [read_manifest(place, stage="advantage") for place in places]
    if len({manifest.digest for manifest in manifests}) < len(manifests):
        raise SettingsError("the same advantages are named twice", hint="Name each input once")
    for manifest in manifests:
        recipe.check(manifest)
    made = [manifest.settings.get("advantage", {}).get("old_logprobs") == "recompute" for manifest in manifests]
    several = len(manifests) > 1
    for manifest in manifests:
        check_start(manifest, policy, old_logprobs=not several)
    return Sources(list(places), manifests, several and (recipe.off_policy.on or any(made)))


def staleness(table: pa.Table, policy: Path) -> np.ndarray | None:
    """Return how many policies lie between each row's and the one that training starts from; None where unknown."""
    version = version_of(policy)
    if version is None and policy.parent.name == "train":  # not published yet
        step = step_of(policy.parent.parent)
        version = None if step is None else step + 1
    column = table.column("policy_version")
    return None if version is None or column.null_count else version - column.to_numpy().astype(np.int64)
