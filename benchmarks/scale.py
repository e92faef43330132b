"""Stages and the loop on a Ray cluster of node processes of this machine, beside the local executor.

    python benchmarks/scale.py parts --rows 5000       # 1, 2, 4 workers; a node killed; the store stopped and started
    python benchmarks/scale.py hosts                   # nodes that share nothing but an S3 server
    python benchmarks/scale.py loop --steps 10         # the loop, local and on Ray: same bytes
    python benchmarks/scale.py score --rows 100000     # through score and advantage on 4 workers
    python benchmarks/scale.py overhead                # a part that costs nothing, by size
    python benchmarks/scale.py servers --rows 256      # RolloutWorkers with a vLLM server of one core each: 1, then 2
    python benchmarks/scale.py trainers                # two hosts' commands of `skyrl plan --hosts`, as two processes

All nodes share this machine's processors, so wall clocks say what the executor costs and not what nodes bring. Each
line compares manifests, which hold the digests of all parts, byte for byte with those of the local executor. What a
policy wrote runs nowhere here: `text_math` has no tools.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import pyarrow.parquet as pq
from clusters import OBJECT_STORE, Store, cluster_of, s3  # pyright: ignore[reportMissingImports]
from made_up import made_up_rollout
from rollout_gpu import make_model
from running import manifests  # pyright: ignore[reportMissingImports]

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.manifest import MANIFEST
from nanoskyrl.stages.core.metrics import METRICS, read_metrics
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl.stages.looking.hosts import PORT, host_commands
from nanoskyrl.stages.running.interface import open_run

STAGES = ("rollout", "score", "advantage")


def rollouts(rows: int) -> dict[str, Any]:
    """Return the settings of so many short trajectories of the starter, in 32 parts."""
    return {
        "train_batch_size": -(-rows // 8), "n_samples_per_prompt": 8, "max_generate_length": 24, "max_turns": 2,
        "rows_per_part": -(-rows // 32 // 8) * 8,
    }  # fmt: skip


def made(
    place: Any, settings: dict[str, Any], stages: tuple[str, ...] = STAGES
) -> tuple[list[float], dict[str, bytes]]:
    """Return the seconds of each stage, and what was left."""
    seconds = []
    with open_run(place, settings) as run:
        for stage in STAGES:
            began = time.perf_counter()
            run.make(stage)
            seconds.append(time.perf_counter() - began)
    return seconds, manifests(place)


def on_ray(cluster: Any, workers: int, **ray: Any) -> dict[str, Any]:
    """Return the settings of so many workers of each kind."""
    counts = {"env_workers": workers, "rollout_workers": workers, "rollout_worker_cpus": 0.5, "env_worker_cpus": 0.5}
    return {"run": {"executor": "ray"}, "ray": {"address": cluster.address, **counts, **ray}}


def line(name: str, seconds: list[float], same: bool | str, note: str = "") -> None:
    """Print a row of the table."""
    print(f"| {name} | {' | '.join(f'{each:.1f}' for each in seconds)} | {same} | {note} |", flush=True)


def after_first_part(folder: Any, act: Callable[[], None]) -> threading.Thread:
    """Do something once a part is in place."""

    def wait() -> None:
        while not list(folder.glob("part-*")):
            time.sleep(0.05)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def parts(rows: int, folder: Path, store: Store) -> None:
    """Rollout, score and advantage by 1, 2 and 4 workers; a node lost; the store away."""
    settings = {"rollout": rollouts(rows)}
    print("| | rollout, s | score, s | advantage, s | same bytes | |\n| --- | --- | --- | --- | --- | --- |")
    seconds, wanted = made(folder / "local", settings)
    line("local executor", seconds, "")
    with cluster_of(2, 2) as cluster:
        for workers in (1, 2, 4):
            place = f"s3://bucket/workers-{workers}"
            seconds, found = made(place, {**settings, **on_ray(cluster, workers)})
            line(f"{workers} workers, S3", seconds, found == wanted)
        node, root = cluster.add_node(num_cpus=2, object_store_memory=OBJECT_STORE), folder / "lost"
        cluster.wait_for_nodes()
        losing = after_first_part(
            Run(root).stage(0, "rollout"), lambda: cluster.remove_node(node, allow_graceful=False)
        )
        seconds, found = made(root, {**settings, **on_ray(cluster, 6)})
        losing.join()
        line("6 workers, one of three nodes killed in rollout", seconds, found == wanted)
        place = "s3://bucket/away"
        leaving = after_first_part(as_path(f"{place}/step-000000/rollout"), lambda: store.away(20.0))
        seconds, found = made(place, {**settings, **on_ray(cluster, 2)})
        leaving.join()
        line("2 workers, S3 stopped for 20 s in rollout", seconds, found == wanted)


def hosts(rows: int, folder: Path) -> None:
    """Nodes with homes and temporary folders of their own; only the store's address is shared."""
    settings = {"rollout": rollouts(rows), "loop": {"steps": 2}}
    with open_run(folder / "local", settings) as run:
        run.loop()
    with cluster_of(2, 3, folder / "hosts") as cluster:
        os.environ["NANOSKYRL_CACHE"] = str(folder / "driver")
        with open_run("s3://bucket/hosts", {**settings, **on_ray(cluster, 2)}) as run:
            run.loop()
    print("two hosts, loop of 2 steps: same bytes", manifests("s3://bucket/hosts") == manifests(folder / "local"))
    for host in sorted((folder / "hosts").iterdir()):
        held = sorted({path.name for path in host.rglob("policies/*") if path.is_dir() and path.name[0] != "."})
        print(f"{host.name} has copies of the policies {held} below its own folders alone")


def loops(steps: int, folder: Path) -> None:
    """The loop, local and on Ray."""
    settings = {"rollout": {"env": "text_math", "max_generate_length": 32}, "loop": {"steps": steps}}
    seconds = []
    with cluster_of(2, 3) as cluster:
        for name, how in (("local", {}), ("ray", on_ray(cluster, 1, env_workers=2))):
            began = time.perf_counter()
            with open_run(folder / name, {**settings, **how}) as run:
                run.loop(report=lambda step, numbers, name=name: print(name, step, numbers.get("reward/success")))
            seconds.append(time.perf_counter() - began)
    same = manifests(folder / "local") == manifests(folder / "ray")
    print(f"loop of {steps} steps: local {seconds[0]:.0f} s, on Ray {seconds[1]:.0f} s, same bytes {same}")


def scored(rows: int, folder: Path) -> None:
    """Made-up trajectories through score and advantage."""
    print("| | score, s | advantage, s | same bytes | |\n| --- | --- | --- | --- | --- |")
    made_up_rollout(folder / "rollout", rows)
    wanted: dict[str, bytes] = {}
    with cluster_of(2, 3) as cluster:
        for name, how in (("local executor", {}), ("4 workers", on_ray(cluster, 4)), ("1 worker", on_ray(cluster, 1))):
            seconds, found, source = [], {}, folder / "rollout"
            with open_run(folder / name, how) as run:
                if how:
                    run.kept.executor().teams(serves=False)  # workers that are up already, as in a loop
                for stage in ("score", "advantage"):
                    began = time.perf_counter()
                    output = folder / name / stage
                    run.make(stage, source=source, output=output)
                    seconds.append(time.perf_counter() - began)
                    found[stage], source = (output / MANIFEST).read_bytes(), output
            wanted = wanted or found
            lines = read_metrics(folder / name / METRICS)
            # What is neither in workers nor in what they are handed: digests, summaries, the manifest.
            own = sum(
                number
                for each in lines
                for key, number in each.items()
                if key.startswith("timing/") and key not in ("timing/total", "timing/score", "timing/estimate")
            )
            line(name, seconds, found == wanted, f"of it {own:.1f} s in the driver" if how else "")


def overhead(folder: Path) -> None:
    """What a part costs beside its work: scoring 4,096 trajectories in parts of several sizes."""
    print("| rows a part | parts | local, s | Ray, s | Ray's more, ms a part | us a trajectory |")
    print("| --- | --- | --- | --- | --- | --- |")
    with cluster_of(1, 2) as cluster:
        for size in (16, 64, 512):
            source, seconds = folder / f"rollout-{size}", []
            made_up_rollout(source, 4096, rows_per_part=size)
            for name, how in (("local", {}), ("ray", on_ray(cluster, 1))):
                with open_run(folder / f"{name}-{size}", how) as run:
                    if how:  # the first job of a worker imports what it needs
                        made_up_rollout(folder / f"warm-{size}", 16)
                        run.score(source=folder / f"warm-{size}", output=folder / f"warm-scored-{size}")
                    began = time.perf_counter()
                    run.score(source=source, output=folder / f"{name}-scored-{size}")
                    seconds.append(time.perf_counter() - began)
            count, more = 4096 // size, seconds[1] - seconds[0]
            print(
                f"| {size} | {count} | {seconds[0]:.2f} | {seconds[1]:.2f} | {1e3 * more / count:.1f} "
                f"| {1e6 * more / 4096:.0f} |",
                flush=True,
            )


def servers(rows: int, folder: Path) -> None:
    """Rollouts by RolloutWorkers with a vLLM server each, which computes on one thread; the second rollout counts."""
    print("| RolloutWorkers | rollout, s | tokens/s | |\n| --- | --- | --- | --- |")
    policy = make_model("small", folder)
    settings = {
        "run": {"policy": str(policy)},
        "rollout": {**rollouts(rows), "engine": "vllm", "max_generate_length": 64, "max_turns": 1},
        "vllm": {"gpus": "cpu", "max_num_seqs": 64, "kv_cache_gib": 0.5},
    }
    rates: list[float] = []
    with cluster_of(1, 4) as cluster:
        for workers in (1, 2):
            how = merge(on_ray(cluster, workers), settings)
            with open_run(folder / f"servers-{workers}", how) as run:
                run.rollout(policy=policy, output=folder / f"warm-{workers}")
                began = time.perf_counter()
                run.rollout(policy=policy, output=folder / f"made-{workers}")
                seconds = time.perf_counter() - began
            rows_made = pq.read_table(folder / f"made-{workers}", columns=["response_ids"])
            rates.append(sum(map(len, rows_made["response_ids"])) / seconds)
            print(f"| {workers} | {seconds:.1f} | {rates[-1]:.0f} | {rates[-1] / rates[0]:.2f}x |", flush=True)


def trainers(folder: Path) -> None:
    """Two hosts' commands, as two processes with temporary folders of their own and the run in the store."""
    settings = {"rollout": rollouts(64)}
    place = "s3://bucket/trainers"
    made(place, settings)
    commands = host_commands(Run(as_path(place)), settings, ["127.0.0.1", "localhost"])
    running = []
    for name, command in commands.items():
        if name.startswith("train on"):
            own = folder / name.replace(" ", "-")
            own.mkdir(parents=True)
            words = [*shlex.split(command.replace(str(PORT), "29517")), "--steps", "1"]
            named = dict([words[0].split("=", 1)])
            words = [sys.executable, "-m", "torch.distributed.run", *words[2:]]
            env = {**os.environ, **named, "TMPDIR": str(own), "OMP_NUM_THREADS": "1"}
            running.append(subprocess.Popen(words, env=env, cwd=own))
    codes = [process.wait(600) for process in running]
    trained = (as_path(place) / "step-000000" / "train" / MANIFEST).is_file()
    print(f"two hosts by torchrun: exit codes {codes}, trained {trained}")


def main() -> int:
    """Run one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["parts", "hosts", "loop", "score", "overhead", "servers", "trainers"])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums are cut by threads: else bytes would depend on the machine
    with tempfile.TemporaryDirectory(prefix="scale-") as name, s3() as store:
        folder = Path(name)
        {
            "parts": lambda: parts(given.rows, folder, store), "hosts": lambda: hosts(given.rows, folder),
            "loop": lambda: loops(given.steps, folder), "score": lambda: scored(given.rows, folder),
            "overhead": lambda: overhead(folder),
            "servers": lambda: servers(given.rows, folder), "trainers": lambda: trainers(folder),
        }[given.what]()  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
