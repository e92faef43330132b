"""The quickstart: its engine beside `generate`, its update beside a plain loop, and what else a step takes.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/quickstart.py                # two minutes
    OMP_WAIT_POLICY=PASSIVE python benchmarks/quickstart.py --code DIR     # another checkout of the project

DIR is a folder in which `nanoskyrl` is the other checkout, and `nanoskyrl_cli` its folder of that name.

- The engine `hf` beside transformers' `generate` at the same temperature, padded on the left, on the same 256 rows of
  the starter policy: prompts of the quickstart in groups of 16; the same filled up to 256 tokens; distinct prompts of
  made-up tokens, each to a forced length. Tokens after a row's end do not count. Ours has the log-prob of each.
- One GRPO update of the quickstart's first step (512 rows, four optimizer steps) by the learner that `train` has,
  beside a plain loop over padded rows: forward, log-softmax, gather, loss, backward, AdamW; and how far the weights of
  both are apart.
- What `skyrl loop --preset quickstart` takes from its start to the end of the first step, by itself: the least of a few
  processes; and what `timing/*` says of the steps after the first.

The two of a pair take turns; the best of several is printed, and the least processor time.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from nanoskyrl.stages.core.config import stage_config
from nanoskyrl.stages.core.metrics import latest, mean, read_metrics
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.engines.base import HfConfig, Request, SamplingParams
from nanoskyrl.stages.engines.hf import HfEngine
from nanoskyrl.stages.learning.recipe import recipe_of
from nanoskyrl.stages.learning.update import Update
from nanoskyrl.stages.learning.update_inputs import open_sources
from nanoskyrl.stages.running.run_settings import kept_settings

ROWS, LONG, MOST, VOCABULARY = 256, 256, 48, 640
Work = Callable[[], float]
"""Does what is measured, and returns how much of it there was."""


def pair(name: str, ours: Callable[[], Work], theirs: Callable[[], Work], repeats: int) -> None:
    """Let both work in turns, each once made ready, and print what they did a second and their processor time."""
    rates, processor = ([0.0, 0.0], [float("inf")] * 2)
    for repeat in range(repeats + 1):
        for place, ready in enumerate((ours, theirs)):
            work = ready()
            wall, cpu = time.perf_counter(), time.process_time()
            done = work()
            if repeat:  # the first warms up
                rates[place] = max(rates[place], done / (time.perf_counter() - wall))
                processor[place] = min(processor[place], 1e6 * (time.process_time() - cpu) / done)
    ratios = f"{rates[0] / rates[1]:8.2f}{processor[0]:10.1f}{processor[1]:10.1f}"
    print(f"{name:44}{rates[0]:9,.0f}{rates[1]:10,.0f}{ratios}", flush=True)


def looped(run: Path, steps: int) -> tuple[float, float]:
    """Run the quickstart's loop in a process of its own, and return its wall clock and its processor time."""
    words = ["loop", "--preset", "quickstart", "--steps", str(steps), "--set", "loop.eval_every=0", "--run", str(run)]
    began = time.perf_counter()
    command = [sys.executable, "-m", "nanoskyrl_cli.main", *words]
    child = subprocess.Popen(command, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(words)}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime


def engine_beside_generate(policy: Path, prompts: Sequence[list[int]], repeats: int) -> None:
    """Measure sampling by each."""
    engine = HfEngine(HfConfig(device="cpu"))
    engine.load(policy)
    stop = sorted(engine.stop_ids)
    model: Any = engine._model

    def ours(rows: Sequence[list[int]], *, forced: bool) -> Work:
        requests = [Request(prompt_ids=row, seed=seed, max_tokens=MOST) for seed, row in enumerate(rows)]
        engine._stop_ids = frozenset() if forced else frozenset(stop)
        return lambda: sum(len(found.token_ids) for found in engine.generate(requests, SamplingParams()))

    def theirs(rows: Sequence[list[int]], *, forced: bool) -> Work:
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        torch.manual_seed(0)

        def run() -> float:
            with torch.inference_mode():
                found = model.generate(
                    input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                    max_new_tokens=MOST, min_new_tokens=MOST if forced else None, eos_token_id=stop, pad_token_id=0,
                )[:, width:]  # fmt: skip
            ended = torch.isin(found, torch.tensor(stop)).cumsum(-1)
            return found.numel() if forced else float((ended.cumsum(-1) <= 1).sum())

        return run

    drawn = np.random.default_rng(0)
    distinct = [drawn.integers(VOCABULARY, size=length).tolist() for length in drawn.integers(24, 41, ROWS)]
    long = [(prompt * LONG)[-LONG:] for prompt in prompts]
    for name, rows, forced in (
        ("the quickstart's prompts", prompts, False),
        (f"prompts of {LONG} tokens, 16 rows each", long, False),
        (f"distinct prompts, {MOST} tokens each", distinct, True),
    ):
        pair(name, partial(ours, rows, forced=forced), partial(theirs, rows, forced=forced), repeats)


def plain_update(model: Any, table: pa.Table, lr: float, epochs: int) -> None:
    """Train as a script would: padded rows, whole logits, gradients of a few batches added up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    rows = table.select(["prompt_ids", "response_ids", "loss_mask", "rollout_logprobs", "advantages"]).to_pylist()
    for _ in range(epochs):
        for start in range(0, len(rows), ROWS):
            batch = rows[start : start + ROWS]
            width = max(len(row["prompt_ids"]) + len(row["response_ids"]) for row in batch)
            ids, attention = (torch.zeros(len(batch), width, dtype=torch.long) for _ in range(2))
            mask, old, advantages = (torch.zeros(len(batch), width) for _ in range(3))
            for place, row in enumerate(batch):
                begin = len(row["prompt_ids"])
                end = begin + len(row["response_ids"])
                ids[place, :end] = torch.tensor(row["prompt_ids"] + row["response_ids"])
                attention[place, :end] = 1
                mask[place, begin:end] = torch.tensor(row["loss_mask"], dtype=torch.float32)
                old[place, begin:end] = torch.tensor(row["rollout_logprobs"])
                advantages[place, begin:end] = torch.tensor(row["advantages"])
            logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            ratio, advantages, mask = (logprobs - old[:, 1:]).exp(), advantages[:, 1:], mask[:, 1:]
            objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = -((objective * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum() / len(rows)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def update_beside_plain_loop(run: Run, repeats: int) -> None:
    """Measure one update."""
    from transformers import AutoModelForCausalLM

    settings, policy = kept_settings(run), run.policy(0)
    config = stage_config(settings, "train")
    recipe = recipe_of(config, settings)
    table, _, _ = open_sources([run.stage(0, "advantage")], recipe, policy).read(recipe, policy)
    learner, held = recipe.learner(), []
    tokens = sum(recipe.objective(table).sequences.lengths) * config.update_epochs_per_batch

    def ours() -> Work:
        learner.load(policy)

        def work() -> float:
            Update(recipe.objective(table)).steps(learner, table, 0)
            return tokens

        return work

    def theirs() -> Work:
        held[:] = [AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()]

        def work() -> float:
            plain_update(held[0], table, config.lr, config.update_epochs_per_batch)
            return tokens

        return work

    pair(f"one update, {table.num_rows} rows", ours, theirs, repeats)
    start = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    mine, other, before = (
        torch.nn.utils.parameters_to_vector(of.parameters()) for of in (learner.model, held[0], start)
    )
    apart = (mine - other).abs()
    print(f"{'':8}weights apart: {apart.max():.1e} at most, {apart.mean():.1e} on average; "
          f"moved: {(mine - before).abs().mean():.1e}")  # fmt: skip


def step_by_part(run: Run, steps: int) -> None:
    """Print what a step takes besides sampling and passes."""
    lines = read_metrics(run.metrics)
    by_stage = {stage: latest(lines, stage) for stage in (*STAGES, "loop")}

    def average(stage: str, name: str) -> float:
        return mean(by_stage[stage][step].get(f"timing/{name}", 0.0) for step in range(1, steps)) or 0.0

    whole = average("loop", "total")
    print(f"\nms of a step of {1000 * whole:,.0f}; the first took {by_stage['loop'][0]['timing/total']:.1f} s")
    named = {
        f"{stage} {name.removeprefix('timing/')}": average(stage, name.removeprefix("timing/"))
        for stage in STAGES for name in by_stage[stage][1] if name.startswith("timing/") and name != "timing/total"
    }  # fmt: skip
    named["loop, besides"] = whole - sum(average(stage, "total") for stage in STAGES)
    for name, seconds in named.items():
        print(f"{name:24}{1000 * seconds:8.1f}{seconds / whole:8.1%}")
    rest = whole - named["rollout generate"] - named["train train"]
    print(f"{'neither of the two':24}{1000 * rest:8.1f}{rest / whole:8.1%}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, help="a folder in which `nanoskyrl` is another checkout")
    parser.add_argument("--repeats", type=int, default=5, help="of each of a pair (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="of the loop (%(default)s)")
    asked = parser.parse_args()
    if asked.code is not None:  # again, with the other checkout before this one
        rest = ["--repeats", str(asked.repeats), "--steps", str(asked.steps)]
        environment = {**os.environ, "PYTHONPATH": str(asked.code.resolve())}
        os.execve(sys.executable, [sys.executable, __file__, *rest], environment)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as scratch:
        starts = [looped(Path(scratch) / f"start{repeat}", 1) for repeat in range(3)]
        wall, cpu = (min(of) for of in zip(*starts, strict=True))
        print(f"a loop of one step, with its start: {wall:.1f} s, {cpu:.1f} s of processor time")
        run = Run(Path(scratch) / "run")
        looped(run.root, asked.steps)
        print(
            f"{'tokens/s, and us of all threads a token':44}{'ours':>9}{'theirs':>10}{'ratio':>8}{'us':>10}{'us':>10}"
        )
        tables = [pq.read_table(path) for path in sorted(run.stage(0, "rollout").glob("part-*.parquet"))]
        prompts = pa.concat_tables(tables).column("prompt_ids").to_pylist()[:ROWS]
        engine_beside_generate(run.policy(0), prompts, asked.repeats)
        update_beside_plain_loop(run, asked.repeats)
        step_by_part(run, asked.steps)


if __name__ == "__main__":
    main()
