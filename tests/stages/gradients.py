"""Takes the loss and the gradient of one mini-batch, optimizer steps, and resumes, in however many processes it runs.

python gradients.py OUT STRATEGY LORA_RANK [ADVANTAGES POLICY]
"""

import sys
from pathlib import Path

import torch

from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.recipe import read_kept, recipe_of
from nanoskyrl.stages.learning.train_config import TrainConfig
from nanoskyrl.stages.learning.update import Update
from nanoskyrl.stages.models.policy import weights_digest


def main() -> None:
    out, strategy, rank, advantages, policy = sys.argv[1:]
    config = TrainConfig(strategy=strategy, lora_rank=int(rank), max_tokens_per_micro_batch=300, lr=1e-3)
    recipe = recipe_of(config, {})
    source = read_manifest(Path(advantages), stage="advantage")
    table, tokens = read_kept(Path(advantages), source, recipe, Path(policy))
    learner: Learner = recipe.learner()
    learner.load(Path(policy), seed=1)
    everything = list(range(table.num_rows))
    found = {
        "processes": learner.world.size, "strategy": learner.strategy.name, "lr": config.lr, "steps": 2,
    }  # fmt: skip

    update = Update(recipe.objective(table))
    found["gradient"] = update.gradient(learner, everything)
    update.gather(learner.world)
    found["loss"] = update.seen()["train/loss"]

    learner = recipe.learner()
    learner.load(Path(policy), seed=1)
    update = Update(recipe.objective(table))
    found["norms"] = [update.step(learner, everything).grad_norm for _ in range(found["steps"])]
    update.gather(learner.world)
    found["ratio"] = update.diagnostics(table).column("ratio_mean").to_pylist()
    place = Path(out).with_suffix("")
    learner.save(place / "policy", place / "state", tokens)

    # What was saved continues as what stayed up does.
    fresh = recipe.learner()
    fresh.load(place / "policy", place / "state", seed=1)
    for name, goes_on in (("unbroken", learner), ("resumed", fresh)):
        Update(recipe.objective(table)).step(goes_on, everything)
        goes_on.save(place / name / "policy", place / name / "state", tokens)
    found["resumes"] = weights_digest(place / "unbroken" / "policy") == weights_digest(place / "resumed" / "policy")
    if learner.world.is_main:
        torch.save(found, out)


main()
