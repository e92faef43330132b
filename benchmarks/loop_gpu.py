"""The loop on split devices: step time with and without a lag, beside the larger of its two halves.

    python benchmarks/loop_gpu.py --splits 0-1:2-3,0:2
    python benchmarks/loop_gpu.py --splits 0:1 --trained lora --lags 1 --steps 6
    python benchmarks/loop_gpu.py --shape tiny --splits cpu:cpu --steps 3      # tries the script

A split is GPUs that generate and GPUs that train; servers are started once on those of the first split, for each way
of training (`lora` under ZeRO-2, `full` under ZeRO-3) its own, and each split's runs meet those on its GPUs. Each lag
is a run of its own; splits after the first see the first lag alone. The model has Qwen2.5-1.5B's shape and random
weights, so its reward is the parity of what it wrote: half of the attempts, whatever it learns. `--shape starter` is
the quickstart on the policy that ships, which learns.

One JSON line a figure: `skyrl plan`'s estimates in GiB, each run's median step after the second (seconds in all, of
each stage, waited; tokens per second; gap of log-probs), and the most memory that each GPU had in use. `--turn FILE`
waits for whoever holds that file's lock before the runs begin: several of these, and others, can start up side by side.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock
from rollout_gpu import make_model

from nanoskyrl.stages.core.gpus import gpus_of

SKYRL = [sys.executable, "-m", "nanoskyrl_cli.main"]
STRATEGIES = {"lora": "zero2", "full": "zero3"}
GIB = 1 << 30
WARM = 2
"""Steps that are left out: servers, trainer and kernels come up in them."""


def parity(trajectory: Any) -> float:
    """Reward half of all attempts."""
    return float(sum(trajectory.response_ids) % 2)


def say(what: str, **values: Any) -> None:
    """Print a line of figures."""
    print(json.dumps({"what": what, **{k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}}))
    sys.stdout.flush()


@dataclass(frozen=True)
class Split:
    """Who generates and who trains."""

    generate: str
    train: str

    @property
    def flags(self) -> list[str]:
        return ["--gpus-generate", self.generate, "--gpus-train", self.train]


@dataclass
class Memory:
    """The most MiB in use on each GPU, looked at every second."""

    most: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        stop = threading.Event()

        def look() -> None:
            while True:
                now = memory_used()
                self.most = [max(pair) for pair in zip(self.most, now, strict=True)] if self.most else now
                if stop.wait(1):
                    return

        self.most = []
        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def settings(args: argparse.Namespace, trained: str) -> list[str]:
    """Return what every command of a run is given."""
    large = args.shape != "starter"
    on_cpu = args.splits[0].generate == "cpu"
    rank = {"full": 0, "lora": 32}[trained]
    found = {
        "rollout.engine": "vllm", "loop.eval_every": 0, "train.lora_rank": rank, "vllm.lora_rank": rank,
        "train.strategy": "auto" if on_cpu else STRATEGIES[trained],
    }  # fmt: skip
    if large:
        found |= {
            "score.rewards": '{"loop_gpu:parity"=1.0}', "train.lr": 1e-5, "vllm.max_model_len": 2048,
            "rollout.train_batch_size": args.prompts, "rollout.n_samples_per_prompt": args.samples,
            "rollout.max_generate_length": args.new_tokens, "train.compile": str(args.compile).lower(),
            "train.state_every": args.state_every,
        }  # fmt: skip
    if on_cpu:
        found |= {"vllm.kv_cache_gib": 0.25, "vllm.max_num_seqs": 64}
    else:
        found |= {
            "vllm.servers_per_gpu": args.servers_per_gpu, "vllm.gpu_memory": args.gpu_memory,
            "vllm.kv_cache_gib": args.kv_cache_gib,
        }  # fmt: skip
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
    stages = ("rollout", "score", "advantage", "train", "sync", "loop")
    by_stage = {stage: [x for x in lines if x["stage"] == stage and (x["step"] or 0) >= WARM] for stage in stages}

    def median(stage: str, key: str) -> float | None:
        values = [line[key] for line in by_stage[stage] if line.get(key) is not None]
        return statistics.median(values) if values else None

    seconds = {stage: median(stage, "timing/total") or 0.0 for stage in stages}
    rewards = [line["reward/avg_raw_reward"] for line in lines if line["stage"] == "score"]
    tokens = median("rollout", "rollout/response_tokens/total")
    train = {key.removeprefix("timing/") for line in by_stage["train"] for key in line if key.startswith("timing/")}
    return {
        "steps_counted": len(by_stage["loop"]), "seconds": seconds["loop"],
        "against_larger_stage": seconds["loop"] / max(seconds["rollout"], seconds["train"], 1e-9),
        "against_larger_half": seconds["loop"] / max(
            seconds["rollout"] + seconds["score"] + seconds["sync"], seconds["advantage"] + seconds["train"], 1e-9
        ),
        **{f"seconds_{stage}": seconds[stage] for stage in stages[:-1]},
        # Of all steps counted, those that write a state among them.
        "train_against_passes": sum(line["timing/total"] for line in by_stage["train"])
        / max(sum(line["timing/train"] for line in by_stage["train"]), 1e-9),
        "seconds_waited": median("loop", "timing/waited_for_training"),
        **{f"train_{part}": median("train", f"timing/{part}") for part in sorted(train - {"total"})},
        "response_tokens": tokens, "rollout_tokens_per_second": (tokens or 0.0) / max(seconds["rollout"], 1e-9),
        "train_tokens_per_second": median("train", "train/tokens_per_second"),
        "train_mfu": median("train", "train/mfu"),
        "train_peak_gib": (median("train", "train/peak_device_memory_bytes") or 0) / GIB,
        "logprob_gaps": [
            round(line["policy/rollout_train_logprobs_abs_diff_mean"], 5) for line in lines if line["stage"] == "train"
        ],
        "grad_norm": median("train", "train/grad_norm"), "rewards": [round(reward, 4) for reward in rewards],
    }  # fmt: skip


@contextlib.contextmanager
def servers(args: argparse.Namespace, begin: list[str], place: Path) -> Iterator[None]:
    """Serve for every way of training at once; they stop at the end.

    Raises:
        RuntimeError: some do not come up.
    """
    began, running = time.perf_counter(), {}
    for trained in args.trained:
        with (place / f"{trained}.log").open("ab") as out:
            gpus = args.splits[0].generate
            words = [*begin, "--gpus", gpus, "--run", str(place / f"{trained}-served"), *settings(args, trained)]
            running[trained] = subprocess.Popen([*SKYRL, "serve", *words], stdout=out, stderr=out)
    try:
        for trained, server in running.items():
            while not (place / f"{trained}-served" / "servers.json").is_file():
                if server.poll() is not None or time.perf_counter() - began > args.limit:
                    log = (place / f"{trained}.log").read_bytes()[-800:].decode(errors="replace")
                    raise RuntimeError(f"no servers for {trained}: {log}")
                time.sleep(0.2)
            say("serve", trained=trained, seconds=time.perf_counter() - began)
        yield
    finally:
        for server in running.values():
            server.terminate()
        for server in running.values():
            server.wait()


def meet(served: Path, run: Path, split: Split) -> None:
    """Let a run know the servers that lie on a split's GPUs."""
    found = json.loads(served.read_bytes())
    if split.generate != "cpu":
        wanted = set(gpus_of("generate", split.generate))
        found["addresses"] = [address for address in found["addresses"] if set(address["gpus"]) <= wanted]
    run.mkdir()
    (run / "servers.json").write_text(json.dumps(found))


def measure(args: argparse.Namespace, begin: list[str], trained: str, place: Path) -> None:
    """Run each split and lag, and print."""
    told, log, memory = settings(args, trained), place / f"{trained}.log", Memory()
    preset = [] if begin else ["--preset", "quickstart"]
    for split in args.splits:
        words = [*begin, *split.flags, "--lag", "1", "--json", "--run", str(place / "plan"), *told]
        planned = json.loads(command("plan", *words, seconds=60, log=log))
        estimates = {
            key: value / GIB for key, value in planned.items() if isinstance(value, int) and "memory" not in key
        }
        kept = {key: value for key, value in estimates.items() if ":" in key}
        name = f"{split.generate}:{split.train}"
        say("plan", trained=trained, split=name, placement=planned["placement"], train=planned["train"], **kept)
        for lag in args.lags if split is args.splits[0] else args.lags[:1]:
            first = split is args.splits[0] and lag == args.lags[0]
            run = place / f"{trained}-{split.generate}-{split.train}-lag{lag}"
            meet(place / f"{trained}-served" / "servers.json", run, split)
            steps = args.steps if first else args.others or args.steps
            words = [*begin, *preset, *split.flags, "--lag", str(lag), "--steps", str(steps), "--run", str(run), *told]
            began = time.perf_counter()
            with memory.watched():
                command("loop", *words, seconds=args.limit, log=log)
            elapsed = time.perf_counter() - began
            found = figures(run)
            say("loop", trained=trained, split=name, lag=lag, whole_seconds=elapsed, memory_mib=memory.most, **found)
            if args.keep is not None:
                args.keep.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(run / "metrics.jsonl", args.keep / f"{args.shape}-{run.name}.jsonl")
            shutil.rmtree(run)  # states of whole models are large


def splits_of(text: str) -> list[Split]:
    """Read splits such as 0-1:2-3,0:2; between GPUs of one half, a comma looks like one between splits."""
    found = [Split(*part.split(":")) for part in text.split(",")]
    for split in found:
        gpus_of("generate", split.generate)
        gpus_of("train", split.train)
    return found


def main() -> None:
    """Run what was asked for; a failure is printed, and the rest continues."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=splits_of, default="0:1", help="such as 0-1:2-3,0:2, or cpu:cpu")
    parser.add_argument("--shape", default="qwen1.5b", choices=("qwen1.5b", "tiny", "starter"))
    parser.add_argument("--trained", type=lambda text: text.split(","), default="lora,full")
    parser.add_argument("--lags", type=lambda text: list(map(int, text.split(","))), default="1,0")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--others", type=int, default=0, help="steps of runs after the first; 0: as many")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--compile", action="store_true", help="train.compile")
    parser.add_argument("--state-every", type=int, default=1, help="train.state_every")
    parser.add_argument("--servers-per-gpu", type=int, default=2)
    parser.add_argument("--gpu-memory", type=float, default=0.4, help="share of a GPU that one way's servers take")
    parser.add_argument("--kv-cache-gib", type=float, default=8.0, help="of each server")
    parser.add_argument("--turn", type=Path, default=None, help="file whose lock is waited for before the runs")
    parser.add_argument("--keep", type=Path, default=None, help="where each run's metrics.jsonl is kept")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for one command")
    parser.add_argument("--place", type=Path, default=None, help="where models and runs go; default: in memory")
    args = parser.parse_args()
    if args.shape == "tiny":
        args.prompts, args.samples, args.new_tokens = 4, 8, 32
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    memory = Path("/dev/shm")
    place = args.place or Path(tempfile.mkdtemp(prefix="nanoskyrl-loop-", dir=memory if memory.is_dir() else None))
    place.mkdir(parents=True, exist_ok=True)
    begin = [] if args.shape == "starter" else ["--policy", str(make_model(args.shape, place))]
    try:
        with servers(args, begin, place), FileLock(args.turn) if args.turn else contextlib.nullcontext():
            for trained in args.trained:
                try:
                    measure(args, begin, trained, place)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    say("failed", trained=trained, error=str(error)[-900:])
    except RuntimeError as error:
        say("failed", error=str(error)[-900:])


if __name__ == "__main__":
    main()
