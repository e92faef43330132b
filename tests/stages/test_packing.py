"""Packed rows, micro-batches, chunks and checkpoints: the same loss and gradient, however it is computed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, LENGTHS, rows, tiny_model
from tolerances import GRADIENT, assert_close, terms_of
from torch._dynamo.utils import counters
from torch.nn.functional import log_softmax

from nanoskyrl.algos.off_policy import OffPolicyConfig
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.learning.batching import collate, micro_batches
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.objective import Objective
from nanoskyrl.stages.learning.process_group import ProcessGroup, share_out
from nanoskyrl.stages.learning.train_config import OptimizerConfig, TrainConfig
from nanoskyrl.stages.learning.update import Update
from nanoskyrl.stages.models import logprobs as logprobs_module
from nanoskyrl.stages.models.checkpointing import keep_less
from nanoskyrl.stages.models.logprobs import sequence_logprobs
from nanoskyrl.stages.models.packing import is_packing, pack_of, padding_is_faster, prepare_packing
from nanoskyrl.stages.models.policy import resolve_policy

LONGEST = max(map(sum, LENGTHS))
TOKENS = sum(map(sum, LENGTHS))


def padded(sequences):
    batch = collate(sequences, list(range(len(sequences))), "cpu")
    return batch.ids, batch.attention_mask, batch.loss_mask


def by_definition(model, ids, mask, select, temperature):
    """Return log-probs and entropies from whole logits, each row alone."""
    logprobs, entropy = (torch.zeros(select.shape) for _ in range(2))
    for row, length in enumerate(mask.sum(-1).tolist()):
        logits = model(input_ids=ids[row : row + 1, :length]).logits[0, :-1].float() / temperature
        logp = log_softmax(logits, -1)
        logprobs[row, : length - 1] = logp.gather(-1, ids[row, 1:length, None])[:, 0]
        entropy[row, : length - 1] = -(logp.exp() * logp).sum(-1)
    return logprobs * select, entropy.detach() * select


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_log_probs_and_gradients_of_each_row_alone(family, monkeypatch):
    monkeypatch.setitem(logprobs_module.CHUNK_ELEMENTS, "cpu", 7 * 64)  # several chunks
    model = tiny_model(family)
    ids, mask, select = padded(rows(60))
    slopes = torch.randn(select.shape, generator=torch.Generator().manual_seed(0))
    wanted = by_definition(model, ids, mask, select, 0.7)
    wanted_gradients = gradients(model, (wanted[0] * slopes).sum())
    packs = prepare_packing(model)
    assert packs is FAMILIES[family]
    assert is_packing(model) is packs
    found = sequence_logprobs(model, ids, mask, temperature=0.7, select=select)
    assert_close(found.logprobs, wanted[0], terms_of(model.config, LONGEST))
    assert_close(found.entropy, wanted[1], terms_of(model.config, LONGEST))
    found_gradients = gradients(model, (found.logprobs * slopes).sum())
    assert_close(found_gradients, wanted_gradients, 2 * terms_of(model.config, TOKENS))


def test_a_row_does_not_see_the_row_before_it():
    model = tiny_model("qwen2")
    assert prepare_packing(model)
    ids, mask, select = padded(rows(60))
    before = sequence_logprobs(model, ids, mask, temperature=1.0, select=select).logprobs
    ids[0] = torch.where(mask[0] == 1, (ids[0] + 1) % 60, ids[0])
    after = sequence_logprobs(model, ids, mask, temperature=1.0, select=select).logprobs
    assert not torch.allclose(before[0], after[0])
    assert_close(before[1:], after[1:], terms_of(model.config, LONGEST))


@pytest.mark.parametrize(
    ("lengths", "faster"),
    [
        ([8192, 8192], True),
        ([4096, 3731, 3365, 3000], True),  # 1.30 times the products
        ([8192, 5000, 3000], False),  # 2.0 times
        ([1280] * 8, False),  # short rows: copies take longer than attention
        ([2048], True),
    ],
)
def test_long_rows_of_like_length_are_padded_for_attention_where_that_is_faster(lengths, faster):
    assert padding_is_faster(lengths) is faster


def test_states_that_are_asked_for_lie_where_the_pack_says():
    model = tiny_model("qwen2")
    ids, mask, select = padded(rows(60))
    wanted = sequence_logprobs(model, ids, mask, temperature=1.0, select=select, want_hidden=True).hidden
    assert prepare_packing(model)
    pack = pack_of(mask.sum(-1).tolist(), ids.shape[1], "cpu")
    found = sequence_logprobs(model, ids, mask, temperature=1.0, select=select, pack=pack, want_hidden=True).hidden
    on = mask == 1
    assert_close(found[pack.index[on]], wanted[on], terms_of(model.config, LONGEST))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_layers_computed_again_change_no_bit(share):
    model = tiny_model("qwen2").eval()
    assert prepare_packing(model)
    ids, mask, select = padded(rows(60))

    def found():
        return gradients(model, sequence_logprobs(model, ids, mask, temperature=1.0, select=select).logprobs.sum())

    wanted = found()
    keep_less(model, share)
    assert sum(layer.training for layer in model.get_decoder().layers) == round(share * 2)
    for name, gradient in found().items():
        assert torch.equal(gradient, wanted[name]), name


@pytest.mark.parametrize("rank", [0, 4])
def test_all_layers_are_compiled_as_one_program(rank, monkeypatch):
    plain = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **given: plain(layer, backend="eager", **given))
    base = model = tiny_model("qwen2").eval()
    if rank:
        model = get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert prepare_packing(model)
    ids, mask, select = padded(rows(60))

    def found():
        return gradients(model, sequence_logprobs(model, ids, mask, temperature=1.0, select=select).logprobs.sum())

    wanted = found()
    torch.compiler.reset()
    counters.clear()
    keep_less(base, 1.0, compiled=True)
    assert_close(found(), wanted, 2 * terms_of(base.config, TOKENS))
    assert counters["stats"]["unique_graphs"] == 1


# The loss of a whole mini-batch


def loss_and_gradient(sequences, *, packing, max_tokens, algo="grpo", size=None, monkeypatch=None):
    learner = Learner(OptimizerConfig(packing=packing))
    learner.load(resolve_policy("starter"))
    if size is not None:
        monkeypatch.setattr(
            "nanoskyrl.stages.learning.batching.micro_batches",
            lambda lengths, *_, **__: [
                list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)
            ],
        )
    algorithm = lookup("algo", algo)
    config = TrainConfig(algo=algo, max_tokens_per_micro_batch=max_tokens)
    own = algorithm.Config() if algorithm.Config else None
    objective = Objective(algorithm, own, config, sequences, 1.0, off_policy=OffPolicyConfig())
    update = Update(objective)
    gradient = update.gradient(learner, list(range(len(sequences))))
    return update.seen()["train/loss"], gradient


@pytest.fixture(scope="module")
def sequences():
    """Rows whose recorded log-probs are near the starter's, so that ratios are neither 1 nor clipped away."""
    learner = Learner(OptimizerConfig(packing=False))
    learner.load(resolve_policy("starter"))
    found, random = rows(300), np.random.default_rng(1)
    near = [row + random.normal(0, 0.1, len(row)) for row in learner.logprobs(found, 1.0, 1 << 14)]
    nats = [row.astype(np.float32) for row in near]
    return replace(found, rollout_logprobs=nats, old_logprobs=nats)


@pytest.mark.parametrize("algo", ["grpo", "gspo", "sapo"])
def test_packed_and_padded_losses_are_equal(sequences, algo):
    wanted = loss_and_gradient(sequences, packing=False, max_tokens=1 << 14, algo=algo)
    found = loss_and_gradient(sequences, packing=True, max_tokens=24, algo=algo)
    assert_close(found[0], wanted[0], GRADIENT, scale=1.0)
    assert_close(found[1], wanted[1], GRADIENT)
    assert wanted[1].abs().max() > 1e-3


@pytest.mark.parametrize("size", [1, 3, 8])
def test_micro_batches_of_any_size_give_the_same_loss(sequences, size, monkeypatch):
    wanted = loss_and_gradient(sequences, packing=False, max_tokens=1 << 14)
    found = loss_and_gradient(sequences, packing=True, max_tokens=1, size=size, monkeypatch=monkeypatch)
    assert_close(found[0], wanted[0], GRADIENT, scale=1.0)
    assert_close(found[1], wanted[1], GRADIENT)


def test_packed_micro_batches_count_no_padding():
    lengths = [10, 1, 1, 1, 9, 30]
    assert micro_batches(lengths, 12, packed=True) == [[1, 2, 3, 4], [0], [5]]
    assert micro_batches(lengths, 12) == [[1, 2, 3], [4], [0], [5]]


# Shares of several processes


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_every_process_has_as_many_micro_batches_and_no_row_comes_twice(size, count):
    random = np.random.default_rng(count)
    lengths = random.integers(5, 40, 2 * count).tolist()
    batches = [[2 * i, 2 * i + 1] for i in range(count)]
    shares = [share_out(batches, lengths, ProcessGroup(rank, size)) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(row for share in shares for batch in share for row in batch) == list(range(2 * count))
    tokens = [sum(lengths[row] for batch in share for row in batch) for share in shares]
    if count >= 2 * size:
        assert max(tokens) - min(tokens) <= 80


def test_where_no_batch_can_be_cut_somebody_has_nothing_to_do():
    shares = [share_out([[0], [1], [2]], [3, 4, 5], ProcessGroup(rank, 2)) for rank in range(2)]
    assert shares == [[[2], []], [[1], [0]]]


def test_one_process_keeps_its_batches():
    assert share_out([[1], [0]], [1, 2], ProcessGroup()) == [[1], [0]]


def test_weights_without_gradient_keep_the_heads_states_alone():
    model = tiny_model("qwen2").requires_grad_(False)
    embeddings = model.get_input_embeddings().weight.requires_grad_(True)
    model.get_output_embeddings().weight = torch.nn.Parameter(torch.randn(64, 16), requires_grad=False)
    ids, mask, select = padded(rows(60))
    sequence_logprobs(model, ids, mask, temperature=1.0, select=select).logprobs.sum().backward()
    assert embeddings.grad is not None
    assert model.get_output_embeddings().weight.grad is None
