"""The recipe of the starter policy: a small model made from nothing, with good and bad habits.

A Qwen3-architecture model learns by supervision from traces that mix careful work (column
addition written out, a tool called and its result copied) with typical mistakes (a dropped
carry, a bare guess, missing tags, malformed and needless calls). Sampled at temperature 1
it is right about half of the time, although it can do the work: what reinforcement
learning then does is choose between its habits. Same seed, same machine and versions:
same bytes. The result ships in `starter_policy/`; `skyrl init --rebuild-starter` makes it again.
"""

import json
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from nanoskyrl.envs.actions import ANSWER, ANSWER_END, TOOL_CALL, TOOL_CALL_END
from nanoskyrl.envs.base import Message
from nanoskyrl.envs.tool_formats.own import tools_in_words
from nanoskyrl.envs.worlds.text_math.environment import INSTRUCTION
from nanoskyrl.envs.worlds.text_math.problems import generate, is_test
from nanoskyrl.envs.worlds.tool_use.environment import ToolUse, ToolUseConfig
from nanoskyrl.stages.models.kv_cache import forward, select_rows
from nanoskyrl.stages.models.rendering import Renderer

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = (
    ANSWER,
    ANSWER_END,
    TOOL_CALL,
    TOOL_CALL_END,
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<tools>",
    "</tools>",
)
"""One token each, and not special: decoding keeps them."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 8192
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class StarterConfig:
    """The recipe's amounts; the defaults make the policy that ships."""

    seed: int = 0
    hidden_size: int = 96
    layers: int = 3
    vocabulary: int = 640
    steps: int = 900
    math_rows: int = 56
    """Traces of sums in a step."""
    tool_rows: int = 40
    """Traces of tool use in a step."""
    other_rows: int = 8
    """Plain answers to other families of text_math in a step."""
    learning_rate: float = 5e-3
    warmup_steps: int = 40
    weight_decay: float = 0.01
    math_habits: tuple[float, ...] = (0.36, 0.24, 0.22, 0.18)
    """Shares of careful work, a dropped carry, a bare guess, and careful work without tags."""
    tool_habits: tuple[float, ...] = (0.36, 0.22, 0.18, 0.10, 0.14)
    """Shares of a right call, a bare guess, a malformed call, a needless search, and an answer without tags."""


def careful_sum(a: int, b: int) -> str:
    """Return column addition written out: 38+47 gives `8+7=15;3+4+1=8;` and the answer."""
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + units // 10
    return f"{a % 10}+{b % 10}={units};{a // 10}+{b // 10}+{units // 10}={tens};"


def sum_trace(rng: random.Random, habits: Sequence[float]) -> list[Message]:
    """Return one sum of two numbers from 0 to 99, answered by one of the habits."""
    while True:
        a, b = rng.randrange(100), rng.randrange(100)
        question = f"What is {a} + {b}?"
        if not is_test(question):
            break
    habit = rng.choices(range(4), habits)[0]
    dropped = (a // 10 + b // 10) * 10 + (a + b) % 10
    guess = max(0, a + b + rng.choice((-10, -2, -1, 0, 0, 1, 2, 10)))
    reply = (
        f"{careful_sum(a, b)}{ANSWER}{a + b}{ANSWER_END}",
        f"Quick:{ANSWER}{dropped}{ANSWER_END}",
        f"{ANSWER}{guess}{ANSWER_END}",
        f"{careful_sum(a, b)}{a + b}",
    )[habit]
    return [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}, {"role": "assistant", "content": reply}]


def tool_trace(rng: random.Random, habits: Sequence[float], environment: ToolUse) -> list[Message]:
    """Return one product of two two-digit numbers, worked by one of the habits; the tools really run."""
    while True:
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        question = f"What is {a} * {b}?"
        if not is_test(question):
            break
    right = f'{TOOL_CALL}{{"tool": "calculator", "args": {{"expression": "{a}*{b}"}}}}{TOOL_CALL_END}'
    wrong_key = f'{TOOL_CALL}{{"tool": "calculator", "args": {{"expr": "{a}*{b}"}}}}{TOOL_CALL_END}'
    cut = f'{TOOL_CALL}{{"tool": "calculator", "args": {{"expression": "{a}*{b}"{TOOL_CALL_END}'
    needless = f'{TOOL_CALL}{{"tool": "search", "args": {{"query": "{a}*{b}"}}}}{TOOL_CALL_END}'
    answer = f"{ANSWER}{a * b}{ANSWER_END}"
    guess = f"{ANSWER}{a * b + rng.choice((-100, -10, -1, 1, 10, 100))}{ANSWER_END}"
    mend = rng.random() < 0.5
    actions = (
        [right, answer],
        [guess],
        [rng.choice((wrong_key, cut)), *([right, answer] if mend else [guess])],
        [needless, *([right, answer] if mend else [guess])],
        [right, str(a * b)],
    )[rng.choices(range(5), habits)[0]]
    messages: list[Message] = [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}]
    episode = environment.start()
    for action in actions:
        messages += [{"role": "assistant", "content": action}, *episode.step(action).messages]
    return messages


def other_trace(rng: random.Random, pool: Sequence[tuple[str, str]]) -> list[Message]:
    """Return a problem of another family with its answer at once: the form, more than the skill."""
    question, answer = rng.choice(pool)
    return [
        {"role": "user", "content": f"{question}\n{INSTRUCTION}"},
        {"role": "assistant", "content": f"{ANSWER}{answer}{ANSWER_END}"},
    ]


def build_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: digits apart, tags one token each, ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, TURN_START, TURN_END]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TAGS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT, additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False, model_max_length=CONTEXT,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(config: StarterConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return the untrained model."""
    vocabulary = tokenizer.get_vocab()
    end, pad = vocabulary[TURN_END], vocabulary[END_OF_TEXT]
    shape = Qwen3Config(
        vocab_size=config.vocabulary, hidden_size=config.hidden_size, intermediate_size=config.hidden_size * 3,
        num_hidden_layers=config.layers, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=CONTEXT, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=end, pad_token_id=pad, dtype="float32",
    )  # fmt: skip
    model = Qwen3ForCausalLM(shape)
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = pad
    return model


def encode_trace(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> tuple[list[int], list[int]]:
    """Return a trace's tokens and labels; only what the assistant wrote, its end of turn included, is learnt."""
    ids: list[int] = []
    labels: list[int] = []

    def add(tokens: list[int], learnt: bool) -> None:
        ids.extend(tokens)
        labels.extend(tokens if learnt else [IGNORED] * len(tokens))

    end = renderer.turn_end_id
    assert end is not None
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    add(renderer.prompt_ids(messages[:first], tools), learnt=False)
    index = first
    while index < len(messages):
        add([*renderer.encode(messages[index]["content"]), end], learnt=True)
        after = index + 1
        while after < len(messages) and messages[after]["role"] != "assistant":
            after += 1
        if after < len(messages):
            add(renderer.continuation_ids(messages[index + 1 : after], end), learnt=False)
        index = after
    return ids, labels


def batch_loss(model: Qwen3ForCausalLM, rows: Sequence[tuple[list[int], list[int]]], shared: int) -> torch.Tensor:
    """Return the summed loss of a batch whose rows begin with the same `shared` tokens, computed once."""
    width = max(len(ids) for ids, _ in rows) - shared
    ids = torch.full((len(rows), width), int(model.config.pad_token_id or 0))
    labels = torch.full((len(rows), width), IGNORED)
    for i, (row, row_labels) in enumerate(rows):
        ids[i, : len(row) - shared] = torch.tensor(row[shared:])
        labels[i, : len(row) - shared] = torch.tensor(row_labels[shared:])
    kv = None
    if shared:
        _, kv = forward(model, kv, input_ids=torch.tensor([rows[0][0][:shared]]), logits_to_keep=1)
        kv = select_rows(kv, torch.zeros(len(rows), dtype=torch.long))
    # Rows are padded on the right and attention is causal, so padding needs no mask.
    positions = torch.arange(shared, shared + width)[None]
    logits = forward(model, kv, input_ids=ids, position_ids=positions)[0].logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def common_prefix(rows: Sequence[list[int]]) -> int:
    """Return how many tokens all rows begin with."""
    shortest, longest = min(rows), max(rows)
    for i, (a, b) in enumerate(zip(shortest, longest, strict=False)):
        if a != b:
            return i
    return min(len(shortest), len(longest))


def build_starter(
    output: Path, config: StarterConfig = StarterConfig(), *, report: Callable[[str], None] = print
) -> None:
    """Make the starter policy and put it at `output`, a Hugging Face directory."""
    as_it_was = torch.are_deterministic_algorithms_enabled()
    # Else the gradient of the shared prompt is summed in any order.
    torch.use_deterministic_algorithms(True)
    try:
        model, tokenizer = train_starter(config, report)
    finally:
        torch.use_deterministic_algorithms(as_it_was)
    _save(output, model, tokenizer, config)


def train_starter(
    config: StarterConfig, report: Callable[[str], None]
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Return the trained model and its tokenizer."""
    rng = random.Random(config.seed)
    torch.manual_seed(config.seed)
    environment = ToolUse(ToolUseConfig())
    tools = [tool.schema for tool in environment.tools.values()]
    pool = [
        (p.question, p.answer)
        for family in ("arithmetic", "multi_step", "logic")
        for p in generate(family, 1, "train", 400)
    ]

    sample = [
        *(sum_trace(rng, config.math_habits) for _ in range(400)),
        *(tool_trace(rng, config.tool_habits, environment) for _ in range(400)),
        *(other_trace(rng, pool) for _ in range(400)),
    ]
    # What the template writes around messages, and the schemas, are part of what is to be spelt.
    words = [str(message["content"]) for trace in sample for message in trace]
    words += [tools_in_words(tools)] * 50
    words += ["system\n", "user\n", "assistant\n", "tool\n"] * 50
    tokenizer = build_tokenizer(words, config.vocabulary)
    renderer = Renderer(tokenizer)
    model = build_model(config, tokenizer)
    report(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {len(tokenizer)} tokens")

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=config.weight_decay
    )

    def rate(step: int) -> float:
        warm = min(1.0, (step + 1) / config.warmup_steps)
        return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / config.steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(config.steps):
        sums = [encode_trace(renderer, sum_trace(rng, config.math_habits), ()) for _ in range(config.math_rows)]
        others = [encode_trace(renderer, other_trace(rng, pool), ()) for _ in range(config.other_rows)]
        calls = [
            encode_trace(renderer, tool_trace(rng, config.tool_habits, environment), tools)
            for _ in range(config.tool_rows)
        ]
        total = torch.zeros(())
        count = sum(label != IGNORED for rows in (sums, others, calls) for _, labels in rows for label in labels)
        for rows in (sums, others, calls):
            if rows:
                loss = batch_loss(model, rows, common_prefix([ids for ids, _ in rows]) if rows is calls else 0) / count
                loss.backward()
                total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == config.steps - 1:
            report(f"step {step:4d}  loss {total:.3f} nats a token")
    return model, tokenizer


def _save(output: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, config: StarterConfig) -> None:
    import tokenizers
    import transformers

    from nanoskyrl.stages.core.digests import digest_file
    from nanoskyrl.stages.core.storage import make_directory

    make_directory(output.parent)
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        made = Path(scratch) / "policy"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        manifest = {
            "recipe": "nanoskyrl.stages.models.starter",
            "recipe_digest": digest_file(Path(__file__)),
            "settings": asdict(config),
            "packages": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "tokenizers": tokenizers.__version__,
            },
        }
        (made / "starter.json").write_text(json.dumps(manifest, indent=2) + "\n")
        if output.exists():
            shutil.rmtree(output)
        made.rename(output)
