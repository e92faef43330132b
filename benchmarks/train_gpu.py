"""Forward and backward passes of `skyrl train` beside a plain loop and TRL's GRPO step, on one GPU.

    python benchmarks/train_gpu.py full        # ours, the plain loop, TRL if it is installed: one batch, one process
    python benchmarks/train_gpu.py lora        # the same with LoRA of rank 32
    python benchmarks/train_gpu.py long        # LoRA and full, rows of 8,192 tokens
    python benchmarks/train_gpu.py qlora       # LoRA on weights in 4 bits (bitsandbytes)
    python benchmarks/train_gpu.py head        # log-probs from states: ours, whole logits, liger if it is installed
    python benchmarks/train_gpu.py ablation    # what packing, chunks, checkpointing and compiling each bring
    python benchmarks/train_gpu.py fill        # a batch that fills the card: MFU
    python benchmarks/train_gpu.py step        # with the optimizer's step, which the others leave out, and its memory
    torchrun --nproc-per-node 2 benchmarks/train_gpu.py step --only zero3   # the same under DeepSpeed; zero2: LoRA
    python benchmarks/train_gpu.py step --only "qlora|8bit"   # the same with weights in 4 bits; with moments in 8
    python benchmarks/train_gpu.py save        # what is written after a step; --shape 90m suits a CPU
    python benchmarks/train_gpu.py profile     # where the time goes, by kernel
    python benchmarks/train_gpu.py small --shape 135m   # a step of a small model: the host's part, launches, writing
    python benchmarks/train_gpu.py prefix      # shared prefixes: computed once, packed as they are, and TRL

One JSON line a figure on stdout. The model has Qwen2.5-1.5B's shape and random weights in bfloat16; the batch is 8 rows
of 256 prompt tokens and 256 to 1,024 completion tokens, every completion token trained. `tokens_per_second` counts real
tokens, prompt and completion, never padding. `weights_and_activations_gib` is the peak of a pass whose gradients are
freed as they come, less what an optimizer holds; `peak_gib` is the peak of a pass that keeps them, all counted.
`prefix` has batches of its own, in micro-batches of 16,384 tokens: groups of 16 rows with prompts of 700, 2,048 and
130 tokens and completions of 100, 256 and 20, groups of 8 with 256 and 640, and step-wise rows of 8 turns of 500 tokens
each after a prompt of 1,000. Its ratios are of tokens of rows as given, per second; `of_token_ratio` is how much of
what is not computed shows in the time; `activations_gib` is the peak less what was in use before, with gradients freed
as they come. `agreement` is how far log-probs and gradients lie from plain packing's, beside those of another kernel.
`--shape tiny` tries the script on a CPU: those figures mean nothing. `--only PATTERN` runs the variants whose names
have it.
"""

import argparse
import contextlib
import gc
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoskyrl.algos.off_policy import OffPolicyConfig
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.learning.batching import Sequences
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.objective import Objective
from nanoskyrl.stages.learning.train_config import OptimizerConfig, TrainConfig
from nanoskyrl.stages.learning.update import Update
from nanoskyrl.stages.looking.footprint import training_memory
from nanoskyrl.stages.models import logprobs, packing
from nanoskyrl.stages.models.packing import work_of
from nanoskyrl.stages.models.policy import STARTER_DIRECTORY, policy_files
from nanoskyrl.stages.models.prefix_tree import prefix_tree
from nanoskyrl.stages.models.throughput import device_peak, training_flops

SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {
        "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "tie_word_embeddings": True, "rope_theta": 1e6,
    },
    "135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "90m": {
        "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8,
        "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
SUBCOMMANDS = (
    "full", "lora", "qlora", "long", "ablation", "fill", "head", "step", "save", "profile", "small", "prefix",
)  # fmt: skip
GIB = 1 << 30
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@dataclass(frozen=True)
class Batch:
    """Rows of random tokens."""

    prompts: list[np.ndarray]
    completions: list[np.ndarray]
    advantages: list[float]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        return [len(p) + len(c) for p, c in zip(self.prompts, self.completions, strict=True)]

    def sequences(self) -> Sequences:
        """Return them as training reads them; the recorded log-probs are those of a uniform policy."""
        count = len(self.prompts)
        missing: list[Any] = [None] * count
        nats = [np.full(len(c), -np.log(512), np.float32) for c in self.completions]
        return Sequences(
            groups=["group"] * count, prompt_ids=self.prompts, response_ids=self.completions,
            loss_mask=[np.ones(len(c), np.int8) for c in self.completions],
            rollout_logprobs=nats, old_logprobs=nats, ref_logprobs=missing,
            advantages=[np.full(len(c), a, np.float32) for c, a in zip(self.completions, self.advantages, strict=True)],
            returns=missing, values=missing, weights=missing,
        )  # fmt: skip


def made_up(shape: str, rows: int, prompt: int, least: int, most: int) -> Batch:
    random, vocabulary = np.random.default_rng(0), SHAPES[shape]["vocab_size"]
    if shape != "1.5b":
        prompt, least, most = prompt // 16, least // 16, most // 16

    def ids(count: int) -> np.ndarray:
        return random.integers(0, vocabulary, count).astype(np.int32)

    lengths = np.linspace(least, most, rows).round().astype(int)  # ragged, and the same total for every seed
    return Batch(
        [ids(prompt) for _ in lengths], [ids(n) for n in random.permutation(lengths)], random.normal(size=rows).tolist()
    )


def groups_of(shape: str, count: int, size: int, prompt: int, completion: int) -> Batch:
    """Return groups that share their prompts."""
    random, vocabulary = np.random.default_rng(0), SHAPES[shape]["vocab_size"]
    prompts = [random.integers(0, vocabulary, prompt).astype(np.int32) for _ in range(count)]
    return Batch(
        [prompt for prompt in prompts for _ in range(size)],
        [random.integers(0, vocabulary, completion).astype(np.int32) for _ in range(count * size)],
        random.normal(size=count * size).tolist(),
    )


def step_wise(shape: str, count: int, steps: int, prompt: int, new: int) -> Batch:
    """Return rows of which each repeats the turns before it."""
    random, vocabulary = np.random.default_rng(0), SHAPES[shape]["vocab_size"]
    whole = [random.integers(0, vocabulary, prompt + steps * new).astype(np.int32) for _ in range(count)]
    starts = [prompt + step * new for step in range(steps)]
    return Batch(
        [row[:start] for row in whole for start in starts],
        [row[start : start + new] for row in whole for start in starts],
        random.normal(size=count * steps).tolist(),
    )


def make_policy(shape: str, place: Path) -> Path:
    """Write a model of that shape with random weights, unless it is there."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    target = place / shape
    if (target / "model.safetensors").is_file():
        return target
    config = Qwen2Config(**SHAPES[shape])
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if CUDA else torch.float32)
    model.save_pretrained(target)
    for file in policy_files(STARTER_DIRECTORY):
        if file.name.startswith("tokenizer"):  # never used: a policy has one
            shutil.copyfile(file, target / file.name)
    return target


# Measuring


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def clear() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def peak() -> Iterator[dict[str, float]]:
    """Yield a record that holds, afterwards, the most memory in use, and what was in use before."""
    found: dict[str, float] = {}
    if not CUDA:
        yield found
        return
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield found
    synchronize()
    found |= {"before": before / GIB, "peak": torch.cuda.max_memory_allocated() / GIB}


@contextlib.contextmanager
def gradients_freed(parameters: list[Any]) -> Iterator[None]:
    """Let no gradient stay."""

    def free(parameter: Any) -> None:
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(free) for p in parameters if p.requires_grad]
    yield
    for hook in hooks:
        hook.remove()


def measure(
    what: str, variant: str, batch: Batch, run: Callable[[], None], forget: Callable[[], None], model: Any,
    *, lora: bool, repeats: int = 5, copies: list[Any] | None = None, count: int | None = None, **more: Any,
) -> None:  # fmt: skip
    """Time a forward and backward pass and print a figure.

    Args:
        what: The subcommand.
        variant: What runs.
        batch: What it runs on.
        run: One pass; leaves gradients.
        forget: Frees them.
        model: Whose parameters are counted.
        lora: Whether adapters alone learn.
        repeats: Passes timed, after two that are not.
        copies: Of the parameters, that hold the gradients.
        count: Of the model's numbers, where weights in 4 bits hide it.
        more: Further facts.
    """
    parameters = list(model.parameters())
    weights = sum(p.numel() * p.element_size() for p in parameters) / GIB
    began = time.perf_counter()
    for _ in range(2):
        run()
        forget()
    synchronize()
    warm_up = time.perf_counter() - began
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - start)
        forget()
    with peak() as kept:
        run()
    held = [p.grad for p in [*parameters, *(copies or ())] if p.grad is not None]
    gradients = sum(each.numel() * each.element_size() for each in held) / GIB
    del held
    forget()
    with peak() as lean, gradients_freed(parameters):
        run()
    forget()
    seconds = sorted(times)[len(times) // 2]
    figure = {
        "what": what, "variant": variant, "tokens": batch.tokens, "rows": len(batch.prompts),
        "longest": max(batch.lengths), "seconds": round(seconds, 4), "spread": round(max(times) - min(times), 4),
        "tokens_per_second": round(batch.tokens / seconds), "warm_up_s": round(warm_up, 1), **more,
    }  # fmt: skip
    name = torch.cuda.get_device_name() if CUDA else "CPU"
    count = count or sum(p.numel() for name_, p in model.named_parameters() if "lora_" not in name_)
    work = work_of(batch.lengths)
    flops = training_flops(count, model.config.get_text_config(), work.computed, work.pairs, lora=lora)
    figure["tflops"] = round(flops / seconds / 1e12, 1)
    if (limit := device_peak(name)) is not None:
        figure["mfu"] = round(flops / seconds / limit, 3)
    if CUDA:
        figure |= {
            "weights_gib": round(weights, 2), "gradients_gib": round(gradients, 2), "peak_gib": round(kept["peak"], 2),
            "weights_and_activations_gib": round(lean["peak"] - lean["before"] + weights, 2),
        }  # fmt: skip
    print(json.dumps(figure | {"device": name, "torch": torch.__version__}), flush=True)


# What is measured


def grpo_on(batch: Batch, max_tokens: int = 16384) -> Objective:
    """Return GRPO's loss on a batch."""
    algorithm = lookup("algo", "grpo")
    config = TrainConfig(max_tokens_per_micro_batch=max_tokens)
    return Objective(algorithm, algorithm.Config(), config, batch.sequences(), 1.0, off_policy=OffPolicyConfig())


def ours(
    policy: Path, batch: Batch, what: str, variant: str, *, chunks: bool = True, repeats: int = 5, **settings: Any
) -> None:
    """Measure `Learner.accumulate` on GRPO's loss."""
    clear()
    budget = settings.pop("max_tokens_per_micro_batch", 1 << 20)
    config = OptimizerConfig(**{"lora_rank": 0, **settings})
    learner = Learner(config)
    learner.load(policy)
    objective = grpo_on(batch, budget)
    rows = list(range(len(batch.prompts)))

    def run() -> None:
        learner.accumulate(*Update(objective).watched(learner, rows))

    kept = dict(logprobs.CHUNK_ELEMENTS)
    if not chunks:
        logprobs.CHUNK_ELEMENTS |= dict.fromkeys(kept, 1 << 62)
    try:
        measure(
            what, variant, batch, run, learner.strategy.forget_gradients, learner.model, lora=bool(learner.lora_rank),
            repeats=repeats, copies=learner.strategy.trained[0].masters.stepped, count=learner.parameters,
            packed=learner.packed,
        )  # fmt: skip
    finally:
        logprobs.CHUNK_ELEMENTS |= kept


def bare_model(policy: Path, rank: int) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16 if CUDA else torch.float32)
    model = model.to(DEVICE)
    if rank:
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=rank, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, settings)
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def plain(policy: Path, batch: Batch, what: str, *, rank: int = 0) -> None:
    """Measure what one writes first: row by row without padding, whole logits, checkpointing on."""
    clear()
    model = bare_model(policy, rank)
    rows = [
        (torch.from_numpy(np.concatenate([p, c])).long()[None].to(DEVICE), len(p), a)
        for p, c, a in zip(batch.prompts, batch.completions, batch.advantages, strict=True)
    ]
    total = sum(len(c) for c in batch.completions)

    def run() -> None:
        for ids, start, advantage in rows:
            logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].float()
            logp = logits.log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0]
            ratio = (logp - logp.detach()).exp()
            (-(ratio * advantage).sum() / total).backward()

    measure(what, "plain loop", batch, run, lambda: model.zero_grad(set_to_none=True), model, lora=bool(rank))


def plain_batched(policy: Path, shape: str, what: str, *, rank: int = 0) -> None:
    """Measure what one writes next: rows of one length in one pass, log-probs in checkpointed chunks.

    It needs data without padding: 8 rows of 256 prompt and 1,024 completion tokens each.
    """
    from torch.utils.checkpoint import checkpoint

    clear()
    batch, model = made_up(shape, 8, 256, 1024, 1024), bare_model(policy, rank)
    start, total = len(batch.prompts[0]), sum(len(c) for c in batch.completions)
    rows = [np.concatenate([p, c]) for p, c in zip(batch.prompts, batch.completions, strict=True)]
    ids = torch.from_numpy(np.stack(rows)).long().to(DEVICE)
    advantages = torch.tensor(batch.advantages, device=DEVICE)[:, None].expand(-1, ids.shape[1] - start).flatten()
    base = model.get_base_model() if rank else model

    def chunk(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return base.lm_head(states).float().log_softmax(-1).gather(-1, labels[:, None])[:, 0]

    def run() -> None:
        states = base.model(input_ids=ids, use_cache=False).last_hidden_state[:, start - 1 : -1].flatten(0, 1)
        pieces = zip(states.split(1024), ids[:, start:].flatten().split(1024), strict=True)
        logp = torch.cat([checkpoint(chunk, *piece, use_reentrant=False) for piece in pieces])
        ratio = (logp - logp.detach()).exp()
        (-(ratio * advantages).sum() / total).backward()

    measure(
        what, "plain, rows of one length in one pass", batch, run, lambda: model.zero_grad(set_to_none=True), model,
        lora=bool(rank),
    )  # fmt: skip


def trl(policy: Path, batch: Batch, what: str, *, rank: int = 0, checkpointing: bool = True) -> None:
    """Measure the loss and backward pass of TRL's GRPO trainer, padded as it pads."""
    clear()
    variant = "trl" if checkpointing else "trl, nothing computed again"
    try:
        run, trained, version = trl_pass(policy, batch, len(batch.prompts), rank=rank, checkpointing=checkpointing)
    except ImportError as error:
        print(json.dumps({"what": what, "variant": variant, "left_out": str(error)}), flush=True)
        return
    forget = partial(trained.zero_grad, set_to_none=True)
    measure(what, variant, batch, run, forget, trained, lora=bool(rank), version=version)


def trl_pass(
    policy: Path, batch: Batch, rows: int, *, rank: int = 0, checkpointing: bool = True
) -> tuple[Callable[[], None], Any, str]:
    """Return a forward and backward pass of TRL's GRPO trainer, so many rows at a time, its model and its version.

    Its trainer turns checkpointing on in `train`, which is not called here: it is turned on as it would be there.

    Raises:
        ImportError: TRL is not installed.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer, __version__  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch, per_device_train_batch_size=rows, num_generations=rows, bf16=CUDA, use_cpu=not CUDA,
            gradient_checkpointing=checkpointing, gradient_checkpointing_kwargs={"use_reentrant": False}, report_to=[],
            max_completion_length=max(len(c) for c in batch.completions), loss_type="dapo", beta=0.0,
        )  # fmt: skip
        model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16 if CUDA else torch.float32)
        adapters = None
        if rank:
            from peft import LoraConfig

            adapters = LoraConfig(r=rank, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
        trainer = GRPOTrainer(
            model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
            train_dataset=Dataset.from_dict({"prompt": ["a"] * rows}),
            processing_class=AutoTokenizer.from_pretrained(policy), peft_config=adapters,
        )  # fmt: skip
    if checkpointing:
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = trainer.accelerator.prepare(trainer.model).train()
    trainer.current_gradient_accumulation_steps = 1

    def padded(rows: list[np.ndarray], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(map(len, rows))
        ids, mask = (torch.zeros(len(rows), longest, dtype=torch.int64) for _ in range(2))
        for index, row in enumerate(rows):
            place = slice(longest - len(row), None) if left else slice(len(row))
            ids[index, place], mask[index, place] = torch.from_numpy(row).long(), 1
        return ids.to(DEVICE), mask.to(DEVICE)

    total = torch.tensor(sum(len(c) for c in batch.completions), device=DEVICE)
    passes = []
    for start in range(0, len(batch.prompts), rows):
        part = slice(start, start + rows)
        prompt_ids, prompt_mask = padded(batch.prompts[part], left=True)
        completion_ids, completion_mask = padded(batch.completions[part], left=False)
        passes.append({
            "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids,
            "completion_mask": completion_mask, "advantages": torch.tensor(batch.advantages[part], device=DEVICE),
            "num_items_in_batch": total,
        })  # fmt: skip

    def run() -> None:
        for inputs in passes:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(trained, dict(inputs))
            trainer.accelerator.backward(loss)

    return run, trained, __version__


PREFIXES: dict[str, Callable[[str], Batch]] = {
    "16 x (700 + 100)": lambda shape: groups_of(shape, 4, 16, 700, 100),
    "16 x (2048 + 256)": lambda shape: groups_of(shape, 2, 16, 2048, 256),
    "16 x (130 + 20)": lambda shape: groups_of(shape, 16, 16, 130, 20),
    "8 x (256 + 640)": lambda shape: groups_of(shape, 4, 8, 256, 640),
    "8 steps of 500 after 1000": lambda shape: step_wise(shape, 2, 8, 1000, 500),
}
TINY_PREFIXES: dict[str, Callable[[str], Batch]] = {
    "4 x (60 + 10)": lambda shape: groups_of(shape, 2, 4, 60, 10),
    "4 steps of 20 after 50": lambda shape: step_wise(shape, 1, 4, 50, 20),
}
"""On a CPU."""


def prefixes(policy: Path, shape: str, compiled: list[bool], only: str | None, budget: int = 16384) -> None:
    """Measure passes over rows with shared prefixes, one model for all: computed once, and as they are; then TRL."""
    batches = {name: make(shape) for name, make in (PREFIXES if CUDA else TINY_PREFIXES).items()}
    if only is not None:
        batches = {name: batch for name, batch in batches.items() if re.search(only, name)}
    seconds: dict[tuple[str, str], float] = {}

    def timed(name: str, variant: str, run: Callable[[], None], forget: Callable[[], None], parameters: Any) -> None:
        batch = batches[name]
        run()
        forget()
        with peak() as lean, gradients_freed(list(parameters)):
            run()
        forget()
        times = []
        with peak() as whole:
            for _ in range(3):
                synchronize()
                start = time.perf_counter()
                run()
                synchronize()
                times.append(time.perf_counter() - start)
                forget()
        seconds[name, variant] = took = sorted(times)[1]
        tree = prefix_tree([np.concatenate(row) for row in zip(batch.prompts, batch.completions, strict=True)])
        figure: dict[str, Any] = {
            "what": "prefix", "batch": name, "variant": variant, "rows": len(batch.prompts), "tokens": batch.tokens,
            "once": tree.computed, "seconds": round(took, 4), "spread": round(max(times) - min(times), 4),
            "tokens_per_second": round(batch.tokens / took),
        }  # fmt: skip
        if CUDA:
            activations = round(lean["peak"] - lean["before"], 2)
            figure |= {"activations_gib": activations, "peak_gib": round(whole["peak"], 2)}
        plainly = seconds.get((name, variant.replace("shared", "plain packing")))
        if "shared" in variant and plainly:
            figure |= {
                "times_plain_packing": round(plainly / took, 2), "token_ratio": round(tree.tokens / tree.computed, 2),
                "of_token_ratio": round(plainly / took / (tree.tokens / tree.computed), 2),
            }  # fmt: skip
        if variant == "trl":
            figure |= {
                f"{other} over trl": round(took / seconds[name, other], 2)
                for other in ("plain packing", "shared")
            }  # fmt: skip
        print(json.dumps(figure), flush=True)

    def ours_(compile_: bool) -> Learner:
        clear()
        learner = Learner(OptimizerConfig(lora_rank=0, gradient_checkpointing=1.0, compile=compile_))
        learner.load(policy)
        assert learner.shares
        for name, batch in batches.items():
            objective, rows = grpo_on(batch, budget), list(range(len(batch.prompts)))
            for variant, shares in (("plain packing", False), ("shared", True)):
                learner.shares = shares
                timed(
                    name, f"{variant}{', compiled' if compile_ else ''}",
                    lambda o=objective, r=rows: learner.accumulate(*Update(o).watched(learner, r)),
                    learner.strategy.forget_gradients, learner.model.parameters(),
                )  # fmt: skip
        return learner

    learner = ours_(False)
    agreement(learner, batches)
    del learner
    for name, batch in batches.items():
        clear()
        try:
            run, trained, _ = trl_pass(policy, batch, max(2, budget // max(batch.lengths)))
        except ImportError as error:
            print(json.dumps({"what": "prefix", "variant": "trl", "left_out": str(error)}), flush=True)
            break
        timed(name, "trl", run, partial(trained.zero_grad, set_to_none=True), trained.parameters())
        del run, trained
    if True in compiled:
        ours_(True)


def agreement(learner: Learner, batches: dict[str, Batch]) -> None:
    """Print how far log-probs and gradients lie apart: shared, and under another kernel, from plain packing's."""
    layers = learner.model.model.layers
    weights = [
        weight
        for layer in (layers[0], layers[len(layers) // 2], layers[-1])
        for weight in (layer.self_attn.k_proj.weight, layer.mlp.down_proj.weight)
    ]
    chosen = packing.padding_is_faster
    try:
        for name, batch in batches.items():
            found = {}
            for way, shares, pads in (("plain", False, False), ("padded", False, True), ("shared", True, False)):
                learner.shares = shares
                packing.padding_is_faster = lambda lengths, answer=pads: answer
                objective, rows = grpo_on(batch), list(range(len(batch.prompts)))
                nats = np.concatenate(learner.logprobs(batch.sequences(), 1.0, 16384))
                learner.accumulate(*Update(objective).watched(learner, rows))
                slopes = torch.cat([learner.strategy.gradient_of(weight).flatten() for weight in weights])
                learner.strategy.forget_gradients()
                found[way] = (nats, slopes)
            nats, slopes = found["plain"]
            print(json.dumps({"what": "prefix", "batch": name, "variant": "agreement", **{
                way: {
                    "nats_mean": float(f"{np.abs(found[way][0] - nats).mean():.3g}"),
                    "nats_max": float(f"{np.abs(found[way][0] - nats).max():.3g}"),
                    "gradient": float(f"{(found[way][1] - slopes).norm() / slopes.norm():.3g}"),
                }
                for way in ("padded", "shared")
            }}), flush=True)  # fmt: skip
    finally:
        packing.padding_is_faster = chosen


def head(policy: Path, batch: Batch) -> None:
    """Measure nats of tokens from states, and their slopes by states and weights, without the layers below."""
    from transformers import AutoModelForCausalLM

    clear()
    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16 if CUDA else torch.float32)
    weight = model.to(DEVICE).get_output_embeddings().weight
    states = torch.randn(batch.tokens, weight.shape[1], device=DEVICE, dtype=weight.dtype, requires_grad=True)
    labels = torch.randint(0, weight.shape[0], (batch.tokens,), device=DEVICE)

    def whole() -> torch.Tensor:
        return torch.nn.functional.cross_entropy((states @ weight.T).float(), labels, reduction="sum")

    def liger() -> torch.Tensor:
        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction as Fused  # type: ignore[import-not-found]

        return Fused.apply(states, weight, labels, None, None, -100, 0.0, 0.0, "sum")[0]

    def ours_(fused: bool) -> torch.Tensor:
        return -logprobs.LogprobHead(model, fused=fused)(states, labels, 1.0)[0].sum()

    tries = {"whole logits": whole, "liger": liger, "ours, with entropy": lambda: ours_(False)}
    if CUDA:
        tries["ours, with entropy, compiled"] = lambda: ours_(True)
    for name, loss_of in tries.items():
        clear()
        try:
            times = []
            for _ in range(7):
                states.grad = weight.grad = None
                synchronize()
                start = time.perf_counter()
                loss = loss_of()
                loss.backward()
                synchronize()
                times.append(time.perf_counter() - start)
            states.grad = weight.grad = None
            with peak() as found:
                loss_of().backward()
        except ImportError as error:
            print(json.dumps({"what": "head", "variant": name, "left_out": str(error)}), flush=True)
            continue
        print(json.dumps({
            "what": "head", "variant": name, "tokens": batch.tokens, "vocabulary": weight.shape[0],
            "ms": round(sorted(times[2:])[2] * 1e3, 2), "nats_per_token": round(float(loss) / batch.tokens, 4),
            **({"more_gib": round(found["peak"] - found["before"], 2)} if CUDA else {}),
        }), flush=True)  # fmt: skip


def optimizer_step(policy: Path, batch: Batch, **settings: Any) -> None:
    """Measure a whole step, and what the optimizer holds."""
    clear()
    learner = Learner(OptimizerConfig(**settings))
    learner.load(policy)
    objective = grpo_on(batch)
    rows, times = list(range(len(batch.prompts))), []
    train = TrainConfig(**settings, max_tokens_per_micro_batch=batch.tokens)
    shape = learner.model.config.get_text_config().to_dict()
    estimate = training_memory(
        train, shape, learner.parameters, learner.lora_rank, on_gpu=CUDA, processes=learner.world.size
    )
    with peak() as found:
        for _ in range(5):
            synchronize()
            start = time.perf_counter()
            Update(objective).step(learner, rows)
            synchronize()
            times.append(time.perf_counter() - start)
    seconds = sorted(times[1:])[1]
    if not learner.world.is_main:
        return
    print(json.dumps({
        "what": "step", "variant": json.dumps(settings), "processes": learner.world.size, "seconds": round(seconds, 4),
        "tokens_per_second": round(batch.tokens / seconds),
        **({"peak_gib": round(found["peak"], 2)} if CUDA else {}), "estimate_gib": round(estimate.total / GIB, 2),
    }), flush=True)  # fmt: skip


def saving(policy: Path, batch: Batch, place: Path, **settings: Any) -> None:
    """Measure what is written after a step, beside transformers and `torch.save` at their defaults."""
    clear()
    learner = Learner(OptimizerConfig(**settings))
    learner.load(policy)
    objective = grpo_on(batch)
    rows, times, size = list(range(len(batch.prompts))), dict[str, list[float]](), 0.0
    target = place / "saved"

    def timed(name: str, work: Callable[[], Any]) -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        synchronize()
        start = time.perf_counter()
        work()
        times.setdefault(name, []).append(time.perf_counter() - start)

    def torchs() -> None:
        trained = learner.strategy.trained[0]
        states = {"optimizer": trained.optimizer.state_dict(), "masters": trained.masters.state()}
        torch.save(states, target / "state.pt")

    for _ in range(2):  # the first time, memory is got from the host
        Update(objective).step(learner, rows)
        timed("policy_at_defaults", lambda: learner.model.save_pretrained(target / "policy"))
        timed("state_at_defaults", torchs)
        for name, settings_ in {"policy": {"with_state": False}, "both": {}, "both_beside": {"beside": True}}.items():
            learner._policy = policy  # where the first step began
            timed(name, lambda s=settings_: learner.save(target / "policy", target / "state", [1, 2, 3], **s))
            start = time.perf_counter()
            learner.settle()
            times.setdefault(f"{name}_in_place", []).append(times[name][-1] + time.perf_counter() - start)
        size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file()) / GIB
        timed("state", lambda: learner.save_state(target / "state"))
        timed("state_beside", lambda: learner.save_state(target / "state", beside=True))
        learner.settle()
    took = {name: round(found[-1], 2) for name, found in times.items()}
    print(json.dumps({
        "what": "save", "variant": json.dumps(settings), "gib": round(size, 2),
        **{f"{name}_seconds": each for name, each in took.items()},
        "first_state_beside_seconds": round(times["state_beside"][0], 2),
        "state_ratio": round(took["state_at_defaults"] / took["state"], 2),
        "state_beside_ratio": round(took["state_at_defaults"] / took["state_beside"], 2),
    }), flush=True)  # fmt: skip
    shutil.rmtree(target)


def profile(policy: Path, batch: Batch, **settings: Any) -> None:
    """Print the kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile as profiler

    learner = Learner(OptimizerConfig(lora_rank=0, **settings))
    learner.load(policy)
    objective = grpo_on(batch)
    rows = list(range(len(batch.prompts)))
    for _ in range(3):
        learner.accumulate(*Update(objective).watched(learner, rows))
    with profiler(activities=[ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU]) as found:
        learner.accumulate(*Update(objective).watched(learner, rows))
        synchronize()

    def took(event: Any) -> float:
        return event.self_device_time_total if CUDA else event.self_cpu_time_total

    events = sorted(found.key_averages(), key=took, reverse=True)
    total = sum(map(took, events))
    for event in events[:25]:
        print(json.dumps({
            "what": "profile", "settings": settings, "kernel": event.key[:120], "ms": round(took(event) / 1e3, 2),
            "share": round(took(event) / total, 3), "calls": event.count,
        }), flush=True)  # fmt: skip


def small(policy: Path, batch: Batch, place: Path, name: str, *, max_tokens: int = 16384, **settings: Any) -> None:
    """Measure a step of a small model: its passes, the optimizer's step, what is written, and what the host does.

    `device_seconds` is what all kernels of the passes take; the rest of `pass_seconds` the device waits for the host.
    """
    from torch.profiler import ProfilerActivity, profile as profiler

    clear()
    learner = Learner(OptimizerConfig(**settings))
    learner.load(policy)
    objective, rows, update = grpo_on(batch, max_tokens), list(range(len(batch.prompts))), None
    times: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[[], Any]) -> None:
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        times.setdefault(what, []).append(time.perf_counter() - start)

    for _ in range(4):
        update = Update(objective)
        timed("pass_seconds", lambda of=update: learner.accumulate(*of.watched(learner, rows)))
        timed("seen_seconds", update.seen)
        timed("optimizer_seconds", learner.strategy.step)
        for state in (True, False):
            shutil.rmtree(place / "small", ignore_errors=True)
            (place / "small").mkdir()
            learner._policy, target = policy, place / "small"
            timed(
                f"save_{'' if state else 'policy_'}seconds",
                lambda s=state, t=target: learner.save(t / "policy", t / "state", [1, 2, 3], with_state=s, beside=True),
            )
            learner.settle()
    with profiler(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * CUDA]) as found:
        learner.accumulate(*Update(objective).watched(learner, rows))
        synchronize()
    events = found.key_averages()

    def calls(*names: str) -> int:
        return sum(event.count for event in events if event.key in names)

    print(json.dumps({
        "what": "small", "variant": name, "tokens": batch.tokens, "trained_parameters": learner.trained_parameters,
        **{what: round(min(took), 4) for what, took in times.items()},
        "first_pass_seconds": round(times["pass_seconds"][0], 2),
        "device_seconds": round(sum(event.self_device_time_total for event in events) / 1e6, 4) if CUDA else None,
        "launches": calls("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx"),
        "graphs": calls("cudaGraphLaunch"), "waits": calls("cudaStreamSynchronize", "cudaDeviceSynchronize"),
        "numbers_read": calls("aten::_local_scalar_dense"),
    }), flush=True)  # fmt: skip
    shutil.rmtree(place / "small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(SUBCOMMANDS))
    parser.add_argument("--shape", choices=list(SHAPES), default="1.5b")
    parser.add_argument("--place", type=Path, help="where the model is written, and found the next time")
    parser.add_argument("--only", help="run the variants whose name has this pattern")
    parser.add_argument("--no-compile", action="store_true", help="leave compiled variants out")
    given = parser.parse_args()
    compiled = [False] if given.no_compile or not CUDA else [False, True]
    with contextlib.ExitStack() as stack:
        place = given.place or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        policy = make_policy(given.shape, place)
        usual = made_up(given.shape, 8, 256, 256, 1024)
        wide = made_up(given.shape, 2, 256, 7936, 7936)

        def variant(name: str, work: Callable[[], None]) -> None:
            if given.only is None or re.search(given.only, name):
                try:
                    work()
                except torch.OutOfMemoryError as error:
                    print(json.dumps({"what": given.what, "variant": name, "failed": str(error)[:80]}), flush=True)

        if given.what in ("full", "lora"):
            rank = 32 if given.what == "lora" else 0
            variant("plain loop", lambda: plain(policy, usual, given.what, rank=rank))
            variant("plain, batched", lambda: plain_batched(policy, given.shape, given.what, rank=rank))
            for compile_ in compiled:
                for share in (1.0, 0.75):
                    name = f"ours, {share:.0%} of layers computed again{', compiled' if compile_ else ''}"
                    variant(name, lambda n=name, s=share, c=compile_: ours(
                        policy, usual, given.what, n, lora_rank=rank, gradient_checkpointing=s, compile=c,
                    ))  # fmt: skip
            for again in (True, False):
                name = f"trl{'' if again else ', nothing computed again'}"
                variant(name, lambda a=again: trl(policy, usual, given.what, rank=rank, checkpointing=a))
        elif given.what == "qlora":
            for share in (1.0, 0.75):
                name = f"nf4, {share:.0%} of layers computed again"
                variant(name, lambda n=name, s=share: ours(
                    policy, usual, "qlora", n, lora_rank=32, quantization="nf4", gradient_checkpointing=s,
                ))  # fmt: skip
        elif given.what == "head":
            head(policy, usual)
        elif given.what == "small":
            batch = groups_of(given.shape, 64 if CUDA else 4, 16, 130, 20)
            variants: dict[str, dict[str, Any]] = {
                "as it comes": {}, "whole model": {"lora_rank": 0},
                "whole model, nothing computed again": {"lora_rank": 0, "gradient_checkpointing": 0.0},
                "whole model, 65,536 tokens a pass": {"lora_rank": 0, "max_tokens": 65536},
            }  # fmt: skip
            if True in compiled:
                variants["whole model, compiled"] = {"lora_rank": 0, "compile": True}
                variants["whole model, compiled, nothing computed again"] = {
                    "lora_rank": 0, "compile": True, "gradient_checkpointing": 0.0
                }  # fmt: skip
            for name, settings in variants.items():
                variant(name, lambda n=name, s=settings: small(policy, batch, place, n, **s))
        elif given.what == "long":
            for rank in (32, 0):
                what = f"long, {'LoRA' if rank else 'full'}"
                variant(f"{what}, plain loop", lambda r=rank, w=what: plain(policy, wide, w, rank=r))
                for again in (True, False):
                    name = f"{what}, trl{'' if again else ', nothing computed again'}"
                    variant(name, lambda r=rank, w=what, a=again: trl(policy, wide, w, rank=r, checkpointing=a))
                for compile_ in compiled:
                    name = f"ours{', compiled' if compile_ else ''}"
                    variant(f"{what}, {name}", lambda n=name, r=rank, c=compile_, w=what: ours(
                        policy, wide, w, n, lora_rank=r, gradient_checkpointing=1.0, compile=c,
                    ))  # fmt: skip
        elif given.what == "ablation":
            for name, settings in {
                "all": {}, "padded": {"packing": False}, "whole logits": {"chunks": False},
                "nothing computed again": {"gradient_checkpointing": 0.0},
                "one row a pass": {"max_tokens_per_micro_batch": 1},
                **({"all, compiled": {"compile": True}} if True in compiled else {}),
            }.items():  # fmt: skip
                variant(name, lambda n=name, s=settings: ours(
                    policy, usual, "ablation", n, **{"gradient_checkpointing": 1.0, **s}
                ))  # fmt: skip
        elif given.what == "fill":
            for rows, share in ((32, 1.0), (32, 0.5), (64, 1.0)):
                for compile_ in compiled:
                    batch = made_up(given.shape, rows, 256, 256, 1024)
                    name = f"{rows} rows, {share:.0%} computed again{', compiled' if compile_ else ''}"
                    variant(name, lambda n=name, b=batch, s=share, c=compile_: ours(
                        policy, b, "fill", n, gradient_checkpointing=s, compile=c, repeats=3,
                    ))  # fmt: skip
        elif given.what == "step":
            tries: dict[str, dict[str, Any]] = {"full": {"lora_rank": 0}, "lora": {"lora_rank": 32}}
            if given.only:  # DeepSpeed is set up once in a process
                tries |= {
                    "zero3": {"lora_rank": 0, "strategy": "zero3"}, "zero2": {"lora_rank": 32, "strategy": "zero2"},
                    "qlora": {"lora_rank": 32, "quantization": "nf4"},
                    "8bit": {"lora_rank": 0, "optimizer": "adamw_8bit"},
                }  # fmt: skip
            for name, settings in tries.items():
                variant(name, lambda s=settings: optimizer_step(policy, usual, **s))
        elif given.what == "prefix":
            prefixes(policy, given.shape, compiled, given.only)
        elif given.what == "save":
            for settings in ({"lora_rank": 0}, {"lora_rank": 32}):
                saving(policy, usual, place, **settings)
        else:
            for compile_ in compiled:
                profile(policy, usual, gradient_checkpointing=1.0, compile=compile_)


if __name__ == "__main__":
    main()
