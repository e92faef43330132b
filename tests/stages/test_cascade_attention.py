"""Common prefixes read once by attention: the numbers of attention that reads them for every row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nanoskyrl.stages.models import cascade_attention
from nanoskyrl.stages.models.cascade_attention import CascadeAttention, cascade_of, common_prefixes
from nanoskyrl.stages.models.packed_attention import attend, repeated
from nanoskyrl.stages.models.packing import pack_of
from nanoskyrl.stages.models.prefix_tree import prefix_tree


@pytest.mark.parametrize(
    ("shared", "runs"),
    [
        ([0, 700, 700, 702, 0, 90, 100], [(1, 4, 700), (5, 7, 90)]),
        (
            [0, 700, 300, 700, 700],
            [(1, 2, 700), (2, 3, 300), (3, 5, 700)],
        ),  # a system prompt of all groups
        ([0, 1000, 1500, 1900], [(1, 2, 1000), (2, 4, 1500)]),  # step-wise
        ([0, 63, 20, 0], []),
        ([], []),
    ],
)
def test_neighbours_that_take_about_as_much_are_a_run(shared, runs):
    assert common_prefixes(shared) == runs


def parts(of, bounds):
    return of.split(bounds.diff().tolist())


def scores(query, key, causal, scale):
    """Return [heads, queries, keys]; the last query sees the last key."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    found = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
    return found.masked_fill(~seen, -torch.inf) if causal else found


def forward(query, key, value, bounds, key_bounds, longest, longest_key, *, causal, scale):
    """What flash attention computes, written out."""
    assert longest >= bounds.diff().max()
    assert longest_key >= key_bounds.diff().max()
    found = []
    for of, k, v in zip(parts(query, bounds), parts(key, key_bounds), parts(value, key_bounds), strict=True):
        each = scores(of, k, causal, scale)
        v = v.repeat_interleave(query.shape[1] // value.shape[1], 1)
        found.append((torch.einsum("hqk,khd->qhd", each.softmax(-1), v), each.logsumexp(-1)))
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)


def backward(slopes, query, key, value, out, lse, bounds, key_bounds, longest, longest_key, *, causal, scale):
    """What its backward pass computes from a result and a log-sum-exp that may hold more than these keys."""
    found, times = [], query.shape[1] // key.shape[1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for s, q, k, v, o, n in zip(
        *(parts(of, bounds) for of in (slopes, query)), *(parts(of, key_bounds) for of in (key, value)),
        parts(out, bounds), parts(lse.T, bounds), strict=True,
    ):  # fmt: skip
        weights = (scores(q, k, causal, scale) - n.T[..., None]).exp()
        wide_k, wide_v = (of.repeat_interleave(times, 1) for of in (k, v))
        by_weight = torch.einsum("qhd,khd->hqk", s, wide_v) - (s * o).sum(-1).T[..., None]
        by_score = weights * by_weight * factor
        by_key, by_value = torch.einsum("hqk,qhd->khd", by_score, q), torch.einsum("hqk,qhd->khd", weights, s)
        by_key, by_value = (of.unflatten(1, (-1, times)).sum(2) for of in (by_key, by_value))
        found.append((torch.einsum("hqk,khd->qhd", by_score, wide_k), by_key, by_value))
    return tuple(torch.cat(each) for each in zip(*found, strict=True))


@st.composite
def rows_that_begin_alike(draw):
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    made = [random.integers(1, 9, draw(st.integers(64, 160)))]
    for _ in range(draw(st.integers(1, 7))):
        of = made[draw(st.integers(0, len(made) - 1))]
        kept = of[: len(of) - draw(st.sampled_from([0, 1, 3, 40]))]
        made.append(np.concatenate([kept, random.integers(1, 9, draw(st.integers(0, 70)))]))
    return made


def both_ways(pack, rows, cascade, query, key, value):
    """Return attention of these rows, as packed rows that read all keys, and as a cascade."""
    plain, _ = attend(None, *(of[None].transpose(1, 2) for of in (query, key, value)), None, **rows)
    own, common = ([repeated(of, at) for of in (key, value)] for at in (cascade.own_keys, cascade.keys))
    found = CascadeAttention.apply(query, *own, *common, rows["bounds"], rows["longest"], cascade, None)
    return plain[0], found


@settings(max_examples=40, deadline=None)
@given(made=rows_that_begin_alike(), heads=st.sampled_from([(4, 2), (2, 2), (3, 1)]))
def test_a_cascade_has_the_numbers_and_slopes_of_attention_that_reads_every_key(made, heads):
    tree = prefix_tree(made)
    pack = pack_of(tree.lengths, max(tree.lengths), "cpu", tree.shared)
    own = [length - of for length, of in zip(tree.lengths, tree.shared, strict=True)]
    # The order in which rows lie is that of the packed batch.
    index = pack.index.numpy()
    starts = {row: int(index[row, tree.shared[row]]) for row in range(len(own)) if own[row]}
    laid = sorted(starts, key=starts.__getitem__)
    cascade = cascade_of(laid, starts, tree.lengths, tree.shared, index, "cpu")
    if cascade is None:
        return
    torch.manual_seed(0)
    count = len(pack.places)
    leaves = [
        torch.randn(count, of, 8, dtype=torch.float64, requires_grad=True) for of in (heads[0], heads[1], heads[1])
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cascade_attention, "_forward", forward)
        patched.setattr(cascade_attention, "_backward", backward)
        ways = both_ways(pack, pack.rows, cascade, *leaves)
        toward = torch.randn_like(ways[0])
        slopes = [torch.autograd.grad(way, leaves, toward) for way in ways]
    assert torch.allclose(*ways, rtol=0, atol=1e-12)
    for one, other in zip(*slopes, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-11)


@pytest.mark.gpu
@pytest.mark.parametrize("own", [1, 20])
def test_on_a_gpu_the_kernels_agree_with_float32(own):
    made = [np.concatenate([np.full(200, 1 + group), np.full(own, 3 + row)]) for group in range(2) for row in range(4)]
    tree = prefix_tree(made)
    pack = pack_of(tree.lengths, max(tree.lengths), "cuda", tree.shared)
    torch.manual_seed(0)
    shapes = [(1, heads, len(pack.places), 64) for heads in (4, 2, 2)]
    exact = [torch.randn(shape, device="cuda").bfloat16().float().requires_grad_() for shape in shapes]
    halves = [of.detach().bfloat16().requires_grad_() for of in exact]
    assert pack.rows["cascade"] is not None
    toward = torch.randn(1, len(pack.places), 4, 64, device="cuda").bfloat16()
    found = []
    for leaves in (exact, halves):
        out, _ = attend(None, *leaves, None, **pack.rows)
        found.append([out, *torch.autograd.grad(out, leaves, toward.to(out.dtype))])
    for one, other in zip(*found, strict=True):
        assert (one - other.float()).norm() < 0.01 * one.norm()
