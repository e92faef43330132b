"""An algorithm with all of its settings, and what a table of advantages must hold for it.

Everything here is checked before a model is loaded.
"""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.algos.base import Algorithm
from nanoskyrl.algos.off_policy import OffPolicyConfig
from nanoskyrl.stages.core.code import plugin_digests
from nanoskyrl.stages.core.config import plugin_config, row_settings, stage_config
from nanoskyrl.stages.core.digests import derive_seed
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.manifest import Manifest
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.learning.batching import PER_TOKEN, one_temperature, read_sequences
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.objective import Objective
from nanoskyrl.stages.learning.train_config import CriticConfig, OptimizerConfig, TrainConfig, check_horizon
from nanoskyrl.stages.models.policy import critic_digest, policy_digest
from nanoskyrl.stages.models.vocabulary import check_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An algorithm with all of its settings: what a table of advantages must fit, before any model is loaded."""

    algorithm: Algorithm
    algo_config: Any
    config: TrainConfig
    off_policy: OffPolicyConfig
    critic: CriticConfig | None

    def described(self) -> dict[str, Any]:
        """Return the settings beside [train] and the algorithm's that can change the weights."""
        return {
            "off_policy": row_settings(self.off_policy),
            **({"critic": row_settings(self.critic)} if self.critic else {}),
            **plugin_digests(self.config.algo),
        }

    @property
    def optimizer(self) -> OptimizerConfig:
        """What of the settings a learner is made with."""
        return OptimizerConfig(**{f.name: getattr(self.config, f.name) for f in fields(OptimizerConfig)})

    def learner(self) -> Learner:
        """Return a learner that holds nothing yet."""
        return Learner(self.optimizer, critic=self.critic)

    def objective(self, table: pa.Table, old_logprobs: list[np.ndarray] | None = None) -> Objective:
        """Return the loss over these rows; old log-probs that are given replace the table's."""
        sequences = read_sequences(table)
        if old_logprobs is not None:
            sequences = replace(sequences, old_logprobs=list(old_logprobs))
        # A trajectory's id comes from run seed, step and task.
        drawn_for = table.column("trajectory_id")[0].as_py() if table.num_rows else ""
        return Objective(
            self.algorithm, self.algo_config, self.config, sequences,
            one_temperature(table) if table.num_rows else 1.0, off_policy=self.off_policy, critic=self.critic,
            seed=derive_seed(0, drawn_for),
        )  # fmt: skip

    def check(self, source: Manifest) -> None:
        """Refuse advantages that are not this algorithm's.

        Raises:
            SettingsError: names the command that makes the right ones.
        """
        check_horizon(self.config.loss_reduction or self.algorithm.loss_reduction, self.config.horizon)
        made = source.settings.get("advantage", {})
        name = self.config.algo
        if made.get("use_kl_in_reward") and self.config.use_kl_loss:
            raise SettingsError(
                "the KL to the reference is in the reward already, and `train.use_kl_loss` is on",
                hint="Switch one of them off",
            )
        estimator = self.config.kl_estimator_type or self.algorithm.loss_kl_estimator
        if self.config.use_kl_loss and estimator == "k1" and not self.config.kl_straight_through:
            raise SettingsError("k1 has no gradient in expectation", hint="Set `train.kl_estimator_type` to k2 or k3")
        if self.config.allow_estimator:
            return
        wanted, found = self.algorithm.estimator, made.get("estimator")
        if found != wanted:
            raise SettingsError(
                f"`{name}` takes advantages of `{wanted}`, and these are of `{found}`",
                hint=f"Run `skyrl advantage --algo {name}`, or pass `--allow-estimator`",
            )
        if made.get("overlong_buffer_length") and not self.algorithm.overlong_punishment:
            raise SettingsError(
                f"`{name}` does not shape rewards by length, and these advantages are of shaped ones",
                hint="Run `skyrl advantage --set advantage.overlong_buffer_length=0`, or pass `--allow-estimator`",
            )
        if made.get("use_kl_in_reward") and self.algorithm.kl_place != "reward":
            raise SettingsError(
                f"`{name}` has no KL in its reward, and these advantages have",
                hint="Run `skyrl advantage --set advantage.use_kl_in_reward=false`, or pass `--allow-estimator`",
            )

    def check_rows(self, kept: pa.Table, policy: Path, *, recomputed: bool = False) -> None:
        """Refuse rows that lack what the loss reads, or for which a ratio would be wrong.

        Args:
            kept: The rows to learn from.
            policy: What training starts from.
            recomputed: Whether old log-probs will replace the rows' own.

        Raises:
            InputError: names what is missing and how to get it.
        """
        algorithm, name = self.algorithm, self.config.algo
        reads_sampler = self.off_policy.on or self.off_policy.follows_sampler
        if (algorithm.uses_ratio or reads_sampler) and (
            any(value < 1 for value in kept.column("top_p").to_pylist()) or any(kept.column("top_k").to_pylist())
        ):
            raise InputError(
                "rows were sampled with top_p below 1 or with top_k: their log-probs are of a truncated distribution",
                hint="Sample with top_p 1 and top_k 0 to train",
            )
        missing = {column: bool(kept.column(column).null_count) for column in ("rollout_logprobs", "old_logprobs")}
        missing["old_logprobs"] &= not recomputed
        if all(missing.values()):
            raise InputError("rows have no log-probs", hint="Run `skyrl advantage --old-logprobs recompute`")
        raw = pc.and_(pc.equal(kept.column("logprobs_mode"), "raw"), pc.not_equal(kept.column("temperature"), 1.0))
        if pc.any(raw, min_count=0).as_py() and (missing["old_logprobs"] or reads_sampler):
            raise InputError(
                "rows hold raw log-probs, and were sampled at another temperature than 1",
                hint="Sample with `rollout.logprobs_mode = processed`, or set `advantage.old_logprobs = recompute`",
            )
        samplers = set(kept.filter(pc.is_null(kept.column("rollout_logprobs"))).column("policy_digest").to_pylist())
        if samplers - {policy_digest(policy)}:
            raise InputError(
                f"rows without recorded log-probs were sampled by another policy than `{policy}`",
                hint="Record them (`rollout.logprobs_mode = processed`), or sample with lag 0",
            )
        if not pc.all(pc.greater(pc.list_value_length(kept.column("prompt_ids")), 0), min_count=0).as_py():
            row = pc.index(pc.list_value_length(kept.column("prompt_ids")), 0).as_py()
            raise InputError(
                f"trajectory `{kept.column('trajectory_id')[row]}` has an empty prompt",
                hint="A token that follows nothing has no log-prob",
            )
        if self.off_policy.on and any(missing.values()):
            raise InputError(
                "`off_policy` weighs old log-probs against the sampling policy's, and rows lack "
                f"{' and '.join(column for column, gone in missing.items() if gone)}",
                hint="Sample with recorded log-probs, and run `skyrl advantage --old-logprobs recompute`",
            )
        if self.off_policy.follows_sampler and missing["rollout_logprobs"]:
            raise InputError(
                "`off_policy` compares the policy with the one that sampled, and rows have no log-probs of it",
                hint="Sample with `rollout.logprobs_mode = processed`",
            )
        if self.critic is not None and (kept.column("values").null_count or kept.column("returns").null_count):
            raise InputError(f"`{name}` needs a critic's values", hint=f"Run `skyrl advantage --algo {name}`")
        if self.config.use_kl_loss and kept.column("ref_logprobs").null_count:
            raise InputError(
                "`train.use_kl_loss` needs log-probs under the reference, and rows have none",
                hint="Run `skyrl advantage --ref-logprobs --force`",
            )


def recipe_of(config: TrainConfig, settings: dict[str, dict[str, Any]]) -> Recipe:
    """Return an algorithm with all of its settings."""
    algorithm = lookup("algo", config.algo)
    if not isinstance(algorithm, Algorithm):
        raise SettingsError(
            f"`{config.algo}` is a {type(algorithm).__name__}, not an Algorithm", hint="docs/extending.md shows one"
        )
    if algorithm.Config is not None and not is_dataclass(algorithm.Config):
        raise SettingsError(f"the Config of `{config.algo}` is no dataclass", hint="docs/extending.md shows one")
    return Recipe(
        algorithm=algorithm,
        algo_config=plugin_config(settings, "algo", config.algo),
        config=config,
        off_policy=stage_config(settings, "off_policy"),
        critic=stage_config(settings, "critic") if algorithm.needs_critic else None,
    )


def check_start(source: Manifest, policy: Path, *, old_logprobs: bool = True) -> None:
    """Refuse a policy whose log-probs, or whose critic's values, the advantages do not hold.

    Args:
        source: Of the advantages.
        policy: What training starts from.
        old_logprobs: Whether the log-probs written there are used.

    Raises:
        InputError: they are of another one.
    """
    made = source.settings.get("advantage", {})
    recomputed = old_logprobs and made.get("old_logprobs") == "recompute"
    of_critic = "critic" in source.facts and source.facts["critic"] != critic_digest(policy)
    if (recomputed and source.policy != policy_digest(policy)) or of_critic:
        raise InputError(
            f"the {'values' if of_critic else 'old log-probs'} are of another policy than `{policy}`",
            hint="Run `skyrl advantage` again, with the policy that training starts from",
        )


def read_kept(
    place: Path, source: Manifest, recipe: Recipe, policy: Path, *, recomputed: bool = False
) -> tuple[pa.Table, list[int]]:
    """Return the rows to learn from, and the tokens of one row, after refusing those that the recipe cannot use.

    No row at all is no mistake where every group was left out because all its attempts had equal rewards.

    Raises:
        InputError: nothing is kept, a token is not the policy's, or the rows lack what the loss reads.
    """
    found = list(read_parts(place, source))
    if not found:
        raise InputError(f"`{place}` has no parts", hint="Run `skyrl advantage` again, with `--force`")
    table = pa.concat_tables(found).combine_chunks()
    with _named(place):
        check(table, "advantage")
    check_token_ids(table, place, policy)
    kept = table.filter(table.column("kept"))
    tokens = next(
        (
            [*row["prompt_ids"], *row["response_ids"]]
            for of in (kept, table)
            for row in of.select(["prompt_ids", "response_ids"]).slice(0, 64).to_pylist()
            if row["prompt_ids"] and row["response_ids"]
        ),
        [],
    )
    if not kept.num_rows and set(table.column("drop_reason").to_pylist()) == {"zero_variance"} and tokens:
        return kept, tokens
    if not kept.num_rows:
        reasons = sorted({reason for reason in table.column("drop_reason").to_pylist() if reason})
        raise InputError(
            f"no row of `{place}` is kept ({', '.join(reasons) or 'it is empty'})",
            hint="Look at the rows with `skyrl show`",
        )
    with _named(place):
        _check_numbers(kept)
        one_temperature(kept)
        recipe.check_rows(kept, policy, recomputed=recomputed)
    if not sum(read_sequences(kept).trained_tokens):
        raise InputError(f"no row of `{place}` has a sampled token", hint="Raise the limits of the rollout")
    return kept, tokens


@contextmanager
def _named(place: Path) -> Iterator[None]:
    """Put the directory's name before what is wrong with its rows."""
    try:
        yield
    except InputError as error:
        raise InputError(f"`{place}`: {error}", hint=error.hint) from error


def _check_numbers(kept: pa.Table) -> None:
    """Refuse rows that are kept and must not be trained, or whose numbers are none.

    Raises:
        InputError: names the trajectory and the column.
    """
    untrainable = pc.index(kept.column("trainable"), False).as_py()
    if untrainable >= 0:
        raise InputError(
            f"trajectory `{kept.column('trajectory_id')[untrainable]}` is kept, and not trainable",
            hint="Run `skyrl advantage` again, with `--force`",
        )
    for name in PER_TOKEN:
        # Null, as log-probs are on observed tokens, is neither finite nor infinite.
        if pc.all(pc.is_finite(pc.list_flatten(kept.column(name))), min_count=0).as_py():
            continue
        values = kept.column(name).to_pylist()
        row = next(i for i, of in enumerate(values) if any(v is not None and not math.isfinite(v) for v in of or ()))
        raise InputError(
            f"trajectory `{kept.column('trajectory_id')[row]}` has NaN or infinity in `{name}`",
            hint="Write the rows again: training on them would give weights that are no numbers",
        )
