"""Outputs of a run made again from their own inputs, and compared byte for byte.

Score, advantage and stages of somebody's own always; rollout on engines that repeat their bytes, train on the CPU.
Each is made from what the run holds, under the settings of its manifest; files, places and commands are those of
run.toml. An optimizer's state that was pruned is made again, too: training follows from the first policy, or from the
last state that was kept.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoskyrl.envs.graders.verdicts import JUDGE_REWARD
from nanoskyrl.stages.core.checked import metadata_of
from nanoskyrl.stages.core.config import Settings, config_class, known_keys, plugin_config, stage_config, to_plain
from nanoskyrl.stages.core.errors import InputError, NanoskyrlError
from nanoskyrl.stages.core.manifest import Manifest
from nanoskyrl.stages.core.own_stage import run_own
from nanoskyrl.stages.core.pipeline import OURS, pipeline
from nanoskyrl.stages.core.runs import Run, RunConfig
from nanoskyrl.stages.core.storage import remove_tree
from nanoskyrl.stages.engines.base import make_engine
from nanoskyrl.stages.looking.proof.differences import difference
from nanoskyrl.stages.looking.proof.links import RunChain, parent_of
from nanoskyrl.stages.looking.proof.named_code import named_code

REPEATING = ("hf", "scripted")
"""Engines that give the same bytes again, on the same machine."""
ON_CPU = ("hf", "train")
"""Tables whose `device` is the CPU here: elsewhere bytes do not repeat."""


class NotMadeAgain(Exception):
    """Why an output is left as it is: no fault of the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """What is made again, and who is asked and told."""

    stage: str | None = None
    """None: all of them."""
    allow: Callable[[list[str]], None] = lambda code: None
    """Given the code that the run names, before any of it runs; raises where it must not."""
    begins: Callable[[int, str], None] = lambda step, stage: None


def make_again(chain: RunChain, rerun: Rerun, kept: Settings, steps: Iterable[int] | None = None) -> None:
    """Make outputs of a run again, and add to its findings what is equal and what is not.

    Args:
        chain: The run, whose manifests have been read.
        rerun: What is made again.
        kept: Settings of the run.
        steps: Whose; None: of all.

    Raises:
        InputError: there is no such stage in the run.
        NanoskyrlError: `rerun.allow` refuses.
    """
    made = [stage for step in chain.run.steps() for stage in chain.run.made(step) if stage != "sync"]
    if rerun.stage is not None and rerun.stage not in made:
        raise InputError(
            f"`{chain.run.root}` has no `{rerun.stage}` that can be made again",
            hint=f"Name one of {', '.join(dict.fromkeys(made)) or 'its stages'}",
        )
    rerun.allow(named_code(chain.manifests.values(), kept))
    # On the disk of the temporary folder: a run's files are all accounted for.
    with tempfile.TemporaryDirectory(prefix="nanoskyrl-rerun-") as scratch:
        work = _Work(chain, kept, Run(Path(scratch)))
        for step in chain.run.steps() if steps is None else steps:
            for stage in chain.run.made(step):
                if stage in made and rerun.stage in (None, stage) and (step, stage) in chain.manifests:
                    rerun.begins(step, stage)
                    work.make(step, stage)
            remove_tree(work.scratch.step(step - 1))
        work.tell()


class _Work:
    """The outputs that are made again."""

    def __init__(self, chain: RunChain, kept: Settings, scratch: Run) -> None:
        self.chain, self.kept, self.scratch = chain, kept, scratch
        self.engines, self.learners = dict[str, Any](), dict[str, Any]()
        """By their settings: the next step has the same."""
        self.stages = pipeline(stage_config(kept, "run").stages if "run" in kept else RunConfig().stages)
        self.equal: dict[str, list[int]] = defaultdict(list)
        self.began: dict[int, str] = {}
        """What training began from, by its step."""
        self.left: dict[str, list[int]] = defaultdict(list)

    def make(self, step: int, stage: str) -> None:
        """Make one output again, compare it, and note what came of it."""
        run, manifest, findings = self.chain.run, self.chain.manifests[step, stage], self.chain.findings
        output = self.scratch.stage(step, stage)
        try:
            settings = self.settings_of(manifest)
            work = getattr(self, f"_{stage}") if stage in OURS else self._own
            found = work(step, manifest, output, settings)
        except (NotMadeAgain, NanoskyrlError) as error:
            self.left[f"{stage}: {error}"].append(step)
            return
        differs = difference(run.stage(step, stage), manifest, output, found)
        if findings.expect("outputs made again", differs is None, f"{run.stage(step, stage)}, made again: {differs}"):
            self.equal[stage].append(step)
        if stage != "train" or differs is not None:
            remove_tree(output)

    def tell(self) -> None:
        """Add to the findings what was made again, from where, and what was not."""
        for stage, steps in self.equal.items():
            begins = [self.began[step] for step in steps if step in self.began] if stage == "train" else []
            source = f", from {' and from '.join(begins)}" * bool(begins)
            self.chain.findings.made_again.append(f"{stage} of {ranges(steps)}{source}")
        self.chain.findings.left += [f"{ranges(steps)}: {why}" for why, steps in self.left.items()]

    def settings_of(self, manifest: Manifest) -> Settings:
        """Return the settings that an output was made under; what changes no row is the run's of now."""
        found: Settings = {}
        for table, keys in manifest.settings.items():
            config = config_class(table) if isinstance(keys, dict) else None
            if config is None:
                continue
            here = metadata_of(config, "place") | metadata_of(config, "file") | metadata_of(config, "command")
            kept, aside = self.kept.get(table, {}), here | metadata_of(config, "of_run")
            found[table] = known_keys(table, {key: value for key, value in keys.items() if key not in aside})
            found[table] |= {key: kept[key] for key in here & kept.keys()}
        for table in ON_CPU:
            if table in found:
                if str(found[table].get("device", "")).startswith("cuda"):
                    raise NotMadeAgain(f"`{table}.device` is {found[table]['device']}, where bytes do not repeat")
                found[table]["device"] = "cpu"
        return found

    def _source(self, step: int, manifest: Manifest) -> Path:
        parent = parent_of(manifest)
        assert parent is not None
        if (step, parent) not in self.chain.manifests:
            raise NotMadeAgain(f"its `{parent}` is gone")
        return self.chain.run.stage(step, parent)

    def _policy(self, digest: str | None) -> Path:
        """Return the policy of the run that has this digest."""
        found = next((version for version, of in self.chain.policies.items() if of == digest), None)
        if found is None:
            raise NotMadeAgain("a policy that it was made with is not in this run")
        return self.chain.run.policy(found)

    def _rollout(self, step: int, manifest: Manifest, output: Path, settings: Settings) -> Manifest:
        from nanoskyrl.stages.rollout import rollout

        # Those that come from the run, and that no table can set.
        of_run = {key: manifest.settings["rollout"][key] for key in ("seed", "step")}
        config = stage_config(settings, "rollout", **of_run)
        if config.engine not in REPEATING:
            raise NotMadeAgain(f"the engine `{config.engine}` does not repeat its bytes")
        _refuse_judge(settings, config.dynamic_sampling)
        engine_config = plugin_config(settings, "engine", config.engine)
        key = f"{config.engine} {json.dumps(to_plain(engine_config))}"
        if key not in self.engines:
            self.engines[key] = make_engine(config.engine, engine_config)
        policy = None if manifest.policy is None else self._policy(manifest.policy)
        return rollout(policy, output, config, settings=settings, engine=self.engines[key])

    def _score(self, step: int, manifest: Manifest, output: Path, settings: Settings) -> Manifest:
        from nanoskyrl.stages.score import score

        _refuse_judge(settings, True)
        return score(self._source(step, manifest), output, stage_config(settings, "score"), settings=settings)

    def _own(self, step: int, manifest: Manifest, output: Path, settings: Settings) -> Manifest:
        if manifest.stage not in self.stages:
            raise NotMadeAgain("`run.stages` does not name it any more")
        record = self.stages[manifest.stage]
        config = plugin_config(settings, "stage", record.command)
        return run_own(record, self._source(step, manifest), output, config)

    def _advantage(self, step: int, manifest: Manifest, output: Path, settings: Settings) -> Manifest:
        from nanoskyrl.stages.advantage import advantage, needs_models

        config, given = stage_config(settings, "advantage"), {}
        if needs_models(config):
            from nanoskyrl.stages.learning.model_columns import Passes

            trained = self.chain.manifests.get((step, "train"))
            if trained is None:
                raise NotMadeAgain("its step has no `train`, whose settings say how models pass over it")
            given["passes"] = Passes(self._learner(self.settings_of(trained)))
            given["policy"] = self.chain.run.policy(step)
            given["reference"] = self._policy(manifest.inputs["reference"]) if "reference" in manifest.inputs else None
        if "previous" in manifest.inputs:
            given["previous"] = self.chain.run.stage(step - 1, "advantage")
        return advantage(self._source(step, manifest), output, config, **given)

    def _train(self, step: int, manifest: Manifest, output: Path, settings: Settings) -> Manifest:
        from nanoskyrl.stages.train import train

        if processes := manifest.settings.get("processes"):
            raise NotMadeAgain(f"{processes} processes trained together")
        places = self.chain.sources_of(manifest)
        sources = [self.chain.run.stage(*place) for _, place in sorted(places.items(), key=_number) if place]
        if len(sources) < len(places) or not sources:
            raise NotMadeAgain("advantages that it was given are not in this run")
        return train(
            sources, output, stage_config(settings, "train"), policy=self._policy(manifest.policy),
            state=self._state(step) if "state" in manifest.inputs else self._first(step), settings=settings,
            seed=manifest.settings["seed"], engine=self._learner(settings),
        )  # fmt: skip

    def _first(self, step: int) -> None:
        self.began[step] = f"{self.chain.run.policy(step)}"

    def _state(self, step: int) -> Path:
        """Return the optimizer's state before a step: as it was made again, else as it was kept."""
        again, kept = (run.stage(step - 1, "train") / "state" for run in (self.scratch, self.chain.run))
        if again.is_dir():
            return again
        if not kept.is_dir():
            raise NotMadeAgain("the optimizer's state before it was pruned, and could not be made again")
        self.began[step] = f"the state that step {step - 1} left"
        return kept

    def _learner(self, settings: Settings) -> Any:
        from nanoskyrl.stages.learning.recipe import recipe_of

        key = json.dumps({table: settings[table] for table in sorted(settings)}, default=str)
        if key not in self.learners:
            self.learners = {key: recipe_of(stage_config(settings, "train"), settings).learner()}
        return self.learners[key]


def _refuse_judge(settings: Settings, judges: bool | None) -> None:
    if judges and JUDGE_REWARD in settings.get("score", {}).get("rewards", {}):
        raise NotMadeAgain("a model judged it, which does not repeat its verdicts")


def _number(named: tuple[str, Any]) -> int:
    """Return the place of an input among several: `advantage.2` is the third."""
    return int(named[0].partition(".")[2] or 0)


def ranges(steps: list[int]) -> str:
    """Return steps in words: `steps 0 to 3, 5`."""
    found: list[list[int]] = []
    for step in sorted(steps):
        if found and found[-1][1] == step - 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    words = [f"{first} to {last}" if last > first else str(first) for first, last in found]
    return f"step{'s' * (len(steps) > 1)} {', '.join(words)}"
