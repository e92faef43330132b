"""Prefixes that rows share, computed once: the numbers of rows packed as they are."""

import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, rows, tiny_model
from torch._dynamo.utils import counters

from nanoskyrl.algos.off_policy import OffPolicyConfig
from nanoskyrl.stages.core.errors import Notice
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.learning.batching import collate, collate_all
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.objective import Objective
from nanoskyrl.stages.learning.process_group import ProcessGroup
from nanoskyrl.stages.learning.train_config import CriticConfig, OptimizerConfig, TrainConfig
from nanoskyrl.stages.learning.update import Update
from nanoskyrl.stages.models import packed_attention, packing
from nanoskyrl.stages.models.checkpointing import keep_less
from nanoskyrl.stages.models.critic import new_critic
from nanoskyrl.stages.models.logprobs import sequence_logprobs
from nanoskyrl.stages.models.packing import can_share, pack_of, prepare_packing, sharing_saves, work_of
from nanoskyrl.stages.models.policy import resolve_policy
from nanoskyrl.stages.models.prefix_tree import LEAST, PrefixTree, prefix_tree

NEAR = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Of the largest number of its kind."""
PACKED = [family for family, packs in FAMILIES.items() if packs]


def sequences_of(prompts, responses, masks=None, seed=0):
    """Return rows of these tokens, with made-up numbers."""
    random, count = np.random.default_rng(seed), len(prompts)
    base = rows(60)
    nats = [-random.random(len(row)).astype(np.float32) for row in responses]
    return replace(
        base, groups=["group"] * count,
        prompt_ids=[np.asarray(row, np.int32) for row in prompts],
        response_ids=[np.asarray(row, np.int32) for row in responses],
        loss_mask=[np.ones(len(row), np.int8) for row in responses] if masks is None else masks,
        rollout_logprobs=nats, old_logprobs=nats, ref_logprobs=[None] * count,
        advantages=[random.normal(size=len(row)).astype(np.float32) for row in responses],
        returns=[None] * count, values=[None] * count, weights=[None] * count,
    )  # fmt: skip


@st.composite
def trees(draw):
    """Rows of a tree: each begins with a stretch of one before it, of few kinds of tokens or many."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = draw(st.sampled_from([2, 50]))
    made = [random.integers(1, 1 + kinds, draw(st.integers(2, 24)))]
    for _ in range(draw(st.integers(0, 9))):
        of = made[draw(st.integers(0, len(made) - 1))]
        taken = draw(st.integers(0, len(of)))  # 0: a tree of its own; all: a longer one, or the same row again
        row = np.concatenate([of[:taken], random.integers(1, 1 + kinds, draw(st.integers(0, 10)))])
        made.append(row if len(row) > 1 else np.concatenate([row, [3, 3]]))
    starts = [draw(st.integers(0, len(row) - 1)) for row in made]
    masks = [random.integers(0, 2, len(row) - start).astype(np.int8) for row, start in zip(made, starts, strict=True)]
    prompts, responses = zip(*((row[:at], row[at:]) for row, at in zip(made, starts, strict=True)), strict=True)
    return sequences_of(prompts, responses, masks)


def two_ways(model, sequences, slopes_seed=0):
    """Return log-probs, entropies and gradients by row, of rows packed as they are and of the tree."""
    tree = prefix_tree(sequences.token_ids)
    found = []
    for shared in (None, tree.shared):
        batch = collate(sequences, tree.order, "cpu", packed=True, shared=shared)
        made = sequence_logprobs(
            model, batch.ids, batch.attention_mask, temperature=0.7, select=batch.loss_mask, pack=batch.pack
        )
        generator = torch.Generator().manual_seed(slopes_seed)
        slopes = torch.randn(batch.loss_mask.shape, generator=generator, dtype=made.logprobs.dtype)
        model.zero_grad()
        (made.logprobs * slopes).sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((made.logprobs.detach(), made.entropy, gradients))
    return found


def assert_equal(found, dtype):
    (logprobs, entropy, gradients), (shared_logprobs, shared_entropy, shared_gradients) = found
    assert shared_logprobs.dtype == logprobs.dtype == dtype
    for one, other in ((logprobs, shared_logprobs), (entropy, shared_entropy)):
        torch.testing.assert_close(other, one, atol=NEAR[dtype] * max(1, float(one.abs().max())), rtol=0)
    assert gradients.keys() == shared_gradients.keys()
    scale = max([float(value.abs().max()) for value in gradients.values()], default=0.0)
    for name, value in gradients.items():
        torch.testing.assert_close(shared_gradients[name], value, atol=NEAR[dtype] * max(1, scale), rtol=0, msg=name)


def norm_in_full(norm, states):
    """Return what transformers' norms do in float32 whatever the type of the states."""
    gain = norm.weight + 1 if "Gemma" in type(norm).__name__ else norm.weight
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * gain


MODELS = {}


def prepared(family, dtype, rank=0):
    """Return a model of a family, once a session."""
    if (family, dtype, rank) not in MODELS:
        model = tiny_model(family).to(dtype).eval()
        for norm in model.modules():
            if type(norm).__name__.endswith("RMSNorm") and dtype == torch.float64:
                norm.forward = partial(norm_in_full, norm)
        assert prepare_packing(model)
        if rank:
            model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
        MODELS[family, dtype, rank] = model
    return MODELS[family, dtype, rank]


@given(trees(), st.sampled_from(PACKED), st.sampled_from([0, 4]), st.sampled_from(list(NEAR)))
@settings(max_examples=40, deadline=None)
def test_any_tree_has_the_log_probs_and_gradients_of_rows_packed_as_they_are(sequences, family, rank, dtype):
    assert_equal(two_ways(prepared(family, dtype, rank), sequences), dtype)


def test_a_group_of_sixteen_has_the_numbers_of_rows_packed_as_they_are():
    random = np.random.default_rng(0)
    prompt = random.integers(1, 60, 40)
    # No two begin with the same token.
    responses = [np.array([3 * row + 1, *random.integers(1, 60, row)]) for row in range(16)]
    sequences = sequences_of([prompt] * 16, responses)
    for family in ("qwen3", "mistral, sliding"):
        for dtype in NEAR:
            assert_equal(two_ways(prepared(family, dtype), sequences), dtype)
    tree = prefix_tree(sequences.token_ids)
    assert tree.computed == 40 + sum(map(len, responses))
    assert work_of(tree.lengths, tree.shared).pairs == 40 * 41 // 2 + sum(
        n * 40 + n * (n + 1) // 2 for n in range(1, 17)
    )


# The tree


@given(trees())
@settings(max_examples=50, deadline=None)
def test_what_a_row_takes_is_what_the_row_before_it_has(sequences):
    whole = sequences.token_ids
    tree = prefix_tree(whole)
    assert sorted(tree.order) == list(range(len(whole)))
    assert tree.tokens == sum(map(len, whole))
    for before, row, taken in zip([0, *tree.order], tree.order, tree.shared, strict=False):
        assert (whole[before][:taken] == whole[row][:taken]).all()
        assert not 0 < taken < LEAST
    distinct = {tuple(row[: end + 1]) for row in whole for end in range(len(row))}
    assert len(distinct) <= tree.computed <= len(distinct) + (LEAST - 1) * len(whole)
    pack = pack_of(tree.lengths, max(tree.lengths), "cpu", tree.shared)
    assert pack.work.computed == len(pack.places) == tree.computed
    flat = torch.zeros(len(whole), max(tree.lengths), dtype=torch.long)
    for place, row in enumerate(tree.order):
        flat[place, : len(whole[row])] = torch.from_numpy(whole[row])
    assert (pack.flat(flat)[pack.index][flat > 0] == flat[flat > 0]).all()


@given(trees(), st.integers(1, 120))
@settings(max_examples=50, deadline=None)
def test_batches_of_a_tree_keep_to_the_budget_and_leave_no_row_out(sequences, budget):
    tree = prefix_tree(sequences.token_ids)
    batches = tree.batches(budget)
    assert [place for batch in batches for place in batch] == list(range(len(tree.order)))
    for batch in batches:
        shared = tree.shared_in(batch)
        computed = sum(tree.lengths[place] for place in batch) - sum(shared)
        assert len(batch) == 1 or computed + sum(shared) / 8 <= budget


def test_a_batch_ends_between_groups_where_it_can():
    lengths, shared = [30] * 12, [0, 20, 20, 20] * 3
    assert PrefixTree(list(range(12)), lengths, shared).batches(150) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]]
    assert PrefixTree(list(range(12)), lengths, shared).batches(110) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert PrefixTree(list(range(4)), lengths[:4], shared[:4]).batches(45) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("lengths", "shared", "on_cpu", "on_hopper"),
    [
        ([100] * 4, [0, *[60] * 3], True, True),
        ([100] * 4, [0, *[10] * 3], False, False),  # too little is saved
        ([100], [0], False, False),
        ([800] * 16, [0, *[700] * 15], True, True),
        ([896] * 8, [0, *[256] * 7], False, True),  # padded, its queries would meet more keys than they see
        ([2304] * 16, [0, *[2048] * 15], True, True),
        ([8192] * 8, [0, *[1200] * 7], False, False),  # cuDNN's kernels are faster
    ],
)
def test_sharing_is_left_out_where_it_costs_more_than_it_saves(lengths, shared, on_cpu, on_hopper, monkeypatch):
    tree = PrefixTree(list(range(len(lengths))), lengths, shared)
    assert sharing_saves(tree, "cpu") is on_cpu
    monkeypatch.setattr(packing, "_has_fast_padding", lambda device: True)
    assert sharing_saves(tree, "cuda") is on_hopper


# The whole way


def learner_of(**given):
    learner = Learner(OptimizerConfig(**given))
    learner.load(resolve_policy("starter"))
    return learner


@pytest.fixture(scope="module")
def groups():
    """Three groups of six, one of whose rows come twice, and one row alone."""
    random = np.random.default_rng(3)
    prompts, responses = [], []
    for _ in range(3):
        prompt = random.integers(4, 600, 25)
        ends = [random.integers(4, 600, int(n)) for n in random.integers(1, 9, 5)]
        prompts += [prompt] * 6
        responses += [*ends, ends[0]]
    return sequences_of([*prompts, [5, 6]], [*responses, [7, 8, 9]])


def loss_and_gradient(learner, sequences, max_tokens, algo="grpo"):
    algorithm = lookup("algo", algo)
    config = TrainConfig(algo=algo, max_tokens_per_micro_batch=max_tokens)
    own = algorithm.Config() if algorithm.Config else None
    update = Update(Objective(algorithm, own, config, sequences, 1.0, off_policy=OffPolicyConfig()))
    gradient = update.gradient(learner, list(range(len(sequences))))
    return update.seen()["train/loss"], gradient, update.work


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("max_tokens", [1 << 14, 90, 1])
def test_a_mini_batch_has_the_loss_and_gradient_of_rows_packed_as_they_are(groups, rank, max_tokens):
    plain, shared = (learner_of(share_prefixes=shares, lora_rank=rank) for shares in (False, True))
    near = [row + 0.1 for row in plain.logprobs(groups, 1.0, 1 << 14)]
    sequences = replace(groups, rollout_logprobs=near, old_logprobs=near)
    wanted, found = loss_and_gradient(plain, sequences, 1 << 14), loss_and_gradient(shared, sequences, max_tokens)
    assert found[0] == pytest.approx(wanted[0], abs=1e-5)
    scale = float(wanted[1].abs().max())
    assert scale > 1e-3
    torch.testing.assert_close(found[1], wanted[1], atol=1e-5 * max(1, scale), rtol=0)
    assert wanted[2].shared == 0
    assert wanted[2].tokens == found[2].tokens
    assert (found[2].shared > 0.5) is (max_tokens >= 90)


def test_passes_of_advantage_have_the_numbers_of_rows_packed_as_they_are(groups):
    plain, shared = learner_of(share_prefixes=False), learner_of()
    for wanted, found in zip(plain.logprobs(groups, 0.8, 1 << 14), shared.logprobs(groups, 0.8, 60), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_a_critic_has_the_values_of_rows_packed_as_they_are(groups, backbone):
    values = []
    for shares in (False, True):
        learner = Learner(OptimizerConfig(share_prefixes=shares), critic=CriticConfig(backbone=backbone), frozen=True)
        learner.load(resolve_policy("starter"))
        learner.critic = new_critic(learner.model, backbone)
        torch.nn.init.normal_(learner.critic.head.weight, generator=torch.Generator().manual_seed(0))
        values.append(learner.values(groups, 100))
    for wanted, found in zip(*values, strict=True):
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_processes_have_every_row_once_and_as_many_passes(groups, size):
    shares = [
        list(collate_all(groups, range(len(groups)), 60, "cpu", packed=True, shares=True, world=ProcessGroup(r, size)))
        for r in range(size)
    ]
    assert len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share if batch is not None]
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(groups)))
    for batch in batches:
        for place, row in enumerate(batch.rows):
            whole = torch.from_numpy(groups.token_ids[row]).long()
            assert (batch.pack.flat(batch.ids)[batch.pack.index[place, : len(whole)]] == whole).all()


@pytest.mark.parametrize(
    "given", [{"lora_rank": 4, "lora_dropout": 0.1}, {"packing": False}, {"share_prefixes": False}]
)
def test_what_does_not_share_computes_every_token(groups, given):
    learner = learner_of(**given)
    assert not learner.shares
    assert loss_and_gradient(learner, groups, 1 << 14)[2].shared == 0


def test_a_model_whose_states_differ_is_packed_as_it_is_and_a_line_says_so(monkeypatch):
    model = tiny_model("qwen3")
    assert prepare_packing(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert can_share(model)

    plain = packed_attention._padded_shared
    monkeypatch.setattr(
        packed_attention, "_padded_shared",
        lambda query, key, value, bounds, keys, key_bounds, *rest: plain(
            query, key, value, bounds, keys.roll(1), key_bounds, *rest
        ),
    )  # fmt: skip
    with pytest.warns(Notice, match="a Qwen3ForCausalLM has other states where rows share what they begin with"):
        assert not can_share(model)


def test_layers_computed_again_change_no_bit():
    random = np.random.default_rng(0)
    sequences = sequences_of([random.integers(1, 60, 20)] * 4, [random.integers(1, 60, 5) for _ in range(4)])
    model = tiny_model("qwen2").eval()
    assert prepare_packing(model)
    wanted = two_ways(model, sequences)
    keep_less(model, 1.0)
    for (_, _, one), (_, _, other) in zip(wanted, two_ways(model, sequences), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_layers_are_compiled_as_one_program(monkeypatch):
    plain = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **given: plain(layer, backend="eager", **given))
    random = np.random.default_rng(0)
    sequences = sequences_of([random.integers(1, 60, 20)] * 4, [random.integers(1, 60, 5) for _ in range(4)])
    tree = prefix_tree(sequences.token_ids)
    batch = collate(sequences, tree.order, "cpu", packed=True, shared=tree.shared)
    model = tiny_model("qwen2").eval()
    assert prepare_packing(model)

    def gradient():
        model.zero_grad()
        found = sequence_logprobs(model, batch.ids, batch.attention_mask, temperature=1.0, pack=batch.pack)
        found.logprobs.sum().backward()
        return model.get_input_embeddings().weight.grad.clone()

    wanted = gradient()
    torch.compiler.reset()
    counters.clear()
    keep_less(model, 1.0, compiled=True)
    torch.testing.assert_close(gradient(), wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)
    assert counters["stats"]["unique_graphs"] == 1
