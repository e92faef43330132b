"""What algorithms learn from rollouts of an older policy: over tasks, lags, variants and seeds.

Each run is a loop of a preset in float32: sampled success on the same held-out tasks before and
after, the curve of what was sampled on the way, the largest ratio, and the smallest effective
sample size. Runs that are there already are read, not made again.

python benchmarks/learning.py --out runs/learning                           one run after another, on two cores
python benchmarks/learning.py --out runs/stale --algos grpo,sapo --lags 0,1,4 --variants plain,default \
    --small --threads 1                                                     a quarter of the rows: half a minute a run
python benchmarks/learning.py --out runs/stale --device cuda --side-by-side 26 --tasks sums,tool_use \
    --lags 0,1,4 --variants plain,default                                   the table of docs/offpolicy.md, on one GPU

`--side-by-side N` is N processes that take one run after another: torch is loaded and the GPU opened N times, not
once a run. A variant of one's own: `--variant 'lr/4: train.lr=5e-5'`. Writes results.jsonl, table.md and
curves-TASK.svg under --out.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # a worker process looks for this module's neighbours, too

from learning_table import curves, table

TASKS: dict[str, tuple[str, list[str]]] = {
    "sums": ("quickstart", []),
    "tool_use": ("tool_use", []),
    "subtraction": ("quickstart", ["text_math.family=subtraction"]),
}
"""Preset, and what is set besides. At lag 0 thirty steps of subtraction are not enough to solve it."""
SETTINGS = {"dapo": ["rollout.max_sample_batches=4"]}
"""DAPO's rounds are capped: once nearly all is solved, few groups have spread."""
SMALL = ["rollout.train_batch_size=16", "rollout.n_samples_per_prompt=8", "eval.limit=512"]
"""A quarter of the presets' rows: noisier gradients, and the same question."""
TIS = ["advantage.old_logprobs=recompute", "off_policy.weight=token", "off_policy.cap=2"]
VARIANTS: dict[str, list[str]] = {
    "default": [],
    "plain": ["run.lag_defaults=false"],
    "tis": ["run.lag_defaults=false", *TIS],
    "once": ["run.lag_defaults=false", "train.update_epochs_per_batch=1"],
    "lr/4": ["run.lag_defaults=false", "train.lr=5e-5"],
}
"""What is set besides: nothing; the published recipe at any lag; and what can be tried beside it."""


@dataclass(frozen=True)
class Job:
    """One run."""

    task: str
    algo: str
    lag: int
    variant: str
    seed: int
    steps: int
    device: str
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"{self.task}-{self.algo}-lag{self.lag}-{self.variant.replace('/', '_')}-seed{self.seed}"


@dataclass
class Result:
    """What a run came to; lists have an entry a step."""

    task: str
    algo: str
    lag: int
    variant: str
    seed: int
    seconds: float = 0.0
    error: str | None = None
    before: float = float("nan")
    after: float = float("nan")
    curve: list[float] = field(default_factory=list)
    """Success of what was sampled."""
    seconds_at: list[float] = field(default_factory=list)
    """Since the loop began, when each step was trained."""
    ratio_max: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    ess: list[float | None] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)
    """Clipped, or let through by the gate."""
    optimizer_steps: int = 0
    signs: list[int] = field(default_factory=list)
    """Steps at which the loop reported a collapse."""


def settings_of(job: Job) -> dict[str, dict[str, Any]]:
    """Return the tables that a run is made with."""
    from nanoskyrl.stages.core.config import merge, parse_set
    from nanoskyrl.stages.looking.catalogue import preset_settings

    preset, besides = TASKS[job.task]
    fixed = {
        "run": {"lag": job.lag, "seed": job.seed},
        "train": {"algo": job.algo, "device": job.device, "dtype": "float32"},
        "hf": {"device": job.device, "dtype": "float32"},
        "loop": {"steps": job.steps, "eval_every": job.steps, "keep_states": 1},
    }
    words = (*besides, *SETTINGS.get(job.algo, ()), *job.settings)
    return merge(preset_settings(preset), fixed, *map(parse_set, words))


def run(out: Path, job: Job) -> Result:
    """Train, or resume what an earlier call left, and return the numbers of the run."""
    from nanoskyrl.stages.running.interface import open_run

    began, place = time.perf_counter(), out / job.name
    result = Result(job.task, job.algo, job.lag, job.variant, job.seed)
    try:
        with open_run(place, settings_of(job), lasts=True) as opened:
            opened.loop()
        return read(place, result)
    except Exception as error:  # one failed run is a line of the table
        result.error = f"{type(error).__name__}: {error}"
        return result
    finally:
        result.seconds = time.perf_counter() - began


def read(place: Path, result: Result) -> Result:
    """Fill in the numbers of a run from what it logged."""
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    successes = [
        value
        for line in lines
        if line["stage"] == "eval"
        for name, value in line.items()
        if name.startswith("eval/") and name.endswith("/success")
    ]
    trained = [line for line in lines if line["stage"] == "train"]
    share = next((name for name in ("policy/clip_ratio", "policy/gate") if trained and name in trained[0]), None)
    ends = [line["time"] for line in trained]
    started = next((line["time"] for line in lines if line["stage"] == "startup"), 0.0)
    result.before, result.after = successes[0], successes[-1]
    result.curve = [line["reward/success"] for line in lines if line["stage"] == "score"]
    result.seconds_at = [end - started for end in ends]
    result.ratio_max = [line["train/ratio/max"] for line in trained]
    result.kl = [line["policy/ppo_kl"] for line in trained]
    result.ess = [line.get("policy/effective_sample_share") for line in trained]
    result.entropy = [line["policy/policy_entropy"] for line in trained]
    result.share = [line[share] for line in trained] if share else []
    result.optimizer_steps = sum(line["train/optimizer_steps"] for line in trained)
    result.signs = [line["step"] for line in lines if line["stage"] == "collapse"]
    return result


def recipes_of(named: str, given: list[str]) -> dict[str, list[str]]:
    """Return what is set in each variant: of those named here, and of those given as `NAME: table.key=value ...`."""
    own = {name.strip(): words.split() for name, _, words in (text.partition(":") for text in given)}
    return {name: VARIANTS[name] for name in named.split(",") if name} | own


def jobs_of(asked: argparse.Namespace) -> list[Job]:
    """Return the runs asked for; those of lag 0 once, for there no variant of the defaults differs."""
    variants, small = recipes_of(asked.variants, asked.variant), SMALL if asked.small else []
    return [
        Job(task, algo, lag, variant, seed, asked.steps, asked.device, (*small, *variants[variant], *asked.set))
        for seed in map(int, asked.seeds.split(","))
        for task in asked.tasks.split(",")
        for algo in asked.algos.split(",")
        for lag in map(int, asked.lags.split(","))
        for variant in (variants if lag else [next(iter(variants))])
    ]


def results(out: Path, jobs: list[Job], side_by_side: int, threads: int) -> Iterator[Result]:
    """Yield the runs as they end, from so many processes side by side that each take one after another."""
    limits = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.update(limits)  # before a worker loads torch
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(side_by_side, len(jobs)), mp_context=context) as pool:
        for future in concurrent.futures.as_completed([pool.submit(run, out, job) for job in jobs]):
            yield future.result()


def write(out: Path, found: Iterable[Result], steps: int) -> str:
    """Write table and curves, and return the table."""
    lines = [asdict(result) for result in found]
    text = table(lines, steps)
    (out / "table.md").write_text(text + "\n")
    for task in dict.fromkeys(line["task"] for line in lines):
        curves([line for line in lines if line["task"] == task and not line["error"]], out / f"curves-{task}.svg")
    return text


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", default="sums", help=", ".join(TASKS))
    parser.add_argument("--algos", default="ppo,grpo,sapo,gspo,dapo,cispo")
    parser.add_argument("--lags", default="0,1,4")
    parser.add_argument("--variants", default="default", help=", ".join(VARIANTS))
    parser.add_argument("--variant", action="append", default=[], help="NAME: table.key=value ...")
    parser.add_argument("--set", action="append", default=[], help="table.key=value, for every run")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="a quarter of the rows")
    parser.add_argument("--side-by-side", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    asked = parser.parse_args()
    jobs, found, began = jobs_of(asked), list[Result](), time.perf_counter()
    asked.out.mkdir(parents=True, exist_ok=True)
    with (asked.out / "results.jsonl").open("w") as file:
        for result in results(asked.out, jobs, asked.side_by_side, asked.threads):
            found.append(result)
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            print(
                f"{result.task} {result.algo} lag {result.lag} {result.variant} seed {result.seed}: "
                + (result.error or f"{result.before:.3f} -> {result.after:.3f}, {result.seconds:.0f} s"),
                flush=True,
            )
    order = {(j.task, j.algo, j.lag, j.variant, j.seed): place for place, j in enumerate(jobs)}
    found.sort(key=lambda r: order[r.task, r.algo, r.lag, r.variant, r.seed])
    print(
        f"\n{asked.device}, {os.cpu_count()} cores, {asked.side_by_side} side by side, {asked.threads} threads each, "
        f"{time.perf_counter() - began:.0f} s; a run {mean(r.seconds for r in found):.0f} s\n"
    )
    print(write(asked.out, found, asked.steps))


if __name__ == "__main__":
    main()
