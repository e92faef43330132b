"""The loop on split devices: step time with and without a lag, beside the larger of its two halves.

    python benchmarks/loop_gpu.py --generate 0-1 --train 2-3
    python benchmarks/loop_gpu.py --generate 0 --train 1 --trained lora --lags 1 --steps 6
    python benchmarks/loop_gpu.py --shape tiny --generate cpu --train cpu --steps 3      # tries the script

For each way of training (`lora` under ZeRO-2, `full` under ZeRO-3) servers are started once; each lag is a run of its
own, which meets them. The model has Qwen2.5-1.5B's shape and random weights, so its reward is the parity of what it
wrote: half of the attempts, whatever it learns. `--shape starter` is the quickstart on the policy that
ships, which learns.

One JSON line a figure: `skyrl plan`'s estimates, each run's median step after the second (seconds in all, of rollout,
of training, waited, of sync; tokens per second; gap of log-probs), and memory in use at the end.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rollout_gpu import make_model

from nanoskyrl.stages.gpus import gpus_of

SKYRL = [sys.executable, "-m", "nanoskyrl_cli.main"]
STRATEGIES = {"lora": "zero2", "full": "zero3"}
WARM = 2
"""Steps that are left out: servers, trainer and kernels come up in them."""


def parity(trajectory: Any) -> float:
    """Reward half of all attempts."""
    return float(sum(trajectory.response_ids) % 2)


def say(what: str, **values: Any) -> None:
    """Print a line of figures."""
    print(json.dumps({"what": what, **{k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}}))
    sys.stdout.flush()


def settings(args: argparse.Namespace, trained: str) -> list[str]:
    """Return what every command of a run is told."""
    large = args.shape != "starter"
    rank = {"full": 0, "lora": 32}[trained]
    found = {
        "rollout.engine": "vllm", "loop.eval_every": 0, "train.lora_rank": rank, "vllm.lora_rank": rank,
        "vllm.self_test": 0, "train.strategy": STRATEGIES[trained] if args.train != "cpu" else "auto",
    }  # fmt: skip
    if large:
        found |= {
            "score.rewards": '{"loop_gpu:parity"=1.0}', "train.lr": 1e-5, "vllm.max_model_len": 2048,
            "rollout.train_batch_size": args.prompts, "rollout.n_samples_per_prompt": args.samples,
            "rollout.max_generate_length": args.new_tokens, "train.compile": str(args.compile).lower(),
        }  # fmt: skip
    if args.generate == "cpu":
        found |= {"vllm.kv_cache_gib": 0.25, "vllm.max_num_seqs": 64}
    return [word for name, value in found.items() for word in ("--set", f"{name}={value}")]


def command(*words: str, seconds: float, log: Path) -> str:
    """Run a command of skyrl and return what it prints.

    Raises:
        RuntimeError: it failed.
    """
    with log.open("ab") as errors:
        done = subprocess.run([*SKYRL, *words], stdout=subprocess.PIPE, stderr=errors, timeout=seconds, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{words[0]} ended with {done.returncode}: {log.read_bytes()[-800:].decode(errors='replace')}"
        )
    return done.stdout.decode()


def memory_used() -> list[int]:
    """Return MiB in use on each GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]


def figures(run: Path) -> dict[str, Any]:
    """Return the medians of a run's steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_stage = {stage: [x for x in lines if x["stage"] == stage and (x["step"] or 0) >= WARM] for stage in (
        "rollout", "score", "train", "sync", "loop",
    )}  # fmt: skip

    def median(stage: str, key: str) -> float | None:
        values = [line[key] for line in by_stage[stage] if line.get(key) is not None]
        return statistics.median(values) if values else None

    generate, train, whole = (median(stage, "timing/total") or 0.0 for stage in ("rollout", "train", "loop"))
    rewards = [line["reward/avg_raw_reward"] for line in lines if line["stage"] == "score"]
    return {
        "steps_counted": len(by_stage["loop"]), "seconds": whole, "seconds_rollout": generate, "seconds_train": train,
        "against_larger_half": whole / max(generate, train, 1e-9),
        "seconds_waited": median("loop", "timing/waited_for_training"),
        "seconds_sync": median("sync", "timing/total"),
        "response_tokens": median("rollout", "rollout/response_tokens/total"),
        "train_tokens_per_second": median("train", "train/tokens_per_second"),
        "train_peak_gib": (median("train", "train/peak_memory_bytes") or 0) / (1 << 30),
        "logprob_gap": median("train", "policy/rollout_train_logprobs_abs_diff_mean"),
        "grad_norm": median("train", "train/grad_norm"), "reward_first": rewards[0], "reward_last": rewards[-1],
    }  # fmt: skip


def measure(args: argparse.Namespace, policy: str, trained: str, place: Path) -> None:
    """Serve once, run each lag, and print."""
    told = settings(args, trained)
    log = place / f"{trained}.log"
    begin = ["--policy", policy] if args.shape != "starter" else []
    halves = ["--gpus-generate", args.generate, "--gpus-train", args.train]
    planned = json.loads(
        command(
            "plan", *begin, *halves, "--lag", "1", "--json", "--run", str(place / "plan"), *told, seconds=60, log=log
        )
    )
    say("plan", trained=trained, **{k: v for k, v in planned.items() if ":" in k or "memory" in k or k == "placement"})
    served = place / f"{trained}-served"
    began = time.perf_counter()
    with log.open("ab") as out:
        serving = [*SKYRL, "serve", *begin, "--gpus", args.generate, "--run", str(served), *told]
        server = subprocess.Popen(serving, stdout=out, stderr=out)
    try:
        while not (served / "servers.json").is_file():
            if server.poll() is not None or time.perf_counter() - began > args.limit:
                raise RuntimeError(f"no servers: {log.read_bytes()[-800:].decode(errors='replace')}")
            time.sleep(0.2)
        say("serve", trained=trained, seconds=time.perf_counter() - began)
        for lag in map(int, args.lags.split(",")):
            run = place / f"{trained}-lag{lag}"
            run.mkdir()
            shutil.copyfile(served / "servers.json", run / "servers.json")
            preset = [] if begin else ["--preset", "quickstart"]
            began = time.perf_counter()
            words = [*begin, *preset, *halves, "--lag", str(lag), "--steps", str(args.steps), "--run", str(run), *told]
            command("loop", *words, seconds=args.limit, log=log)
            elapsed = time.perf_counter() - began
            say("loop", trained=trained, lag=lag, whole_seconds=elapsed, memory_used_mib=memory_used(), **figures(run))
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Run what was asked for; a failure is printed, and the rest goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generate", default="0", help="GPUs of the servers: 0-1, or cpu")
    parser.add_argument("--train", default="1", help="GPUs of the trainer: 2-3, or cpu")
    parser.add_argument("--shape", default="qwen1.5b", choices=("qwen1.5b", "tiny", "starter"))
    parser.add_argument("--trained", default="lora,full")
    parser.add_argument("--lags", default="1,0")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--compile", action="store_true", help="train.compile")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for one command")
    parser.add_argument("--place", type=Path, default=None, help="where models and runs go; default: in memory")
    args = parser.parse_args()
    if args.shape == "tiny":
        args.prompts, args.samples, args.new_tokens = 4, 8, 32
    for name in ("generate", "train"):
        gpus_of(name, getattr(args, name))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    memory = Path("/dev/shm")
    place = args.place or Path(tempfile.mkdtemp(prefix="nanoskyrl-loop-", dir=memory if memory.is_dir() else None))
    place.mkdir(parents=True, exist_ok=True)
    policy = "starter" if args.shape == "starter" else str(make_model(args.shape, place))
    for trained in args.trained.split(","):
        try:
            measure(args, policy, trained, place)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            say("failed", trained=trained, error=str(error)[-700:])


if __name__ == "__main__":
    main()
