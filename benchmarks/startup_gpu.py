"""What a vLLM server's start-up is made of, and what it costs to leave parts out: cold, warm, and tokens a second.

    python benchmarks/startup_gpu.py --policy smollm2/model
    python benchmarks/startup_gpu.py --policy starter --variants default --gpus cpu      # tries the script

Each variant is arguments of the server; each is started with an empty compile cache and again with the full one, asked
for 512 sequences of 128 tokens (256 at once), and stopped. One JSON line a start: seconds until it answers, the seconds
of each part as its log's clock tells them, tokens a second.
"""

import argparse
import json
import os
import re
import tempfile
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from nanoskyrl.stages.engines.base import Request, SamplingParams
from nanoskyrl.stages.engines.vllm.config import VllmConfig
from nanoskyrl.stages.engines.vllm.engine import VllmEngine
from nanoskyrl.stages.models.policy import resolve_policy

GRAPHS = ("-cc.mode=0", "-cc.cudagraph_mode=FULL_DECODE_ONLY")
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "spawn": ((), {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}),
    "default": ((), {}),
    "graphs": (GRAPHS, {}),
    "O1": (("-O1",), {}),
    "eager": (("--enforce-eager",), {}),
}
"""Arguments, and what the environment says besides."""
MARKS = {
    "imports": r"vLLM API server version|version \d+\.\d+.*model",
    "engine process": r"Initializing a V1 LLM engine|EngineCore.*waiting for init|Starting to load model",
    "weights": r"Loading weights took|Model loading took",
    "compile": r"torch\.compile takes|torch\.compile took",
    "profile": r"GPU KV cache size|Available KV cache memory|reserved .* KV",
    "graphs": r"Graph capturing finished",
    "ready": r"Application startup complete|Starting vLLM server|Starting vLLM API server",
}


def parts_of(log: Path, began: float) -> dict[str, float]:
    """Return seconds from the start to the last line of each kind, by the log's own clock."""
    found: dict[str, float] = {}
    for line in log.read_text(errors="replace").splitlines():
        stamp = re.search(r"(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)", line)
        if stamp is None:
            continue
        month, day, *clock = (int(piece) for piece in stamp.groups())
        at = datetime(datetime.now().year, month, day, *clock).timestamp() - began
        found |= {name: round(at, 1) for name, pattern in MARKS.items() if re.search(pattern, line)}
    return found


def measure(policy: Path, config: VllmConfig, name: str, cache: str, folder: Path, sequences: int) -> None:
    """Start once, ask, stop, and print."""
    arguments, environment = VARIANTS[name]
    os.environ.pop("VLLM_WORKER_MULTIPROC_METHOD", None)
    os.environ |= {"VLLM_CACHE_ROOT": str(folder / name.replace(", ", "-")), **environment}
    place = Path(tempfile.mkdtemp(dir=folder))
    engine = VllmEngine(replace(config, args=(*config.args, *arguments)))
    engine.place = place
    line = {"variant": name, "cache": cache}
    began = time.time()
    try:
        engine.load(policy)
        line["ready_seconds"] = round(time.time() - began, 1)
        prompt = engine.renderer.prompt_ids([{"role": "user", "content": "Tell me a story."}])
        for turn in ("first", "second"):
            asked = [Request(prompt_ids=prompt, seed=seed, max_tokens=128) for seed in range(sequences)]
            start = time.perf_counter()
            tokens = sum(len(one.token_ids) for one in engine.generate(asked, SamplingParams()))
            line[f"tokens_per_second_{turn}"] = round(tokens / (time.perf_counter() - start))
    except Exception as error:  # the other variants are still of interest
        line["error"] = str(error)[:300]
    finally:
        engine.close()
    line["parts"] = parts_of(place / "logs" / "vllm-0.log", began)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="starter")
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--gpu-memory", type=float, default=0.3)
    parser.add_argument("--servers-per-gpu", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--variants", default=";".join(VARIANTS), help="separated by semicolons")
    args = parser.parse_args()
    on_cpu = args.gpus == "cpu"
    config = VllmConfig(
        gpus=args.gpus, gpu_memory=args.gpu_memory, kv_cache_gib=0.25 if on_cpu else 4.0, self_test=0,
        servers_per_gpu=None if on_cpu else args.servers_per_gpu,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name in args.variants.split(";"):
            for cache in ("cold", "warm"):
                measure(resolve_policy(args.policy), config, name, cache, Path(folder), args.sequences)
