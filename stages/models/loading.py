"""What transformers makes of a policy's directory: its tokenizer, its model, and the tokens that end a turn.

An adapter is loaded on its base, which may be held in 4 bits.
"""

import gc
import logging
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.models.policy import TOKENIZER_FILES, find_base, is_adapter, read_errors, text_config
from nanoskyrl.stages.models.remote_code import trust

if TYPE_CHECKING:
    import torch

# peft calls transformers by the old name wherever it makes adapters; nobody here can fix that.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
# Whoever imports it, peft too, would read which kernels it does not find on a CPU.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

ALIGNED = 64
"""Bytes to which torch aligns what it allocates on a CPU."""
GARBAGE = (700, 10, 10)
"""Python's own thresholds of its collector, which the command `skyrl` raises while it imports."""


def load_tokenizer(path: Path) -> Any:
    """Return the policy's tokenizer, that of the base for an adapter that has none.

    Raises:
        InputError: its files cannot be read.
    """
    from transformers import AutoTokenizer

    if is_adapter(path) and not any((path / name).is_file() for name in TOKENIZER_FILES):
        path = find_base(path)
    with read_errors(f"the tokenizer of `{path}`"):
        tokenizer: Any = AutoTokenizer.from_pretrained(path, **trust())
        if not isinstance(tokenizer.model_max_length, int | float):
            raise TypeError(f"model_max_length is {tokenizer.model_max_length!r}")
    return tokenizer


def load_model(path: Path, *, dtype: "torch.dtype", device: str, quantization: str | None = None) -> Any:
    """Return the policy's model; for an adapter, the base with the adapter on it (a PeftModel).

    Args:
        path: The policy's directory.
        dtype: Of the weights, or, where they are quantized, of what is computed with them.
        device: Where it goes.
        quantization: nf4 holds the base in 4 bits a weight; None: as it is.

    Raises:
        InputError: its files cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    base = find_base(path) if is_adapter(path) else path
    with read_errors(base / "config.json", "Check it against the config of a model of its kind"):
        config: Any = AutoConfig.from_pretrained(base, **trust())
    context = getattr(config, "max_position_embeddings", 1)
    if not isinstance(context, int) or context < 1:
        raise InputError(
            f"`{base / 'config.json'}` has max_position_embeddings {context!r}", hint="Give the model's context length"
        )
    with read_errors(f"the model of `{base}`", "Check its config and weights, and its generation config"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            base,
            dtype=dtype,
            output_loading_info=True,
            **trust(),
            **(_quantized(dtype, device) if quantization else {}),
        )
        model, loading = loaded
    if quantization:
        _keep_unpacked(model)
    if missing := sorted(loading.get("missing_keys", ())):
        raise InputError(f"policy `{base}` lacks the weights `{missing[0]}`", hint="Save the whole model there")
    if is_adapter(path):
        from peft import PeftModel

        with read_errors(f"the adapter `{path}`", "Check its config and weights, and that it belongs to this base"):
            model = PeftModel.from_pretrained(model, str(path), is_trainable=True, autocast_adapter_dtype=False)
    if device == "cpu":
        align(model)
    else:
        gc.set_threshold(*GARBAGE)  # memory of a GPU that cycles hold cannot wait as long
    return model if quantization else cast(Any, model).to(device)


def align(model: Any) -> None:
    """Move weights that lie in a file, at whatever place its header left them, to where torch would have put them.

    Some products of a single row give other last digits by where a weight begins, and a policy is the same in any file.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % ALIGNED:
            tensor.data = tensor.data.clone()


def _quantized(dtype: "torch.dtype", device: str) -> dict[str, Any]:
    """Return what makes transformers load weights in 4 bits, as QLoRA does."""
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def _keep_unpacked(model: Any) -> None:
    """Leave weights in 4 bits as they are: some CPUs would pack them for inference, rounded and without a gradient."""
    from bitsandbytes.nn import Linear4bit  # type: ignore[import-not-found]

    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False


def check_vocabulary(path: Path, tokenizer: Any, embeddings: int) -> None:
    """Raise InputError if the tokenizer writes tokens that the model does not embed."""
    # Tokens added later may lie past the end unused: gemma-3-1b has one for images.
    if tokenizer.vocab_size > embeddings:
        raise InputError(
            f"the tokenizer of `{path}` has {tokenizer.vocab_size} tokens, and its model embeds {embeddings}",
            hint="Name a model with its own tokenizer, or resize the embeddings",
        )


def stop_ids(path: Path, tokenizer: Any, turn_ends: Iterable[int], embeddings: int) -> frozenset[int]:
    """Return every token that ends a turn: the model's EOS ids, the tokenizer's, and the template's ends of turns.

    Raises:
        InputError: a config cannot be read, or its EOS ids are no tokens of the model.
    """
    from transformers import GenerationConfig

    found: set[int] = set()
    base = find_base(path) if is_adapter(path) else path
    file = base / "generation_config.json"
    named: list[tuple[Path, Any]] = [(base / "config.json", text_config(path).get("eos_token_id"))]
    if file.is_file():
        with read_errors(file, "Fix it, or delete it"):
            named.append((file, GenerationConfig.from_pretrained(base).eos_token_id))
    for source, eos in named:
        for token in eos if isinstance(eos, list) else [eos] if eos is not None else []:
            if source is not file and not (type(token) is int and 0 <= token < embeddings):
                continue  # the default of a model's kind, which small ones have no token for
            if type(token) is not int or not 0 <= token < embeddings:
                raise InputError(
                    f"`{file}` has the eos_token_id {token!r}",
                    hint=f"Token ids are integers from 0 to {embeddings - 1}",
                )
            found.add(token)
    found.update(turn_ends)
    return frozenset(found if tokenizer.eos_token_id is None else {*found, tokenizer.eos_token_id})
