"""Families of models: right numbers in generation and training, or one sentence that says why not."""

import pytest
import torch
from families import PAGE, RECIPE, every_family, generation, line_of, rendered, training, write_family
from torch import nn

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.engines.base import HfConfig
from nanoskyrl.stages.engines.hf import HfEngine
from nanoskyrl.stages.models.loading import load_model
from nanoskyrl.stages.models.logits import LogitTransform, logit_transform
from nanoskyrl.stages.models.logprobs import sequence_logprobs
from nanoskyrl.stages.models.packing import check_padding, prepare_packing

NEAR = 1e-5
"""Nats; what is wrong in a family is wrong by tenths."""


def load(place):
    return load_model(place, dtype=torch.float32, device="cpu").eval()


@pytest.mark.parametrize(
    ("kind", "changes", "transform"),
    [
        ("granite", {"logits_scaling": 8.0}, LogitTransform(scale=1 / 8)),
        pytest.param("granitemoe", {"logits_scaling": 4.0}, LogitTransform(scale=1 / 4), marks=pytest.mark.slow),
        ("hyperclovax", {"logits_scaling": 0.25}, LogitTransform(scale=0.25)),  # the same word multiplies here
        ("cohere", {"logit_scale": 0.0625}, LogitTransform(scale=0.0625)),
        pytest.param("cohere2", {}, LogitTransform(scale=0.0625), marks=pytest.mark.slow),
        pytest.param("falcon_h1", {"lm_head_multiplier": 3.0}, LogitTransform(scale=3.0), marks=pytest.mark.slow),
        ("minicpm3", {"dim_model_base": 8}, LogitTransform(scale=1 / 4)),  # the states are divided, before the head
        pytest.param("recurrent_gemma", {"logits_soft_cap": 2.0}, LogitTransform(cap=2.0), marks=pytest.mark.slow),
        ("gemma2", {"final_logit_softcapping": 2.0}, LogitTransform(cap=2.0)),
        pytest.param(
            "inkling_text",
            {"unpadded_vocab_size": 600, "logits_mup_width_multiplier": 4.0},
            LogitTransform(scale=1 / 4, width=600),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_family_does_after_its_head_is_applied(tmp_path, kind, changes, transform):
    write_family(kind, tmp_path, **changes)
    assert logit_transform(load(tmp_path)) == transform
    how, gap = training(tmp_path)
    assert how in ("packed", "padded")
    assert gap < NEAR
    how, gap = generation(tmp_path)
    assert "refused" not in how
    assert gap < NEAR


@pytest.mark.parametrize("of", [lambda logits: logits * 1.1, lambda logits: logits + logits[..., :1], torch.sin])
def test_a_head_that_nobody_knows_is_refused(tmp_path, of):
    write_family("llama", tmp_path)
    model = load(tmp_path)
    model.register_forward_hook(lambda module, given, output: type(output)(logits=of(output.logits)))
    with pytest.raises(InputError, match=r"the logits of a LlamaForCausalLM differ from those of its head by .* scale"):
        sequence_logprobs(model, torch.tensor([[1, 2]]), torch.ones(1, 2), temperature=1.0)


def test_a_cap_counts_where_weights_are_too_small_to_show_it(tmp_path):
    write_family("gemma2", tmp_path)
    model = load(tmp_path)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e-3)
    assert logit_transform(model) == LogitTransform(cap=30.0)


@pytest.mark.parametrize(
    ("kind", "shares", "trains"),
    [
        ("mamba", "one length", "padded"),
        ("lfm2", "any length", "padded"),
        pytest.param("qwen3_5_text", "any length", "padded", marks=pytest.mark.slow),
        ("rwkv", "one row", "padded"),
        pytest.param("xlstm", "one length", "padded", marks=pytest.mark.slow),
        ("nemotron", "any length", "padded"),  # its attention does not hand on where rows begin
        ("llama4_text", "any length", "padded"),  # it does not name its decoder
        pytest.param("qwen3_moe", "any length", "packed", marks=pytest.mark.slow),
    ],
)
def test_a_family_is_run_as_its_layers_need_it(tmp_path, kind, shares, trains):
    write_family(kind, tmp_path)
    (found, gap), (packs, padded) = generation(tmp_path), training(tmp_path)
    assert (found, packs) == (shares, trains)
    assert max(gap, padded) < NEAR


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bert", {"is_decoder": False}, "a BertLMHeadModel looks at later tokens"),
        ("deepseek_v32", {}, "a DeepseekV32ForCausalLM attends to the best keys of an index"),
        ("xmod", {}, "a XmodForCausalLM does not run on tokens alone: ValueError: Input language unknown"),
        ("openai-gpt", {}, "an OpenAIGPTLMHeadModel cannot be sampled here: TypeError: it keeps no cache"),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_anything_runs(tmp_path, kind, changes, message):
    write_family(kind, tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        HfEngine(HfConfig(device="cpu")).load(tmp_path)


def test_a_model_that_reads_its_padding_is_not_trained(tmp_path, monkeypatch):
    write_family("llama", tmp_path)
    model = load(tmp_path)
    plain = model.model.forward
    monkeypatch.setattr(
        model.model, "forward", lambda attention_mask=None, **given: _shifted(plain(**given), attention_mask)
    )
    with pytest.raises(InputError, match="answers otherwise where rows of unlike length share a batch"):
        check_padding(model)


def _shifted(output, mask):
    if mask is not None:
        output.last_hidden_state = output.last_hidden_state + (mask == 0).sum(-1)[:, None, None]
    return output


def test_attention_that_cannot_be_packed_is_left_as_it_was(tmp_path):
    write_family("nemotron", tmp_path)
    model = load(tmp_path)
    own = model.config._attn_implementation
    assert not prepare_packing(model)
    assert model.config._attn_implementation == own


def test_a_step_wise_layer_that_sees_the_row_before_it_is_padded(tmp_path):
    write_family("qwen3", tmp_path)
    model = load(tmp_path)
    model.model.layers[0].mlp = _WithLast(model.model.layers[0].mlp)
    assert not prepare_packing(model)


class _WithLast(nn.Module):
    """Mixes in the token before, as a convolution does, whatever row it belongs to."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, states):
        return self.inner(states + torch.nn.functional.pad(states, (0, 0, 1, 0))[:, :-1])


@pytest.mark.slow
def test_a_share_of_the_families_is_as_the_page_says():
    found = [line for kind in every_family()[::8] if (line := line_of(kind))]
    assert len(found) > 10
    assert [line for line in found if line not in PAGE.read_text().splitlines()] == []


@pytest.mark.long
def test_every_causal_family_is_right_or_refused_as_the_page_says():
    assert RECIPE["num_hidden_layers"] == 2
    assert rendered() == PAGE.read_text()
