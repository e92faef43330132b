"""What several algorithms make of the same rows and the same policy: losses, gradients, weights.

Nothing is trained. Each algorithm's gradient is taken at the policy that training would
start from, over all kept rows as one mini-batch; cosines between gradients say how much two
algorithms would disagree about the next step.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from nanoskyrl.stages.core.digests import derive_seed
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.storage import whole_file
from nanoskyrl.stages.learning.objective import Objective, Terms
from nanoskyrl.stages.learning.recipe import check_start, read_kept, recipe_of
from nanoskyrl.stages.learning.train_config import TrainConfig
from nanoskyrl.stages.learning.update import Update
from nanoskyrl.stages.models.policy import policy_digest

SCHEMA = pa.schema(
    [
        pa.field("algo", pa.string(), nullable=False),
        pa.field("takes", pa.string()),
        pa.field("loss", pa.float64()),
        pa.field("gradient_norm", pa.float64()),
        pa.field("share_name", pa.string()),
        pa.field("share", pa.float64()),
        pa.field("ratio_max", pa.float64()),
        pa.field("cosines", pa.map_(pa.string(), pa.float64())),
        pa.field("trajectory_id", pa.list_(pa.string())),
        pa.field("step_index", pa.list_(pa.int32())),
        pa.field("weight", pa.list_(pa.float64())),
    ]
)
"""One row an algorithm.

takes: the estimator it was published with, whatever the rows hold. share: of tokens clipped (clip_ratio) or held near
the old policy (held_ratio), or of the gradient let through (gate). cosines: between its gradient and each other's; null
where one is 0. weight: of each row of the shards, minus the slope of the loss by the log-probs of its tokens, summed:
how hard the row is pushed up.
"""


def compare(
    advantages: Path,
    algos: Sequence[str],
    config: TrainConfig,
    *,
    policy: Path,
    settings: dict[str, dict[str, Any]] | None = None,
    seed: int = 0,
    output: Path | None = None,
    begins: Callable[[str], None] = lambda algo: None,
) -> pa.Table:
    """Take the loss and the gradient of each algorithm on the same rows.

    Args:
        advantages: Shards written by `advantage`.
        algos: Names of algorithms; each with its own reduction unless `config` names one.
        config: Settings of training.
        policy: Where the gradients are taken.
        settings: Tables of the algorithms.
        seed: Of the run.
        output: Where to write the answer as Parquet.
        begins: Called when an algorithm's turn comes.

    Returns:
        One row an algorithm, as SCHEMA says.

    Raises:
        SettingsError, InputError: as in `train`, of the first algorithm that cannot use the rows.
    """
    if not algos:
        raise SettingsError("no algorithm is named", hint="Name some, as `--algos grpo,sapo`")
    source = read_manifest(advantages, stage="advantage")
    check_start(source, policy)
    recipes = [recipe_of(replace(config, algo=algo, allow_estimator=True), settings or {}) for algo in algos]
    for recipe in recipes:
        recipe.check(source)
    table, _ = read_kept(advantages, source, recipes[0], policy)
    if not table.num_rows:
        raise InputError(
            f"no row of `{advantages}` is kept", hint="The rewards of each group are equal: take another step"
        )
    for recipe in recipes[1:]:
        recipe.check_rows(table, policy)
    # One policy for all: with new adapters, the same ones.
    learner = next((recipe for recipe in recipes if recipe.critic), recipes[0]).learner()
    learner.load(policy, seed=derive_seed(seed, "adapters") % 2**32)
    rows, gradients = [], []
    for algo, recipe in zip(algos, recipes, strict=True):
        begins(algo)
        update = _Watched(recipe.objective(table))
        gradients.append(update.gradient(learner, list(range(table.num_rows))))
        seen = update.seen()
        share = next((name for name in ("clip_ratio", "gate", "held_ratio") if f"policy/{name}" in seen), None)
        rows.append(
            {
                "algo": algo,
                "takes": recipe.algorithm.estimator,
                "loss": seen["train/loss"],
                "gradient_norm": float(torch.linalg.vector_norm(gradients[-1], dtype=torch.float64)),
                "share_name": share,
                "share": seen[f"policy/{share}"] if share else None,
                "ratio_max": seen["train/ratio/max"],
                "trajectory_id": table.column("trajectory_id").to_pylist(),
                "step_index": table.column("step_index").to_pylist(),
                "weight": update.weights.tolist(),
            }
        )
    for row, cosines in zip(rows, _cosines(gradients), strict=True):
        row["cosines"] = [
            (algo, None if np.isnan(value) else value) for algo, value in zip(algos, cosines.tolist(), strict=True)
        ]
    found = pa.Table.from_pylist(rows, SCHEMA)
    if output is not None:
        described = {"policy": policy_digest(policy), "advantage": source.digest}
        with whole_file(output) as file:
            pq.write_table(found.replace_schema_metadata(described), file, compression="zstd")
    return found


class _Watched(Update):
    """A pass that also keeps how hard each row's log-probs are pushed."""

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective)
        self.weights = np.zeros(len(objective.sequences))

    def _seen(self, batch: Any, terms: Terms) -> torch.Tensor:
        (slope,) = torch.autograd.grad(terms.loss, terms.logprobs, retain_graph=True)
        self.weights[batch.rows] = -(slope * batch.loss_mask).sum(-1).double().cpu().numpy()
        return super()._seen(batch, terms)


def _cosines(gradients: Sequence[torch.Tensor]) -> np.ndarray:
    stacked = torch.stack(list(gradients)).double()
    norms = stacked.norm(dim=1)
    return ((stacked @ stacked.T) / (norms[:, None] * norms[None])).numpy()
