import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tolerances import LOGITS, PASS, assert_close

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.engines.base import HfConfig, Request, SamplingParams
from nanoskyrl.stages.engines.hf import HfEngine, draw
from nanoskyrl.stages.models.loading import load_model
from nanoskyrl.stages.models.policy import resolve_policy

QUESTIONS = [
    f"What is {a} + {b}?\nGive the final answer in <answer></answer> tags." for a, b in ((12, 9), (27, 85), (99, 1))
]


def engine(**changes):
    made = HfEngine(HfConfig(device="cpu", **changes))
    made.load(resolve_policy("starter"))
    return made


@pytest.fixture(scope="module")
def up():
    return engine()


def requests(engine, count=12, max_tokens=32):
    prompts = [engine.renderer.prompt_ids([{"role": "user", "content": q}]) for q in QUESTIONS]
    return [Request(prompt_ids=prompts[i % 3], seed=1000 + i, max_tokens=max_tokens - i % 2) for i in range(count)]


def test_the_same_requests_give_the_same_bytes(up):
    first, second = (up.generate(requests(up), SamplingParams()) for _ in range(2))
    assert [g.token_ids for g in first] == [g.token_ids for g in second]
    assert all(a.rollout_logprobs.tobytes() == b.rollout_logprobs.tobytes() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("length", [1, 25, 41])
def test_where_weights_lie_in_their_file_changes_no_byte(up, tmp_path, length):
    policy = tmp_path / "policy"
    shutil.copytree(resolve_policy("starter"), policy)
    weights = policy / "model.safetensors"
    save_file(load_file(weights), weights, metadata={"format": "pt", "more": "m" * length})  # the header grows
    made = HfEngine(HfConfig(device="cpu"))
    made.load(policy)
    assert {weight.data_ptr() % 64 for weight in made._model.parameters()} == {0}
    first, second = (each.generate(requests(up, count=1), SamplingParams()) for each in (up, made))
    assert [g.rollout_logprobs.tobytes() for g in first] == [g.rollout_logprobs.tobytes() for g in second]


@pytest.mark.parametrize("size", [1, 5, 7])
def test_batch_size_changes_no_token_and_no_logprob_beyond_rounding(up, size):
    whole = up.generate(requests(up), SamplingParams())
    parts = engine(batch_size=size).generate(requests(up), SamplingParams())
    assert [g.token_ids for g in whole] == [g.token_ids for g in parts]
    for a, b in zip(whole, parts, strict=True):
        assert_close(a.rollout_logprobs, b.rollout_logprobs, PASS, scale=LOGITS)


@pytest.mark.slow
def test_in_float64_no_row_hangs_on_the_rows_beside_it():
    done = []
    for size in (1, 16):
        made = engine(dtype="float64", batch_size=size)
        made._stop_ids = frozenset({1 << 30})  # no token ends a row before its 200
        asked = []
        for i in range(16):  # prompts of several lengths, so that batches are padded
            text = f"What is {7 * i} + {i * i}?" + " Take care." * (i % 5)
            prompt = made.renderer.prompt_ids([{"role": "user", "content": text}])
            asked.append(Request(prompt_ids=prompt, seed=i, max_tokens=200))
        done.append(made.generate(asked, SamplingParams()))
    assert {len(g.token_ids) for g in done[0]} == {200}
    assert [g.token_ids for g in done[0]] == [g.token_ids for g in done[1]]
    gap = max(np.abs(a.rollout_logprobs.astype(float) - b.rollout_logprobs).max() for a, b in zip(*done, strict=True))
    assert gap < 1e-9  # in float32 it is 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_pass_at_the_temperature(up, temperature):
    made = up.generate(requests(up, 6), SamplingParams(temperature=temperature))
    model = load_model(resolve_policy("starter"), dtype=torch.float32, device="cpu")
    for request, generation in zip(requests(up, 6), made, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *generation.token_ids]])
        with torch.no_grad():
            logp = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
        start = len(request.prompt_ids)
        expected = logp[start - 1 :].gather(-1, ids[0, start:, None])[:, 0]
        assert_close(generation.rollout_logprobs, expected, PASS, scale=LOGITS)


def test_generations_end_at_a_stop_token_or_at_their_own_limit(up):
    for request, generation in zip(
        requests(up, 12, 6), up.generate(requests(up, 12, 6), SamplingParams()), strict=True
    ):
        stopped = generation.token_ids[-1] in up.stop_ids
        assert generation.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(generation.token_ids) == request.max_tokens
        assert not set(generation.token_ids[:-1]) & up.stop_ids


def test_greedy_takes_the_likeliest_token_whatever_the_seed(up):
    a = up.generate(
        [Request(prompt_ids=r.prompt_ids, seed=1, max_tokens=24) for r in requests(up, 3)],
        SamplingParams(temperature=0),
    )
    b = up.generate(
        [Request(prompt_ids=r.prompt_ids, seed=2, max_tokens=24) for r in requests(up, 3)],
        SamplingParams(temperature=0),
    )
    assert [g.token_ids for g in a] == [g.token_ids for g in b]


def test_the_starter_can_add_when_it_is_greedy(up):
    made = up.generate(requests(up, 3), SamplingParams(temperature=0))
    texts = [up.renderer.decode(g.token_ids) for g in made]
    assert [
        right in text for right, text in zip(("<answer>21<", "<answer>112<", "<answer>100<"), texts, strict=True)
    ] == [True] * 3


def test_recomputed_mode_leaves_logprobs_out(up):
    assert all(
        g.rollout_logprobs is None for g in up.generate(requests(up, 2), SamplingParams(logprobs_mode="recomputed"))
    )


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(40000, 4)
    uniform = torch.from_numpy(np.random.default_rng(0).random(40000))
    ids, logprobs = draw(logits, uniform, SamplingParams())
    shares = torch.bincount(ids, minlength=4) / len(ids)
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.01, rtol=0)
    torch.testing.assert_close(logprobs, logits[0][ids])


def test_a_token_without_probability_is_never_drawn_at_either_end_of_the_range():
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]] * 2)
    ids, _ = draw(logits, torch.tensor([0.0, 1.0 - 2**-53]), SamplingParams())
    assert ids.tolist() == [1, 2]


def test_top_k_and_top_p_renormalise_processed_logprobs_and_leave_raw_ones():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for cut in ({"top_k": 2}, {"top_p": 0.7}):
        ids, processed = draw(logits, torch.tensor([0.99]), SamplingParams(**cut))
        assert ids.tolist() == [1]
        torch.testing.assert_close(processed, torch.tensor([0.3 / 0.8]).log())
        _, raw = draw(logits, torch.tensor([0.99]), SamplingParams(**cut, logprobs_mode="raw"))
        torch.testing.assert_close(raw, torch.tensor([0.3]).log())


def test_new_weights_taken_in_place_equal_a_fresh_load(tmp_path, up):
    from safetensors.torch import load_file, save_file

    other = tmp_path / "policy"
    other.mkdir()
    for file in resolve_policy("starter").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = {name: value + 0.01 for name, value in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    moved, fresh = engine(), HfEngine(HfConfig(device="cpu"))
    before = moved.logprobs([5, 6, 7, 8])
    model = moved._model
    moved.load(other)
    fresh.load(other)
    assert moved._model is model
    assert moved.logprobs([5, 6, 7, 8]) == fresh.logprobs([5, 6, 7, 8]) != before


def test_a_prompt_of_tokens_that_the_model_does_not_embed_is_an_input_error(up):
    request = Request(prompt_ids=[1, 10_000], seed=0, max_tokens=4)
    with pytest.raises(InputError, match=r"a prompt holds the token 10000, and the model of .* embeds 640"):
        up.generate([request], SamplingParams())
