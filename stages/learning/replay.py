"""Updates made again, for the optimizer's state that they left and that is not there.

Every update's rows and settings lie on disk. From the newest state that was kept, the same updates give the same
state, on a CPU to the last bit; on a GPU as far as its own sums repeat. The policy is never made again: it was written.
A state that was on its way when its trainer was killed is put in its place, if it is the same.
"""

import tempfile
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path

from nanoskyrl.stages.core.config import stage_config
from nanoskyrl.stages.core.digests import cached_digest, derive_seed
from nanoskyrl.stages.core.errors import InputError, Notice
from nanoskyrl.stages.core.manifest import Manifest, read_manifest
from nanoskyrl.stages.core.runs import Trained, has_state, state_digests
from nanoskyrl.stages.core.storage import TEMPORARY, is_local, remove_tree, sync_directory, write_errors
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.recipe import Recipe, recipe_of
from nanoskyrl.stages.learning.update import Update, old_logprobs_of
from nanoskyrl.stages.learning.update_inputs import open_sources
from nanoskyrl.stages.models.policy import policy_digest


def scratch_of(since: Sequence[Trained]) -> AbstractContextManager[str]:
    """Return a folder for states that are made again: where the last belongs, for it may be large."""
    last = since[-1].output
    if not is_local(last):
        return tempfile.TemporaryDirectory(prefix="nanoskyrl-")
    for left in last.glob(f"state*{TEMPORARY}"):  # by a trainer that was killed
        remove_tree(left)
    return tempfile.TemporaryDirectory(dir=last, prefix="state-", suffix=TEMPORARY)


def remade_state(since: Sequence[Trained], scratch: Path, learner: Learner) -> Path:
    """Write the state that the last of these updates left, and return where.

    Args:
        since: Each starts from what the one before left; the first from a state that is there, or afresh.
        scratch: An empty directory, by `scratch_of`.
        learner: Makes those of its own settings; what it holds is lost.

    Raises:
        InputError: what one of them learnt from is gone, or another now.
    """
    state, digests = since[0].state, dict[str, str]()
    if state is not None:
        check_state(state)
    for number, (settings, updates) in enumerate(groupby(since, key=lambda made: _manifest(made).settings)):
        recipe = recipe_of(stage_config(settings, "train", device=learner.config.device), settings)
        same = (recipe.optimizer, recipe.critic) == (learner.config, learner.critic_config)
        maker, seed = learner if same else recipe.learner(), settings["seed"]
        for place, made in enumerate(updates):
            if not place:
                _refuse_another(made, policy_digest(made.policy) != _manifest(made).policy)
                maker.load(made.policy, state, seed=derive_seed(seed, "adapters") % 2**32)
            _make(made, recipe, maker, seed)
        state = scratch / str(number)
        digests = maker.save_state(state)
    assert state is not None
    last = since[-1].output
    recorded = state_digests(last)
    if recorded == digests and is_local(last):
        if learner.world.is_main:
            with write_errors(last / "state"):
                remove_tree(last / "state")  # of which files are missing
                state.rename(last / "state")
                sync_directory(last)
        return last / "state"
    if recorded and learner.world.is_main:
        warnings.warn(
            Notice(f"`{last / 'state'}` was made again, and not to the last bit: sums here are not those that made it"),
            stacklevel=2,
        )
    return state


def check_state(state: Path) -> None:
    """Raise InputError if an optimizer's state is gone, or is not the one that was written."""
    if not has_state(state.parent):
        raise InputError(
            f"`{state}` has been pruned", hint="Train the newest step, or keep more with `loop.keep_states`"
        )
    for name, digest in state_digests(state.parent).items():
        if cached_digest(state / name) != digest:
            raise InputError(
                f"`{state / name}` has another digest than its manifest says",
                hint=f"Delete `{state}`: the state is then made again from the steps before",
            )


def _manifest(made: Trained) -> Manifest:
    return read_manifest(made.output, stage="train")


def _make(made: Trained, recipe: Recipe, learner: Learner, seed: int) -> None:
    """Make an update again, with a learner that holds what it started from."""
    sources = open_sources(made.advantages, recipe, made.policy)
    _refuse_another(made, not sources.digests.items() <= _manifest(made).inputs.items())
    table, _, _ = sources.read(recipe, made.policy)
    old = old_logprobs_of(table, learner, recipe.config.max_tokens_per_micro_batch) if sources.recompute else None
    Update(recipe.objective(table, old)).steps(learner, table, seed)


def _refuse_another(made: Trained, other: bool) -> None:
    if other:
        raise InputError(
            f"`{made.output}` has no state, and what it learnt from is another now",
            hint="Begin another run with its policy, or train that step again; `skyrl verify` says what changed",
        )
