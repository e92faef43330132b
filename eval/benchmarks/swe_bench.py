"""SWE-bench Verified and Multilingual: real issues, solved by a patch (arXiv 2310.06770).

Where the repository is at hand an agent works in a checkout inside the sandbox, with shell
and edits; else the patch is asked for in one reply. Only the official harness in Docker
says whether an issue is resolved: without it patches are written as predictions and
checked, no rate is given, and the summary says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from nanoskyrl.envs.actions import TOOL_CALL, TOOL_CALL_END
from nanoskyrl.envs.base import Episode, Score, Task
from nanoskyrl.envs.graders.kinds import ANSWERED
from nanoskyrl.envs.mixture import EpisodeOfTask
from nanoskyrl.eval.base import BenchConfig, Benchmark, OneReply, Scored
from nanoskyrl.eval.benchmarks import swe_harness
from nanoskyrl.eval.benchmarks.checkout import SUBMIT, CheckoutEpisode
from nanoskyrl.eval.benchmarks.patches import applies, parses, patch_in, predictions, tidy
from nanoskyrl.eval.rows import Hub, Row
from nanoskyrl.stages.core.checked import PATH, PLACE, PositiveInt
from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.core.rows import to_json
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl.stages.core.trajectory import Trajectory

PREDICTIONS = "predictions.jsonl"


@dataclass(frozen=True, kw_only=True)
class SweBenchConfig(BenchConfig):
    """Where the repositories are, and who says what is resolved."""

    table: ClassVar[str] = "swe_bench_verified"
    repositories: str | None = field(default=None, metadata=PLACE | PATH)
    """A folder of git repositories named ORG__NAME, or by instance id, that have the base commits."""
    harness: Literal["auto", "docker", "never"] = "auto"
    """The official harness: docker (refuse to begin without), never, or auto (where Docker runs)."""
    harness_seconds: int = field(default=1800, metadata=PLACE)
    """How long one instance's tests may take."""
    turns: PositiveInt = 50
    """Turns of an agent in a checkout."""
    model_name: str = "nanoskyrl"
    """`model_name_or_path` of the predictions."""


class SweBenchVerified(Benchmark):
    """500 issues of Python projects that people have checked."""

    Config = SweBenchConfig
    name = "swe_bench_verified"
    hub = Hub(name="SWE-bench/SWE-bench_Verified")
    columns = (
        "repo", "instance_id", "base_commit", "patch", "test_patch", "problem_statement", "FAIL_TO_PASS",
        "PASS_TO_PASS",
    )  # fmt: skip
    metric = "resolved"
    workers = 4
    max_generate_length = 4096

    def __init__(self, config: SweBenchConfig) -> None:
        """Find out whether the harness can run.

        Raises:
            EngineError: `harness=docker` where it cannot.
        """
        super().__init__(config)
        if config.harness == "docker":
            swe_harness.require_docker()
        self.no_harness = "harness=never" if config.harness == "never" else swe_harness.why_not_docker()

    @property
    def max_turns(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """One reply, or an agent's turns where there are repositories."""
        return self.config.turns if self.config.repositories else 1

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks; what the harness would refuse comes before anything is generated."""
        if self.no_harness is None:
            for row in self.rows:
                swe_harness.check_layout(row)
        return super().tasks(split)

    def pose(self, row: Row, index: int) -> Task:
        """Return a row's issue; both column layouts are read."""
        name = str(row["instance_id"])
        lists = {key: swe_harness.as_list(row[key]) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        if not lists["FAIL_TO_PASS"]:
            raise ValueError(f"{name} has no test that should pass")
        at_hand = self.repository(row) is not None
        how = (
            "You are in a checkout of the repository. Find the cause, change the code, and check it; the tests that "
            "will be run are not there yet. Then call `submit`."
            if at_hand
            else "The repository is not at hand. Reply with one unified diff, as of `git diff`, in a fenced block "
            "marked diff, with paths from the repository's root."
        )
        text = f"Solve this issue of {row['repo']}.\n\n{row['problem_statement']}\n\n{how}"
        return Task(
            task_id=name, split="test", prompt=str(row["problem_statement"]), ground_truth=str(row["patch"]),
            messages=({"role": "user", "content": self.asked(str(row["problem_statement"]), text)},),
            metadata={
                "repo": str(row["repo"]), "base_commit": str(row["base_commit"]), "agent": at_hand, "model_patch": "",
            },
        )  # fmt: skip

    def repository(self, row: Mapping[str, Any]) -> Path | None:
        """Return the repository of a row, if it is at hand."""
        if self.config.repositories is None:
            return None
        folder = Path(str(as_path(self.config.repositories)))
        names = (str(row.get("instance_id", row.get("task_id"))), str(row["repo"]).replace("/", "__"))
        # A name with a slash would lead out of the folder.
        return next((folder / name for name in names if Path(name).name == name and (folder / name).is_dir()), None)

    def start(self) -> Episode:
        """Return an episode that is an agent's or one reply, as the task turns out."""
        return EpisodeOfTask(self._episode_of)

    def _episode_of(self, task: Task) -> Episode:
        """Return one in a checkout where the repository is at hand, else one reply."""
        repository = self.repository({**task.metadata, "instance_id": task.task_id})
        return OneReply() if repository is None else CheckoutEpisode(repository, task.metadata["base_commit"])

    def expert(self, task: Task) -> list[str]:
        """Apply the gold patch with the shell, or write it down."""
        if not task.metadata["agent"]:
            return [f"The cause is found.\n\n```diff\n{tidy(task.ground_truth)}```"]
        command = f"git apply - <<'END_OF_PATCH'\n{tidy(task.ground_truth)}END_OF_PATCH\n"
        calls = (("bash", {"command": command}), (SUBMIT, {}))
        return [f"{TOOL_CALL}{to_json({'name': name, 'arguments': args})}{TOOL_CALL_END}" for name, args in calls]

    def score(self, trajectory: Trajectory) -> Score:
        """Check the patch; run the harness on it, where it can run. Without, resolved is not known."""
        metadata, patch = trajectory.metadata, self.patch_of(trajectory)
        if not patch:
            known = self.no_harness is None
            parts: dict[str, float | None] = {ANSWERED: 0.0, "patch_empty": 1.0}
            # Resolved by nothing, for sure; but a rate over the empty ones alone would say nothing of the others.
            return Score(reward=0.0 if known else None, success=False if known else None, parts=parts)
        whole = parses(patch)
        repository = self.repository({**metadata, "instance_id": trajectory.task_id})
        fits = float(applies(patch, repository, metadata["base_commit"])) if repository is not None else None
        parts = {ANSWERED: 1.0, "patch_empty": 0.0, "patch_parses": float(whole), "patch_applies": fits}
        if self.no_harness is not None:
            return Score(reward=None, parts=parts)
        row = next(row for row in self.rows if row["instance_id"] == trajectory.task_id)
        found = swe_harness.evaluate_patch(row, patch, self.config.model_name, self.config.harness_seconds)
        return Score(reward=float(found["resolved"]), success=bool(found["resolved"]), parts=parts)

    def metrics(self, rows: Sequence[Scored]) -> dict[str, Any]:
        """Return what was found out about the patches; no rate without the harness."""
        known = {name: [v for row in rows if (v := row.parts.get(name)) is not None] for name in PARTS}
        numbers: dict[str, Any] = {
            f"{name}_count": int(sum(values)) if values else None for name, values in known.items()
        }
        numbers["patch_applies_checked"] = len(known["patch_applies"])
        if self.no_harness is not None:
            numbers["note"] = (
                f"not run: the official harness ({self.no_harness}); run: writing predictions, parsing, and "
                f"`git apply --check` of {len(known['patch_applies'])}. No resolve rate."
            )
        return numbers

    def files(self, rows: Iterable[Trajectory]) -> dict[str, bytes]:
        """Return the predictions, a file for each sample."""
        found = grouped((row.sample, (row.task_id, self.patch_of(row))) for row in rows)
        return {
            PREDICTIONS if sample == 0 else f"predictions-{sample}.jsonl": predictions(each, self.config.model_name)
            for sample, each in sorted(found.items())
        }

    def patch_of(self, row: Trajectory) -> str:
        """Return the patch of an attempt: what its checkout had become, or what its last reply holds."""
        if row.metadata.get("agent"):
            return str(row.metadata.get("model_patch") or "")
        return patch_in(self.said(row.turns[-1].action)) if row.turns else ""


PARTS = ("patch_empty", "patch_parses", "patch_applies")


class SweBenchMultilingual(SweBenchVerified):
    """300 issues in nine languages."""

    name = "swe_bench_multilingual"
    hub = Hub(name="SWE-bench/SWE-bench_Multilingual")
