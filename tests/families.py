"""Tiny models of every causal family that transformers knows, by one recipe, and what is asked of each.

python tests/families.py     writes the table of docs/models.md
"""

import dataclasses
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from nanoskyrl.stages.core.errors import NanoskyrlError
from nanoskyrl.stages.engines.base import HfConfig, Request, SamplingParams
from nanoskyrl.stages.engines.hf import HfEngine
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.train_config import OptimizerConfig
from nanoskyrl.stages.models.adapters import Targets
from nanoskyrl.stages.models.loading import load_model
from nanoskyrl.stages.models.logprobs import sequence_logprobs
from nanoskyrl.stages.models.packing import check_padding, prepare_packing
from nanoskyrl.stages.models.policy import STARTER_DIRECTORY, TOKENIZER_FILES

RECIPE: dict[str, Any] = {
    "vocab_size": 640, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # Experts.
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 32, "moe_layer_start_index": 1,
    # Attention through a bottleneck, and indexers of sparse attention.
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "index_n_heads": 2, "index_head_dim": 8, "index_topk": 64,
    # Recurrences and convolutions.
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64,
    "mamba_d_state": 8, "ssm_state_size": 8, "lru_width": 32, "state_size": 8,
    # Images and sounds, which nobody sends.
    "image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 4, "out_hidden_size": 32, "vision_output_dim": 32,
    # Decoders that were made for an encoder, and encoders that were made decoders.
    "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "encoder_layers": 2,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "is_decoder": True,
}  # fmt: skip
"""Settings that a family's config does not have are left out."""
EXPERTS = {
    "deepseek_v3": ["experts.down_proj", "experts.gate_up_proj"],
    "ernie4_5_moe": ["experts.down_proj", "experts.gate_up_proj"],
    "glm4_moe": ["experts.down_proj", "experts.gate_up_proj"],
    "gpt_oss": ["experts.down_proj", "experts.gate_up_proj"],
    "granitemoe": ["experts.down_proj", "experts.gate_up_proj"],
    "jetmoe": ["experts.input_linear.weight", "mlp.output_linear.weight"],
    "llama4_text": ["experts.down_proj", "experts.gate_up_proj"],
    "longcat_flash": ["experts.down_proj", "experts.gate_up_proj"],
    "mixtral": ["experts.down_proj", "experts.gate_up_proj"],
    "olmoe": ["experts.down_proj", "experts.gate_up_proj"],
    "qwen2_moe": ["experts.down_proj", "experts.gate_up_proj"],
    "qwen3_moe": ["experts.down_proj", "experts.gate_up_proj"],
}
"""Of each family, the ends of the parameters that hold its experts."""
TEMPERATURE = 0.8
LENGTHS = (3, 30, 7, 12, 30, 5)
WRITTEN = 8


def every_family() -> list[str]:
    """Return the kinds of model that AutoModelForCausalLM makes, by the names that their configs have."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def settings_of(config_class: Any) -> dict[str, Any]:
    """Return the recipe for a config and those inside it."""
    known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    found = {name: value for name, value in RECIPE.items() if name in known}
    for name, inner in config_class.sub_configs.items():
        if dataclasses.is_dataclass(inner):
            found[name] = settings_of(inner)
    found |= SETTINGS.get(config_class.model_type, {})
    return {name: value for name, value in found.items() if value is not ...}


def write_family(kind: str, directory: Path, **changes: Any) -> None:
    """Write a tiny model with random weights, and the starter's tokenizer beside it."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**settings_of(CONFIG_MAPPING[kind]), **changes})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config, dtype=torch.float32).parameters())
        if size > 20_000_000:
            raise ValueError(f"the recipe makes {size} parameters")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # the usual initial weights are so small that attention hardly matters
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    for name in (*TOKENIZER_FILES, "chat_template.jinja"):
        if (STARTER_DIRECTORY / name).is_file():
            (directory / name).write_bytes((STARTER_DIRECTORY / name).read_bytes())


LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
LATENT = {"head_dim": 4, "num_key_value_heads": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), LINEAR),
    **dict.fromkeys(
        (
            "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3",
            "sarvam_mla", "youtu", "longcat_flash",
        ),
        LATENT,
    ),
    "bailing_hybrid": {**LINEAR, **LATENT, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 64},
    },
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "vocab_size_per_layer_input": 640, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": {"vocab_size_per_layer_input": 640, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "inkling2_loop_text": {"unpadded_vocab_size": 640},
    "inkling2_text": {"unpadded_vocab_size": 600},
    "kimi_linear": {**LINEAR, **LATENT},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xlnet": {"d_head": 8},
    "xlstm": {"num_heads": 8, "head_dim": ..., "qk_dim_factor": 2.0, "v_dim_factor": 2.0},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What the recipe does not make, or would make without the layers that a family is known for. ...: left out."""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 600, (length,), generator=generator).tolist() for length in LENGTHS]


def alone(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the log-probs of a row's tokens but the first by definition, at the temperature."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    return (logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]


def generation(policy: Path) -> tuple[str, float]:
    """Return how the engine runs a family, and how far its log-probs are from those of rows alone, in nats."""
    engine = HfEngine(HfConfig(device="cpu", dtype="float32"))
    try:
        engine.load(policy)
    except NanoskyrlError as error:
        return f"refused: {error}", 0.0
    engine._stop_ids = frozenset({1 << 30})
    asked = [Request(prompt_ids=ids, seed=row, max_tokens=WRITTEN - row) for row, ids in enumerate(prompts())]
    made = engine.generate(asked, SamplingParams(temperature=TEMPERATURE))
    gap = 0.0
    for request, row in zip(asked, made, strict=True):
        expected = alone(engine._model, [*request.prompt_ids, *row.token_ids])[-len(row.token_ids) :]
        gap = max(gap, float((torch.from_numpy(row.rollout_logprobs) - expected).abs().max()))
    return engine._sharing, gap


def training(policy: Path) -> tuple[str, float]:
    """Return how the trainer runs a family, and how far its log-probs are from those of rows alone, in nats."""
    rows = [torch.tensor(ids) for ids in prompts()]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    gap = 0.0
    how = "padded"
    try:
        model = load_model(policy, dtype=torch.float32, device="cpu").eval()
        known = check_padding(model)
        expected = [alone(model, row.tolist()) for row in rows]
        for packs in (False, True):
            if packs and not prepare_packing(model, known):
                break
            how = "packed" if packs else "padded"
            with torch.no_grad():
                found = sequence_logprobs(model, ids, mask, temperature=TEMPERATURE).logprobs
            for row, line in zip(found, expected, strict=True):
                gap = max(gap, float((row[: len(line)] - line).abs().max()))
    except NanoskyrlError as error:
        return f"refused: {error}", 0.0
    return how, gap


def adapters(policy: Path) -> str:
    """Return what gets adapters in a family."""
    learner = Learner(OptimizerConfig(lora_rank=1))
    try:
        learner.load(policy)
    except NanoskyrlError as error:
        return f"refused: {error}"
    parameters = any(hasattr(module, "parameter_name") for module in learner.model.modules())
    base = learner.model.get_base_model()
    dense = {name.rpartition(".")[2] for name in Targets.of(base).modules}
    lost = dense - {name.rpartition(".")[2] for name, module in base.named_modules() if hasattr(module, "lora_A")}
    without = f", not the {' and '.join(sorted(lost))} of others" if lost else ""
    return f"layers and experts{without}" if parameters else "layers"


# The table of docs/models.md


PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- made by tests/families.py -->", "<!-- end -->"
VLLM = sorted((Path(__file__).parent / "data").glob("vllm-*.txt"))[-1]
"""Those classes of transformers that a vLLM's registry names, of the version in the file's name."""


def table() -> str:
    """Return the table and what could not be made small."""
    lines = [
        f"| Family | Rows that share a batch on `hf` | Training | LoRA | vLLM {VLLM.stem.removeprefix('vllm-')} |",
        "| --- | --- | --- | --- | --- |",
    ]
    not_made = []
    for kind in every_family():
        if line := line_of(kind):
            lines.append(line)
        else:
            not_made.append(f"`{kind}`")
    return "\n".join([*lines, "", f"Not tried, for no small one of text alone could be made: {', '.join(not_made)}."])


def line_of(kind: str) -> str | None:
    """Return a family's line, or nothing where no small one can be made.

    Raises:
        AssertionError: it is not refused, and is more than 1e-5 nats from rows alone.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    with tempfile.TemporaryDirectory() as directory:
        try:
            write_family(kind, Path(directory))
        except Exception:  # composites whose parts have sizes of their own, or want other packages
            return None
        cells = []
        for how, gap in (generation(Path(directory)), training(Path(directory))):
            assert gap < 1e-5, (kind, how, gap)
            cells.append(how.replace(directory, "DIR").replace("|", ","))
        cells.append("" if cells[1].startswith("refused") else adapters(Path(directory)))
    if cells[0] == cells[1]:
        cells[1] = "the same"
    served = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] in VLLM.read_text().split()
    return f"| {kind} | {' | '.join(cells)} | {'yes' if served else ''} |"


def rendered() -> str:
    """Return the page as it should be."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(rendered())
