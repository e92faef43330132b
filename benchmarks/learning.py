"""What each algorithm learns on the laptop preset, at lag 0 and lag 4, over seeds.

Each run is `skyrl loop --preset quickstart` in a process of its own, in float32: sampled
success on the same 1,024 held-out tasks before and after, how much was clipped or gated, and
the largest ratio. Prints a line a run as it ends, then the table of docs/algorithms.md.

python benchmarks/learning.py --out runs/learning                          one run after another, on two cores
python benchmarks/learning.py --out runs/learning --device cuda --jobs 8   eight side by side on a GPU
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

ALGOS = ("ppo", "grpo", "sapo", "gspo", "dapo")
SETTINGS = {"dapo": ["rollout.max_sample_batches=4"]}
"""DAPO's rounds are capped: once nearly all is solved, few groups have spread."""
SHARES = ("policy/clip_ratio", "policy/gate")


def run(out: Path, algo: str, lag: int, seed: int, steps: int, threads: int, device: str) -> dict[str, object]:
    """Train once, or take what an earlier call left, and return the numbers of the run."""
    place = out / f"{algo}-lag{lag}-seed{seed}"
    assignments = [
        *(
            f"{table}.{key}={value}"
            for table in ("hf", "train")
            for key, value in (("device", device), ("dtype", "float32"))
        ),
        f"loop.eval_every={steps}",
        *SETTINGS.get(algo, ()),
    ]
    command = [
        sys.executable, "-c", "from nanoskyrl_cli.main import main; main()", "loop", "--preset", "quickstart",
        "--algo", algo, "--lag", str(lag), "--seed", str(seed), "--steps", str(steps), "--run", str(place),
        *(word for assignment in assignments for word in ("--set", assignment)),
    ]  # fmt: skip
    limits = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    began = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **limits}, capture_output=True, text=True, check=False)
    found: dict[str, object] = {"algo": algo, "lag": lag, "seed": seed, "seconds": time.perf_counter() - began}
    if done.returncode:
        return {**found, "error": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    evals = {line["step"]: line["eval/text_math/success"] for line in lines if line["stage"] == "eval"}
    trained = [line for line in lines if line["stage"] == "train"]
    curve = [line["reward/success"] for line in lines if line["stage"] == "score"]
    share = next((name for name in SHARES if name in trained[0]), None)
    return {
        **found,
        "before": evals[0],
        "after": evals[steps],
        "curve": curve,
        "first": mean(curve[:1]),
        "share": mean(line[share] for line in trained) if share else None,
        "share_is": share.removeprefix("policy/") if share else None,
        "ratio_max": max(line["train/ratio/max"] for line in trained),
        "kl_max": max(line["policy/ppo_kl"] for line in trained),
        "rounds": mean(line.get("rollout/rounds", 1) for line in lines if line["stage"] == "rollout"),
    }


def table(found: list[dict[str, object]]) -> str:
    """Return the runs as a Markdown table, one line an algorithm and lag."""
    lines = [
        "| Algorithm | Lag | Before (seeds 0, 1, 2) | After 30 steps | Least rise | Clipped, or gate | Largest ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    keys = list(dict.fromkeys((str(r["algo"]), int(str(r["lag"]))) for r in found))
    for algo, lag in keys:
        runs = sorted((r for r in found if (r["algo"], r["lag"]) == (algo, lag)), key=lambda r: int(str(r["seed"])))
        good = [r for r in runs if "error" not in r]

        def of(name: str, form: str, good: list[dict[str, object]] = good) -> str:
            return ", ".join(format(r[name], form) for r in good)

        rise = min((float(str(r["after"])) - float(str(r["before"])) for r in good), default=float("nan"))
        share = f"{good[0]['share_is'].replace('_ratio', '')} {of('share', '.2%')}" if good else ""  # type: ignore[attr-defined]
        failed = f" ({len(runs) - len(good)} failed)" if len(good) < len(runs) else ""
        lines.append(
            f"| {algo}{failed} | {lag} | {of('before', '.3f')} | {of('after', '.3f')} | {rise:+.3f} | {share} | "
            f"{of('ratio_max', '.3g')} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--algos", default=",".join(ALGOS))
    parser.add_argument("--lags", default="0,4")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    asked = parser.parse_args()
    jobs = [
        (algo, int(lag), int(seed))
        for seed in asked.seeds.split(",")
        for algo in asked.algos.split(",")
        for lag in asked.lags.split(",")
    ]
    found = []
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        futures = [pool.submit(run, asked.out, *job, asked.steps, asked.threads, asked.device) for job in jobs]
        for future in concurrent.futures.as_completed(futures):
            found.append(future.result())
            print(json.dumps(found[-1]), flush=True)
    order = {job: place for place, job in enumerate(jobs)}
    found.sort(key=lambda r: order[(str(r["algo"]), int(str(r["lag"])), int(str(r["seed"])))])
    print(f"\n{asked.device}, {os.cpu_count()} cores, {asked.jobs} runs side by side, {asked.threads} threads each\n")
    print(table(found))


if __name__ == "__main__":
    main()
