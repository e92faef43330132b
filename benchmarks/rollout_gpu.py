"""Generation with vLLM: `skyrl rollout` beside raw `LLM.generate`, multi-turn, sync, two GPUs.

Each sub-step prints JSON lines and survives the failure of others; give as many as the time allows. Weights are
random, in Qwen2.5-1.5B's shape, made here; nothing comes from a hub. Prompts are random letters, a token
each.

python benchmarks/rollout_gpu.py --steps raw,rollout            single turn: raw at several settings, then ours
python benchmarks/rollout_gpu.py --steps ceiling                raw, setting after setting, with the gain of each
python benchmarks/rollout_gpu.py --steps profile                where the time of a decode step goes (cProfile)
python benchmarks/rollout_gpu.py --steps turns                  4 turns with real tools
python benchmarks/rollout_gpu.py --steps sync                   LoRA and full sync; startup_gpu.py has the start
python benchmarks/rollout_gpu.py --steps two                    two servers against one
python benchmarks/rollout_gpu.py --steps client                 the client alone, against a server that answers at once
python benchmarks/rollout_gpu.py --shape tiny --steps all       the whole on a CPU, in a quarter of an hour
"""

import argparse
import gc
import json
import os
import shutil
import string
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen1.5b": {
        "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    },
    "small": {
        "vocab_size": 2048, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    },
    "tiny": {
        "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    },
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
RAW = """
import cProfile, glob, io, json, pstats, sys, time


def main():
    from vllm import LLM, SamplingParams

    given = json.loads(sys.argv[1])
    began = time.perf_counter()
    llm = LLM(model=given["model"], **given["llm"])
    print(json.dumps({"ready_seconds": time.perf_counter() - began}), flush=True)

    def wait_for_all(name):  # processes that share a GPU begin together
        if given.get("peers", 1) > 1:
            open(f"{given['meet']}-{name}-{given['peer']}", "w").close()
            while len(glob.glob(f"{given['meet']}-{name}-*")) < given["peers"]:
                time.sleep(0.01)

    prompts = [{"prompt_token_ids": ids} for ids in json.loads(open(given["prompts"]).read())]
    for number, measure in enumerate(given["measures"]):
        def params(i):
            return SamplingParams(
                temperature=1.0, max_tokens=given["new"], ignore_eos=True,
                logprobs=measure.get("logprobs"), detokenize=measure.get("detokenize", False),
                seed=1000 + i if measure.get("seeded") else None,
                flat_logprobs=measure.get("flat", False) and measure.get("logprobs") is not None,
            )
        chosen = prompts[: measure.get("count", len(prompts))]
        llm.generate(chosen[:8], [params(i) for i in range(len(chosen[:8]))], use_tqdm=False)
        llm.reset_prefix_cache()
        wait_for_all(number)
        profiler, start = cProfile.Profile(), time.time()
        began = time.perf_counter()
        if measure.get("profile"):
            profiler.enable()
        outputs = llm.generate(chosen, [params(i) for i in range(len(chosen))], use_tqdm=False)
        profiler.disable()
        seconds = time.perf_counter() - began
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        line = {**measure, "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
        line |= {"began": start, "ended": time.time()}
        if measure.get("profile"):
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(25)
            line["profile"] = [" ".join(l.split()) for l in text.getvalue().splitlines() if l.strip()][4:34]
        print(json.dumps(line), flush=True)


if __name__ == "__main__":  # the engine's own process imports this file again
    main()
"""


@dataclass(frozen=True)
class Bench:
    """What the sub-steps share."""

    args: argparse.Namespace
    place: Path
    model: Path
    cpu: bool

    def config(self, **changes: Any) -> Any:
        """Return settings of the engine."""
        from nanoskyrl.stages.engines.vllm.config import VllmConfig

        base = {
            "gpus": "cpu" if self.cpu else "0", "python": self.args.python, "max_num_seqs": self.args.max_num_seqs,
            "self_test": 0, "endpoint": self.args.endpoint,
            "servers_per_gpu": None if self.cpu else self.args.servers_per_gpu,
            "dtype": "float32" if self.cpu else "bfloat16",
            "max_model_len": self.args.prompt_tokens * 2 + self.args.new_tokens * 5 + 512,
        }  # fmt: skip
        return VllmConfig(**{**base, **changes})


def say(step: str, **values: Any) -> None:
    """Print a line of figures."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps({"step": step, **rounded}), flush=True)


def make_model(shape: str, place: Path, seed: int = 0) -> Path:
    """Write a model with random weights, and a tokenizer of bytes and fillers."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    target = place / f"{shape}-bytes-{seed}"
    if (target / "config.json").is_file():
        return target
    config = Qwen2Config(**SHAPES[shape], tie_word_embeddings=True, eos_token_id=256, bos_token_id=None)
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if shape == "qwen1.5b" else torch.float32
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a minute faster
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(previous)
    target.mkdir(parents=True, exist_ok=True)
    # Bytes are tokens of their own, as Qwen2's class of tokenizers has it; the others stand for sampled text only.
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["<|endoftext|>"] = 256
    vocabulary |= {f"t{i}": i for i in range(257, config.vocab_size)}
    words = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
    return target


def make_prompts(bench: Bench) -> Path:
    """Write the tokens of the prompts that ours are given, too."""
    from nanoskyrl.stages.models.loading import load_tokenizer
    from nanoskyrl.stages.models.rendering import Renderer

    renderer = Renderer(load_tokenizer(bench.model))
    prompts = [renderer.prompt_ids([{"role": "user", "content": text}]) for text in texts(bench.args)]
    lengths = {len(ids) for ids in prompts}
    if lengths != {bench.args.prompt_tokens}:
        raise RuntimeError(f"prompts have {sorted(lengths)} tokens, not {bench.args.prompt_tokens}")
    file = bench.place / "prompts.json"
    file.write_text(json.dumps(prompts))
    return file


def texts(args: argparse.Namespace) -> list[str]:
    """Return random letters, a token each; two more tokens come from the template."""
    import random

    draw = random.Random(0)
    return ["".join(draw.choices(string.ascii_letters, k=args.prompt_tokens - 2)) for _ in range(args.prompts)]


def raw(
    bench: Bench,
    measures: Sequence[dict[str, Any]],
    *,
    environment: dict[str, str] | None = None,
    peers: int = 1,
    **llm: Any,
) -> list[dict[str, Any]]:
    """Run `LLM.generate` in a process of its own, or in several that share the GPU and the prompts; return the lines.

    The rate of several counts from when the first began to when the last ended.
    """
    base: dict[str, Any] = {
        "max_num_seqs": bench.args.max_num_seqs, "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
        "dtype": "float32" if bench.cpu else "bfloat16", "max_model_len": bench.config().max_model_len,
        "disable_log_stats": True,
    }  # fmt: skip
    if bench.cpu:
        base |= {"enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": 1 << 30}
    if peers > 1:
        base |= {"gpu_memory_utilization": 0.9 / peers, "kv_cache_memory_bytes": int((70 / peers - 8) * (1 << 30))}
    prompts = json.loads(make_prompts(bench).read_text())
    extra = {"VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if bench.cpu:
        base |= {"kv_cache_memory_bytes": 1 << 30}
        extra |= {"OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    script = bench.place / "raw.py"
    script.write_text(RAW)
    meet = bench.place / f"meet-{time.monotonic_ns()}"
    running = []
    for peer in range(peers):
        share = bench.place / f"prompts-{peer}.json"
        share.write_text(json.dumps(prompts[peer::peers]))
        given = {
            "model": str(bench.model), "llm": {**base, **llm}, "prompts": str(share), "measures": measures,
            "new": bench.args.new_tokens, "peers": peers, "peer": peer, "meet": str(meet),
        }  # fmt: skip
        running.append(subprocess.Popen(
            [bench.args.python or sys.executable, str(script), json.dumps(given)], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, **extra, **(environment or {})},
        ))  # fmt: skip
    found = []
    try:
        with ThreadPoolExecutor(peers) as pool:  # their pipes must be read side by side
            spoken = list(pool.map(lambda process: process.communicate(timeout=bench.args.limit), running))
    finally:
        for process in running:
            process.kill()
    for process, (out, errors) in zip(running, spoken, strict=True):
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        if process.returncode or len(lines) < 1 + len(measures):
            tail = [line for line in errors.splitlines() if "Error" in line][-2:] or errors.splitlines()[-3:]
            raise RuntimeError(f"raw ended with {process.returncode}: {' | '.join(tail)[:600]}")
        found.append(lines)
    joined = []
    for lines in zip(*found, strict=True):
        line = dict(lines[0])
        if "tokens" in line:
            seconds = max(one["ended"] for one in lines) - min(one["began"] for one in lines)
            tokens = sum(one["tokens"] for one in lines)
            line |= {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
            del line["began"], line["ended"]
        joined.append(line)
    return joined


def step_raw(bench: Bench) -> None:
    """Raw at the settings of `rollout`, with and without what ours asks for besides."""
    measures = [
        {"logprobs": 0}, {"logprobs": 0, "seeded": True}, {"logprobs": None}, {"logprobs": 0, "detokenize": True},
    ]  # fmt: skip
    for line in raw(bench, measures):
        say("raw", max_num_seqs=bench.args.max_num_seqs, **line)


def step_ceiling(bench: Bench) -> None:
    """Raw, setting after setting; each line is one gain or loss."""
    with_logprobs = [{"logprobs": 0, "flat": True}, {"logprobs": None}]
    tries: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("1 process, 256 sequences", {"max_num_seqs": 256}, {}),
        ("1 process, 1024 sequences", {"max_num_seqs": 1024}, {}),
        ("1 process, 128 sequences", {"max_num_seqs": 128}, {}),
        ("2 processes, 256 sequences each", {"max_num_seqs": 256, "peers": 2}, {}),
        ("3 processes, 256 sequences each", {"max_num_seqs": 256, "peers": 3}, {}),
        ("4 processes, 256 sequences each", {"max_num_seqs": 256, "peers": 4}, {}),
        ("4 processes, 128 sequences each", {"max_num_seqs": 128, "peers": 4}, {}),
        (
            "1 process, 512 sequences, graphs to 512",
            {"max_num_seqs": 512, "compilation_config": {"max_cudagraph_capture_size": 512}},
            {},
        ),
        ("1 process, 256 sequences, model runner 1", {"max_num_seqs": 256}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
        ("1 process, 256 sequences, in one process", {"max_num_seqs": 256}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
    ]
    if bench.args.shape == "tiny":
        tries = [("seqs 16", {"max_num_seqs": 16}, {}), ("seqs 64, 2 processes", {"max_num_seqs": 64, "peers": 2}, {})]
    wanted = bench.args.only.split(",") if bench.args.only else None
    for index, (name, llm, environment) in enumerate(tries):
        if wanted is None or str(index) in wanted:
            guarded("ceiling", lambda llm=llm, env=environment, name=name: [
                say("ceiling", setting=name, **line) for line in raw(bench, with_logprobs, environment=env, **llm)
            ], setting=name)  # fmt: skip


def step_profile(bench: Bench) -> None:
    """Where the host's time goes, in one process, with log-probs and without."""
    count = min(bench.args.prompts, bench.args.max_num_seqs)
    measures = [
        {"logprobs": 0, "flat": True, "profile": True, "count": count},
        {"logprobs": None, "profile": True, "count": count},
    ]
    for line in raw(bench, measures, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}):
        say("profile", **line)


class Words:
    """One turn over a prompt of random letters."""

    def __init__(self, config: None, prompts: Sequence[str]) -> None:
        from nanoskyrl.envs.base import Task

        self.listed = [
            Task(task_id=f"w{i}", split="train", prompt=text, ground_truth="") for i, text in enumerate(prompts)
        ]

    def tasks(self, split: str) -> Sequence[Any]:
        return self.listed

    def start(self) -> "Words":
        return self

    def reset(self, task: Any, seed: int) -> Any:
        from nanoskyrl.envs.base import Observation

        return Observation(messages=[{"role": "user", "content": task.prompt}])

    def step(self, action: str) -> Any:
        from nanoskyrl.envs.base import Step

        return Step(done=True)

    def close(self) -> None: ...


class Tools(Words):
    """Four turns; whatever was written, real tools are called, and what they say is observed."""

    def start(self) -> "Tools":
        import copy

        fresh = copy.copy(self)
        fresh.turns = 0  # type: ignore[attr-defined]
        return fresh

    def step(self, action: str) -> Any:
        from nanoskyrl.envs.base import Step
        from nanoskyrl.envs.worlds.tool_use.calculator import calculator
        from nanoskyrl.envs.worlds.tool_use.search import search

        self.turns += 1  # type: ignore[attr-defined]
        said = f"{calculator('(17 + 25) * 3')} {search('the capital of a country')}"
        return Step(messages=[{"role": "tool", "content": said}], done=self.turns == 4)  # type: ignore[attr-defined]


def generated(bench: Bench, environment: Any, engine: Any, name: str, *, new: int, turns: int) -> dict[str, Any]:
    """Roll out every prompt once, shards and all, and return the figures."""
    from nanoskyrl.stages.core import registry
    from nanoskyrl.stages.core.metrics import MetricsLog, read_metrics
    from nanoskyrl.stages.engines.rollout_config import RolloutConfig
    from nanoskyrl.stages.rollout import rollout

    registry.ENVS["bench"] = "bench:made"  # type: ignore[index]
    sys.modules["bench"] = type(sys)("bench")
    sys.modules["bench"].made = lambda config: environment  # type: ignore[attr-defined]
    config = RolloutConfig(
        env="bench", engine="vllm", train_batch_size=len(environment.listed), n_samples_per_prompt=1,
        max_generate_length=new, max_turns=turns, rows_per_part=256, trajectory_mode="whole",
    )  # fmt: skip
    output, log = bench.place / name, bench.place / f"{name}.jsonl"
    shutil.rmtree(output, ignore_errors=True)
    log.unlink(missing_ok=True)
    began = time.perf_counter()
    manifest = rollout(bench.model, output, config, engine=engine, log=MetricsLog(log))
    seconds = time.perf_counter() - began
    (line,) = read_metrics(log)
    tokens = line["rollout/response_tokens/total"]
    return {
        "rows": manifest.rows_out, "failed": manifest.dropped.get("failed", 0), "tokens": tokens, "seconds": seconds,
        "tokens_per_second": tokens / seconds, "share_generating": line["timing/generate"] / line["timing/play"],
        "seconds_load": line["timing/load"], "seconds_environments": line["timing/env"],
        "seconds_write": line["timing/write"], "retries": line["rollout/engine/retries"],
    }  # fmt: skip


def with_engine(bench: Bench, work: Callable[[Any], None], **changes: Any) -> None:
    """Start an engine, bring it to the model, work, and stop it."""
    from nanoskyrl.stages.engines.vllm.engine import VllmEngine

    engine = VllmEngine(bench.config(**changes))
    engine.place = bench.place
    try:
        engine.load(bench.model)
        say("engine", **engine.facts())
        work(engine)
    finally:
        engine.close()


def step_rollout(bench: Bench) -> None:
    """The engine at the same settings: shards written and all."""
    ways: list[dict[str, Any]] = [{"seeded": False}, {"seeded": True}]
    for way in ways if bench.args.both_seeds else ways[:1]:

        def work(engine: Any, way: dict[str, Any] = way) -> None:
            engine._stop_list = []  # nor does raw end before it has as many tokens as were asked for
            for again in range(4):  # the first warms up; raw, too, computes its prompts each time
                cached = again == 3
                for server in () if cached else engine.supervisor.living:
                    engine._do(server.client.reset_prefix_cache())
                found = generated(
                    bench, Words(None, texts(bench.args)), engine, "rollout", new=bench.args.new_tokens, turns=1
                )
                say(
                    "rollout", repeat=again, prompts_cached=cached, max_num_seqs=bench.args.max_num_seqs,
                    endpoint=bench.args.endpoint, servers_per_gpu=bench.args.servers_per_gpu, **way, **found,
                )  # fmt: skip

        with_engine(bench, work, **way)


def step_turns(bench: Bench) -> None:
    """Four turns with real tools against one turn: share of time in which anything is generated."""
    args = argparse.Namespace(**{**vars(bench.args), "prompts": min(512, bench.args.prompts)})
    new = max(8, bench.args.new_tokens // 4)
    Tools(None, []).start().step("")  # the search index is made now, not in the clock's time

    def work(engine: Any) -> None:
        single = generated(bench, Words(None, texts(args)), engine, "single", new=new * 4, turns=1)
        say("turns", turns=1, **single)
        # Random weights never end a turn: one token in `new` is made to, so that turns have that length on average.
        engine._stop_list = list(range(10, 10 + max(1, SHAPES[args.shape]["vocab_size"] // new)))
        several = generated(bench, Tools(None, texts(args)), engine, "several", new=new * 4, turns=4)
        say("turns", turns=4, against_single=several["tokens_per_second"] / single["tokens_per_second"], **several)

    with_engine(bench, work, seeded=False)


def step_sync(bench: Bench) -> None:
    """Seconds from "train done" to the first token of the new policy, split."""
    import torch
    from peft import LoraConfig, get_peft_model

    from nanoskyrl.stages.engines.base import Request, SamplingParams
    from nanoskyrl.stages.models.loading import load_model
    from nanoskyrl.stages.models.policy import PolicyInfo, policy_digest, write_info
    from nanoskyrl.stages.models.write_policy import write_policy

    dtype = torch.float32 if bench.cpu else torch.bfloat16
    device = "cpu" if bench.cpu else "cuda"  # where a model learns
    model = load_model(bench.model, dtype=dtype, device=device)

    def frame(target: Path, base: str | None) -> None:
        for file in bench.model.glob("*token*"):
            shutil.copyfile(file, target / file.name)
        for file in bench.model.glob("chat_template*"):
            shutil.copyfile(file, target / file.name)
        write_info(target, PolicyInfo(base=base, canary_ids=list(range(10, 74))))

    def deliver(engine: Any, kind: str, save: Callable[[Path], None], base: str | None) -> None:
        target = bench.place / f"policy-{kind}-{time.monotonic_ns()}"
        began = time.perf_counter()
        save(target)
        saved = time.perf_counter()
        frame(target, base)
        engine.facts()
        engine.load(target)
        loaded = time.perf_counter()
        engine.generate([Request(prompt_ids=list(range(10, 30)), seed=0, max_tokens=1)], SamplingParams())
        ended = time.perf_counter()
        size = sum(file.stat().st_size for file in target.iterdir())
        say(
            "sync", kind=kind, megabytes=size / 1e6, seconds=ended - began, save=saved - began, load=loaded - saved,
            first_token=ended - loaded, **{k: v for k, v in engine.facts().items() if k.endswith("seconds")},
            proof=engine.proof,
        )  # fmt: skip
        shutil.rmtree(target)

    def full(engine: Any) -> None:
        ways: dict[str, Callable[[Path], Any]] = {
            "full, save_pretrained": model.save_pretrained,
            "full": lambda place: write_policy(model, place, start=bench.model, adapter=False),
        }
        for kind in ("full, save_pretrained", "full, save_pretrained", "full", "full", "full"):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            deliver(engine, kind, ways[kind], None)

    guarded("sync", lambda: with_engine(bench, full, seeded=False), kind="full")

    def adapters(engine: Any) -> None:
        model = load_model(bench.model, dtype=dtype, device=device)
        wrapped = get_peft_model(model, LoraConfig(r=32, target_modules="all-linear", init_lora_weights=False))
        wrapped.peft_config["default"].base_model_name_or_path = str(bench.model)
        for _ in range(3):
            with torch.no_grad():
                for parameter in wrapped.parameters():
                    if parameter.requires_grad:
                        parameter.mul_(1.01)
            deliver(engine, "lora 32", lambda place: wrapped.save_pretrained(str(place)), policy_digest(bench.model))

    guarded("sync", lambda: with_engine(bench, adapters, seeded=False, lora_rank=32), kind="lora")


def step_two(bench: Bench) -> None:
    """Two GPUs against one."""
    found: dict[str, float] = {}
    for gpus in ("0", "0,1"):

        def work(engine: Any, gpus: str = gpus) -> None:
            for again in range(2):
                line = generated(
                    bench, Words(None, texts(bench.args)), engine, "two", new=bench.args.new_tokens, turns=1
                )
                found[gpus] = line["tokens_per_second"]
                say("two", gpus=gpus, repeat=again, against_one=found[gpus] / found["0"], **line)

        with_engine(bench, work, gpus="cpu" if bench.cpu else gpus, seeded=False)
        if bench.cpu:
            return


CLIENT = """
import asyncio, json, sys
from aiohttp import web

DIGEST, TOKENS = sys.argv[1], int(sys.argv[2])
ANSWER = json.dumps({"choices": [{
    "text": " t12345" * TOKENS, "finish_reason": "length", "token_ids": [123] * TOKENS, "prompt_token_ids": [5] * 256,
    "logprobs": {
        "text_offset": list(range(0, 7 * TOKENS, 7)), "token_logprobs": [-11.93456789012345] * TOKENS,
        "tokens": [" t12345"] * TOKENS, "top_logprobs": [{" t12345": -11.93456789012345}] * TOKENS,
    },
}]}).encode()


async def answer(request):
    body = json.loads(await request.read() or b"null")
    if request.path == "/health":
        return web.Response()
    if request.path == "/v1/models":
        return web.json_response({"data": [{"id": "p", "parent": None, "max_model_len": 8192}]})
    if request.path == "/collective_rpc":
        return web.json_response({"results": [{"digest": DIGEST, "loads": 0, "dtype": "float32"}]})
    if request.path == "/skyrl/generate":
        return web.Response(status=404)
    if "prompt_logprobs" in body:
        listed = [None] + [{str(token): {"logprob": -1.0}} for token in body["prompt"][1:]]
        return web.json_response({"choices": [{"prompt_logprobs": listed}]})
    return web.Response(body=ANSWER, content_type="application/json")


async def main():
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.sleep(3600)


asyncio.run(main())
"""


def step_client(bench: Bench) -> None:
    """The client alone: a server in another process that answers at once, always the same."""
    from nanoskyrl.stages.models.policy import policy_digest

    command = [sys.executable, "-c", CLIENT, policy_digest(bench.model), "512"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    args = argparse.Namespace(**{**vars(bench.args), "prompts": 1024, "prompt_tokens": 256})
    try:
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"

        def work(engine: Any) -> None:
            for again in range(2):
                began = time.process_time()
                found = generated(bench, Words(None, texts(args)), engine, "client", new=512, turns=1)
                say("client", repeat=again, cpu_seconds=time.process_time() - began, **found)

        with_engine(bench, work, urls=(url,), checksum=False, max_num_seqs=256, max_model_len=None)
    finally:
        server.terminate()
        server.wait()


STEPS: dict[str, Callable[[Bench], None]] = {
    "raw": step_raw, "rollout": step_rollout, "ceiling": step_ceiling, "profile": step_profile, "turns": step_turns,
    "sync": step_sync, "two": step_two, "client": step_client,
}  # fmt: skip


def guarded(step: str, work: Callable[[], Any], **values: Any) -> None:
    """Do something; if it fails, say so and continue."""
    try:
        work()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())[:700]
        say(
            step,
            **values,
            error=text,
            hint=getattr(error, "hint", None),
            at=f"{Path(where.filename).name}:{where.lineno}",
        )


def main() -> None:
    """Run the sub-steps asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="raw,rollout")
    parser.add_argument("--shape", default="qwen1.5b", choices=SHAPES)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--endpoint", default="auto", help="auto, completions or tokens")
    parser.add_argument("--both-seeds", action="store_true", help="rollout also with a seed for each request")
    parser.add_argument("--only", default="", help="numbers of the settings of `ceiling`, such as 0,3")
    parser.add_argument("--servers-per-gpu", type=int, default=1)
    parser.add_argument("--python", default=os.environ.get("NANOSKYRL_VLLM_PYTHON"))
    parser.add_argument("--place", default="", help="where models and shards go; default: in memory if it can be")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one raw process")
    args = parser.parse_args()
    gc.set_threshold(50_000)  # as `skyrl` does; at Python's own, looking for garbage is half of what the client does
    if args.shape == "tiny":
        args.prompts, args.prompt_tokens, args.new_tokens = min(args.prompts, 64), 32, 32
        args.max_num_seqs = min(args.max_num_seqs, 64)
    base = (
        Path(args.place)
        if args.place
        else Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    )
    place = base / "nanoskyrl-bench"
    place.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    model = make_model(args.shape, place)
    bench = Bench(args, place, model, args.shape == "tiny")
    say(
        "model",
        shape=args.shape,
        seconds=time.perf_counter() - began,
        bytes=sum(f.stat().st_size for f in model.iterdir()),
    )
    names = list(STEPS) if args.steps == "all" else args.steps.split(",")
    for name in names:
        began = time.perf_counter()
        guarded(name, lambda name=name: STEPS[name](bench))
        say("done", what=name, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    main()
