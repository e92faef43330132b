import pytest
import torch
from hypothesis import given, strategies as st

from nanoskyrl.algos.aggregate import REDUCTIONS, Totals, reduction
from nanoskyrl.stages.core.errors import SettingsError

# Rows of two, one and no trained tokens, with a hole and padding.
MASK = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
PROMPT_TOKENS = torch.tensor([2.0, 1.0, 1.0])  # the second and third row are of one prompt
VALUES = torch.tensor([[1.0, 9.0, 2.0], [9.0, 6.0, 9.0], [9.0, 9.0, 9.0]])


def reduced(name, values, mask, totals, prompt_tokens=None):
    return float((values * reduction(name)(mask, totals, prompt_tokens)).sum())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_mean", (1 + 2 + 6) / 3),
        ("sequence_mean", ((1 + 2) / 2 + 6 + 0) / 3),  # the row without tokens adds 0, and counts
        ("seq_mean_token_sum_norm", ((1 + 2) / 10 + 6 / 10 + 0) / 3),
        ("seq_mean_token_sum", (1 + 2 + 6 + 0) / 3),
        ("prompt_mean", ((1 + 2) / 2 + 6 / 1) / 2),
    ],
)
def test_three_rows_by_hand(name, value):
    totals = Totals(tokens=3, rows=3, horizon=10, prompts=2)
    assert reduced(name, VALUES, MASK, totals, PROMPT_TOKENS) == pytest.approx(value)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("token_mean", [[1 / 3, 0, 1 / 3], [0, 1 / 3, 0], [0, 0, 0]]),
        ("sequence_mean", [[1 / 6, 0, 1 / 6], [0, 1 / 3, 0], [0, 0, 0]]),
        ("seq_mean_token_sum_norm", [[1 / 30, 0, 1 / 30], [0, 1 / 30, 0], [0, 0, 0]]),
    ],
)
def test_weights_by_hand(name, weights):
    found = reduction(name)(MASK, Totals(tokens=3, rows=3, horizon=10), None)
    torch.testing.assert_close(found, torch.tensor(weights, dtype=torch.float32))


def test_the_mean_of_two_micro_batches_is_not_the_mean_of_their_means():
    # 100 tokens at 0.5 and 900 at 0.3: 0.32, not 0.4.
    totals = Totals(tokens=1000, rows=2)
    first = reduced("token_mean", torch.full((1, 100), 0.5), torch.ones(1, 100), totals)
    second = reduced("token_mean", torch.full((1, 900), 0.3), torch.ones(1, 900), totals)
    assert first + second == pytest.approx(0.32)


@pytest.mark.parametrize("name", REDUCTIONS)
@given(
    rows=st.lists(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=5, max_size=5), min_size=1, max_size=7),
    cuts=st.lists(st.integers(0, 6), min_size=7, max_size=7),
    padding=st.integers(0, 3),
)
def test_however_rows_are_cut_into_micro_batches_the_sums_add_up(name, rows, cuts, padding):
    values, mask = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    totals = Totals(tokens=int(mask.sum()), rows=len(rows), horizon=5, prompts=2)
    prompts = torch.arange(len(rows)) % 2
    prompt_tokens = torch.stack([mask[prompts == prompt].sum() for prompt in prompts])
    whole = reduced(name, values, mask, totals, prompt_tokens)
    parts = 0.0
    for cut in set(cuts[: len(rows)]):
        chosen = [row for row in range(len(rows)) if cuts[row] == cut]
        padded = (torch.nn.functional.pad(tensor[chosen], (0, padding)) for tensor in (values, mask))
        parts += reduced(name, *padded, totals, prompt_tokens[chosen])
    assert parts == pytest.approx(whole, abs=1e-12)


BY_ROW = [name for name in REDUCTIONS if name != "prompt_mean"]


@pytest.mark.parametrize("name", BY_ROW)
def test_a_row_without_tokens_counts_as_a_row(name):
    with_it = reduced(name, VALUES, MASK, Totals(tokens=3, rows=3, horizon=10))
    without = reduced(name, VALUES[:2], MASK[:2], Totals(tokens=3, rows=2, horizon=10))
    assert with_it == pytest.approx(without if name == "token_mean" else without * 2 / 3)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_batch_without_tokens_is_0_and_no_division_by_it(name):
    none, some = torch.zeros(0, 3), torch.zeros(3, 3)
    assert reduced(name, VALUES, some, Totals(0, 3, horizon=10, prompts=2), torch.zeros(3)) == 0.0
    assert reduced(name, none, none, Totals(0, 0, horizon=10, prompts=1), torch.zeros(0)) == 0.0


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
def test_weights_of_trained_tokens_add_up_to_1(name):
    weights = reduction(name)(MASK[:2], Totals(tokens=3, rows=2), None)
    assert float(weights.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("horizon", [None, 0])
def test_a_sum_norm_without_a_horizon_is_refused(horizon):
    with pytest.raises(SettingsError, match="needs a horizon") as caught:
        reduction("seq_mean_token_sum_norm")(MASK, Totals(tokens=3, rows=3, horizon=horizon), None)
    assert "train.horizon" in caught.value.hint


def test_a_misspelt_reduction_gets_a_suggestion():
    with pytest.raises(SettingsError, match="unknown loss_reduction `token_men`") as caught:
        reduction("token_men")
    assert caught.value.hint == "Did you mean `token_mean`?"
