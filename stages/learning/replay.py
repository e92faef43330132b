"""Updates made again, for the optimizer's state that they left and that is not there.

Every update's rows and settings lie on disk. From the newest state that was kept, the same updates give the same
state, on a CPU to the last bit; on a GPU as far as its own sums repeat. The policy is never made again: it was written.
A state that was on its way when its trainer was killed is put in its place, if it is the same.
"""

import shutil
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from nanoskyrl.stages.core.config import stage_config
from nanoskyrl.stages.core.digests import derive_seed
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import Manifest, read_manifest
from nanoskyrl.stages.core.runs import Trained
from nanoskyrl.stages.core.storage import is_local, remove_tree, sync_directory, sync_tree, write_errors
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.recipe import Recipe, recipe_of
from nanoskyrl.stages.learning.state_files import unfinished
from nanoskyrl.stages.learning.update import Update, old_logprobs_of
from nanoskyrl.stages.learning.update_inputs import open_sources


def remade_state(since: Sequence[Trained], scratch: Path, learner: Learner) -> Path:
    """Write the state that the last of these updates left, and return where.

    Args:
        since: Each starts from what the one before left; the first from a state that is there, or afresh.
        scratch: An empty directory.
        learner: Makes those of its own settings; what it holds is lost.

    Raises:
        InputError: what one of them learnt from is gone, or another now.
    """
    state, digests = since[0].state, dict[str, str]()
    for number, (settings, updates) in enumerate(groupby(since, key=lambda made: _manifest(made).settings)):
        recipe = recipe_of(stage_config(settings, "train", device=learner.config.device), settings)
        same = (recipe.optimizer, recipe.critic) == (learner.config, learner.critic_config)
        maker, seed = learner if same else recipe.learner(), settings["seed"]
        for place, made in enumerate(updates):
            if not place:
                maker.load(made.policy, state, seed=derive_seed(seed, "adapters") % 2**32)
            _make(made, recipe, maker, seed)
        state = scratch / str(number)
        digests = maker.save_state(state)
    assert state is not None
    last = since[-1].output
    recorded = {name: digest for name, digest in _manifest(since[-1]).files.items() if name.startswith("state/")}
    same = recorded == {f"state/{name}": digest for name, digest in digests.items()}
    if learner.world.is_main and is_local(last):
        remove_tree(unfinished(last / "state"))
        if same:
            _put_back(state, last / "state")
    return state


def _put_back(made: Path, state: Path) -> None:
    """Put a state where it was on its way to when its trainer was killed."""
    place = unfinished(state)
    with write_errors(state):
        shutil.copytree(made, place)
        sync_tree(place)
        place.rename(state)
        sync_directory(state.parent)


def _manifest(made: Trained) -> Manifest:
    return read_manifest(made.output, stage="train")


def _make(made: Trained, recipe: Recipe, learner: Learner, seed: int) -> None:
    """Make an update again, with a learner that holds what it started from."""
    sources = open_sources(made.advantages, recipe, made.policy)
    if not sources.digests.items() <= _manifest(made).inputs.items():
        raise InputError(
            f"`{made.output}` wrote no state, and what it learnt from is another now",
            hint="Begin another run with its policy, or train that step again",
        )
    table, _, _ = sources.read(recipe, made.policy)
    old = old_logprobs_of(table, learner, recipe.config.max_tokens_per_micro_batch) if sources.recompute else None
    Update(recipe.objective(table, old)).steps(learner, table, seed)
