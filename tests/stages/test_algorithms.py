"""Algorithms as a run meets them: critic, reference, dynamic sampling, corrections, dry runs, comparison."""

import dataclasses
import json
import shutil
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from outputs import add_advantages
from running import SMALL, same_bytes
from tolerances import GRADIENT, LOGITS, PASS, allowed, assert_close

from nanoskyrl.algos.estimators.base import EstimatorConfig
from nanoskyrl.algos.off_policy import OffPolicyConfig
from nanoskyrl.algos.surrogates.cov import ClipCovConfig, KlCovConfig
from nanoskyrl.stages.advantage import Models
from nanoskyrl.stages.core import code
from nanoskyrl.stages.core.config import merge, stage_config
from nanoskyrl.stages.core.errors import ConflictError, EngineError, InputError, SettingsError
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.metrics import read_metrics
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.registry import ALGOS, lookup
from nanoskyrl.stages.core.rows import row_arrays, to_table
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.core.trajectory import Turn
from nanoskyrl.stages.learning.advantage_config import AdvantageConfig, Sampling, settled
from nanoskyrl.stages.learning.batching import read_sequences
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.objective import Objective
from nanoskyrl.stages.learning.train_config import CriticConfig, OptimizerConfig, TrainConfig
from nanoskyrl.stages.looking.compare import compare
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl.stages.models.policy import critic_digest, resolve_policy, weights_digest
from nanoskyrl.stages.running.loop import loop
from nanoskyrl.stages.running.session import Session

STARTER = resolve_policy("starter")
NO_CORRECTION = OffPolicyConfig()


def settings(algo, **tables):
    return merge(SMALL, {"train": {"algo": algo}}, tables)


def compared(session, names, **options):
    source, start = session.places.training_input()
    config = stage_config(session.settings, "train")
    return compare(source, names, config, policy=start, settings=session.settings, seed=session.config.seed, **options)


def table(directory):
    return pa.concat_tables(read_parts(directory, read_manifest(directory)))


def trained(found, column):
    """Return a column's numbers on all trained tokens."""
    rows = zip(*(row_arrays(found.column(name)) for name in (column, "loss_mask")), strict=True)
    return np.concatenate([numbers[mask != 0] for numbers, mask in rows])


def metrics(run, stage):
    return [line for line in read_metrics(run.metrics) if line["stage"] == stage]


PUBLISHED = {"lag": 1, "lag_defaults": False}
"""Rows one policy old, and recipes as they were published."""


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    """Two steps of PPO."""
    run = Run(tmp_path_factory.mktemp("runs") / "ppo")
    loop(run, settings("ppo"))
    return run


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    """Three steps of GRPO with rollouts one policy old, which nothing holds near the policy that sampled them."""
    run = Run(tmp_path_factory.mktemp("runs") / "grpo")
    loop(run, settings("grpo", run=PUBLISHED, loop={"steps": 3}, train={"algo": "grpo", "lr": 3e-3}))
    return run


# PPO and its critic


def test_a_critic_begins_with_0_and_its_values_are_written_by_advantage(ppo):
    first, second = (table(ppo.stage(step, "advantage")) for step in (0, 1))
    assert all((row == 0).all() for row in row_arrays(first.column("values")))
    for values, returns, advantages, mask in zip(
        *(row_arrays(second.column(c)) for c in ("values", "returns", "advantages", "loss_mask")), strict=True
    ):
        assert (values[mask != 0] != 0).all()
        assert (np.concatenate([values[mask == 0], returns[mask == 0], advantages[mask == 0]]) == 0).all()
    flat = trained(second, "advantages")
    assert flat.mean() == pytest.approx(0, abs=1e-6)
    assert flat.std(ddof=1) == pytest.approx(1, abs=1e-4)


def test_a_critic_is_published_with_its_policy_and_is_no_part_of_its_digest(ppo):
    digests = [critic_digest(ppo.policy(version)) for version in (0, 1, 2)]
    assert digests[0] is None
    assert len(set(digests)) == 3
    assert read_manifest(ppo.stage(0, "train")).facts["critic"] == digests[1]
    assert read_manifest(ppo.stage(1, "advantage")).facts["critic"] == digests[1]
    assert verify(ppo.root).holds
    assert {"critic/grad_norm", "critic/explained_variance", "train/value_loss"} <= metrics(ppo, "train")[0].keys()


def test_ppo_by_hand_gives_the_bytes_of_the_loop(ppo, tmp_path):
    for _ in range(2):
        for stage in STAGES:
            getattr(Session(Run(tmp_path / "hand"), settings("ppo")), stage)()
    assert same_bytes(ppo.root, tmp_path / "hand") == []


def test_a_critic_learns_what_rewards_are(tmp_path):
    run = Run(tmp_path / "run")
    # One reward for all: the return of every token is 1.
    loop(run, settings("ppo", score={"rewards": {"test_rewards:one": 1.0}}, critic={"lr": 2e-3}, loop={"steps": 6}))
    values = trained(table(run.stage(5, "advantage")), "values")
    assert abs(values.mean() - 1) < 0.5
    losses = [line["train/value_loss"] for line in metrics(run, "train")]
    assert losses[-1] < losses[0] / 2


def test_a_critic_can_share_the_policy_s_backbone(tmp_path):
    run = Run(tmp_path / "run")
    loop(run, settings("ppo", critic={"backbone": "shared"}))
    files = {path.name for path in (run.policy(2) / "critic").iterdir()}
    assert files == {"critic.json", "value_head.safetensors"}


def test_ppo_with_adapters_shares_the_backbone_and_goes_on(tmp_path):
    run = Run(tmp_path / "run")
    loop(run, settings("ppo", train={"algo": "ppo", "lora_rank": 4}))
    assert json.loads((run.policy(2) / "critic" / "critic.json").read_text()) == {"backbone": "shared"}


def test_values_of_another_critic_are_refused(ppo, tmp_path):
    session = Session(Run(tmp_path / "run"), settings("ppo"))
    with pytest.raises(InputError, match="the values are of another policy"):
        session.train(source=ppo.stage(1, "advantage"), policy=ppo.policy(2), output=tmp_path / "out")


# The reference


def test_a_kl_in_the_loss_is_0_at_the_reference_and_grows(tmp_path):
    run = Run(tmp_path / "run")
    loop(run, settings("grpo", train={"algo": "grpo", "use_kl_loss": True, "lr": 1e-3}))
    first, second = (table(run.stage(step, "advantage")) for step in (0, 1))
    for ref, recorded, mask in zip(
        *(row_arrays(first.column(c)) for c in ("ref_logprobs", "rollout_logprobs", "loss_mask")), strict=True
    ):
        assert_close(ref[mask == 1], recorded[mask == 1], PASS, scale=LOGITS)
        assert (ref[mask == 0] == 0).all()
    assert second.column("ref_logprobs").null_count == 0
    kl = [line["policy/kl_to_reference"] for line in metrics(run, "train")]
    assert kl[0] == pytest.approx(0, abs=allowed(torch.float32, PASS, LOGITS) ** 2)  # of second order
    assert kl[1] > 1e-6


def test_with_adapters_the_reference_is_the_base_with_the_adapters_off(tmp_path):
    run = Run(tmp_path / "run")
    loop(run, settings("grpo", train={"algo": "grpo", "use_kl_loss": True, "lr": 1e-2, "lora_rank": 4}))
    found = table(run.stage(1, "advantage"))
    wanted = Learner(OptimizerConfig(lora_rank=0))
    wanted.load(run.policy(0))
    for ref, base in zip(
        row_arrays(found.column("ref_logprobs")), wanted.logprobs(read_sequences(found), 1.0, 4096), strict=True
    ):
        assert_close(ref, base, PASS, scale=LOGITS)


def test_a_kl_in_the_reward_is_taken_off_before_the_group_s_mean(grpo):
    scored = table(grpo.stage(2, "score"))
    models = Models(policy=grpo.policy(2), reference=grpo.policy(0))
    config = AdvantageConfig(use_kl_in_reward=True, kl_reward_coef=0.5, ref_logprobs=True, estimator="dr_grpo")
    found = add_advantages(scored, config, models)
    columns = ("reward", "shaped_reward", "rollout_logprobs", "ref_logprobs", "loss_mask")
    shaped = []
    for reward, given, u, f, mask in zip(
        *(scored.column("reward").to_pylist(), found.column("shaped_reward").to_pylist()),
        *(row_arrays(found.column(c)) for c in columns[2:]),
        strict=True,
    ):
        on = mask != 0
        assert given == pytest.approx(reward - 0.5 * float((u[on] - f[on]).sum()), abs=1e-5)
        shaped.append(given)
    groups = found.column("group_id").to_pylist()
    for row, advantages in enumerate(row_arrays(found.column("advantages"))):
        siblings = [value for value, group in zip(shaped, groups, strict=True) if group == groups[row]]
        assert advantages.max(initial=-9) == pytest.approx(shaped[row] - np.mean(siblings), abs=1e-5) or (
            advantages.min(initial=9) == pytest.approx(shaped[row] - np.mean(siblings), abs=1e-5)
        )


# DAPO


@pytest.fixture(scope="module")
def dapo(tmp_path_factory):
    """One step of DAPO over groups of two, most of which have no spread."""
    run = Run(tmp_path_factory.mktemp("runs") / "dapo")
    loop(run, DAPO)
    return run


DAPO = settings(
    "dapo", rollout={**SMALL["rollout"], "n_samples_per_prompt": 2, "train_batch_size": 3, "rows_per_part": 4},
    loop={"steps": 1},
)  # fmt: skip


def test_dynamic_sampling_goes_on_in_whole_rounds_until_enough_groups_have_spread(dapo):
    rollout, facts = table(dapo.stage(0, "rollout")), read_manifest(dapo.stage(0, "rollout")).facts
    assert facts["rounds"] > 1
    assert rollout.num_rows == facts["rounds"] * 6
    assert facts["groups_with_spread"] >= 3
    found = table(dapo.stage(0, "advantage"))
    verdicts: dict[str, list] = {}
    for group, success, reason in zip(
        *(found.column(c).to_pylist() for c in ("group_id", "success", "drop_reason")), strict=True
    ):
        verdicts.setdefault(group, []).append((success, reason))
    spread = [group for group, rows in verdicts.items() if len({success for success, _ in rows}) == 2]
    assert [group for group, rows in verdicts.items() if rows[0][1] is None] == spread[:3]
    assert {rows[0][1] for group, rows in verdicts.items() if group not in spread} == {"zero_variance"}
    assert {verdicts[group][0][1] for group in spread[3:]} <= {"surplus"}
    dropped = read_manifest(dapo.stage(0, "advantage")).dropped
    assert dropped["zero_variance"] == 2 * (len(verdicts) - len(spread))
    assert "reward" not in rollout.column_names


def test_dynamic_sampling_stops_at_the_cap(tmp_path):
    run = Run(tmp_path / "run")
    tables = merge(DAPO, {"rollout": {"max_sample_batches": 2}, "score": {"rewards": {"test_rewards:one": 1.0}}})
    session = Session(run, tables)
    session.rollout()
    facts = read_manifest(run.stage(0, "rollout")).facts
    assert (facts["rounds"], facts["groups_with_spread"]) == (2, 0)


def test_a_killed_dynamic_rollout_goes_on_and_ends_with_the_same_bytes(dapo, tmp_path):
    run = Run(tmp_path / "run")
    Session(run, DAPO).rollout()
    place = run.stage(0, "rollout")
    manifest = read_manifest(place)
    whole = {path.name: path.read_bytes() for path in place.iterdir()}
    started = {k: getattr(manifest, k) for k in ("stage", "settings", "inputs", "policy", "code", "packages")}
    (place / "_manifest.json").unlink()
    (place / "_started.json").write_text(json.dumps(started))
    for name in sorted(whole)[3:]:
        (place / name).unlink(missing_ok=True)
    Session(run, DAPO).rollout()
    assert {path.name: path.read_bytes() for path in place.iterdir()} == whole


def sampled(**changes):
    return Sampling(**{"groups": 4, "max_generate_length": 40, "dynamic_sampling": False, **changes})


def test_dapo_punishes_long_turns_softly_and_others_do_not(group):
    rows = [
        dataclasses.replace(row, completion_tokens=sum(turns), turns=[
            Turn(action="", observation="", done=True, first_token=0, token_count=count) for count in turns
        ])
        for row, turns in zip(group([1.0, 1.0, 0.0]), ((30, 30), (34,), (2, 40)), strict=True)
    ]  # fmt: skip
    for algo, shaped in (("dapo", [1.0, 0.75, -1.0]), ("grpo", [1.0, 1.0, 0.0])):
        config = settled(AdvantageConfig(), lookup("algo", algo), TrainConfig(), sampled())
        found = add_advantages(to_table(rows, "score"), config)
        assert found.column("shaped_reward").to_pylist() == pytest.approx(shaped)
        assert found.column("reward").to_pylist() == [1.0, 1.0, 0.0]


def test_a_step_in_which_nothing_can_be_learnt_leaves_the_policy_as_it_is(tmp_path):
    run = Run(tmp_path / "run")
    # So cold that a group's attempts are all equal.
    cold = {"rollout": {"max_sample_batches": 2, "temperature": 0.001}, "loop": {"steps": 2}}
    loop(run, merge(DAPO, cold))
    assert [line["train/optimizer_steps"] for line in metrics(run, "train")] == [0, 0]
    assert len({weights_digest(run.policy(version)) for version in (0, 1, 2)}) == 1
    assert verify(run.root).holds


def test_what_advantage_goes_by_is_how_the_rows_were_sampled(dapo, tmp_path):
    scored = dapo.stage(0, "score")
    assert read_manifest(scored).facts["sampling"] == {
        "groups": 3, "max_generate_length": 32, "dynamic_sampling": True,
    }  # fmt: skip
    other = Session(Run(tmp_path / "run"), settings("dapo", rollout={"train_batch_size": 1, "max_generate_length": 99}))
    config = other.advantage_config(scored)
    assert (config.max_groups, config.overlong_max_length, config.overlong_buffer_length) == (3, 32, 6)


# Several steps, temperature, corrections


def test_a_discount_goes_on_from_one_row_of_a_trajectory_to_the_next(group):
    # Pitfall 8 as GAE meets it: the reward of two rows falls on the last token of the last.
    row = group([1.0])[0]
    rows = [
        dataclasses.replace(row, step_index=step, is_last_step=step == 1, response_ids=np.arange(n, dtype=np.int32),
                            loss_mask=np.ones(n, np.int8), rollout_logprobs=np.full(n, -1, np.float32))
        for step, n in ((1, 3), (0, 2))
    ]  # fmt: skip
    found = add_advantages(to_table(rows, "score"), AdvantageConfig(estimator="reinforce_pp", gamma=0.5))
    returns = [row.tolist() for row in row_arrays(found.column("returns"))]
    assert returns == [[0.25, 0.5, 1.0], [0.0625, 0.125]]


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_at_the_temperature_of_the_shard_the_ratio_is_1_on_policy(tmp_path, temperature):
    run = Run(tmp_path / "run")
    tables = merge(settings("grpo"), {"rollout": {"temperature": temperature}})
    for stage in ("rollout", "score", "advantage"):
        getattr(Session(run, tables), stage)()
    found = Session(run, tables).preview_train()
    assert_close(found["train/ratio/mean"], 1.0, PASS, scale=LOGITS / temperature)
    assert_close(found["train/ratio/max"], 1.0, PASS, scale=LOGITS / temperature)


def objective(rows, *, algo="grpo", off_policy=NO_CORRECTION, algo_config=None, **changes):
    algorithm = lookup("algo", algo)
    config = TrainConfig(algo=algo, **changes)
    return Objective(
        algorithm, algo_config or algorithm.Config(), config, read_sequences(rows), 1.0, off_policy=off_policy
    )


PARTS = {
    "all that can be added": {
        "use_kl_loss": True, "kl_estimator_type": "k3", "loss_reduction": "prompt_mean",
        "off_policy": OffPolicyConfig(
            weight="token", normalize=True, reject="product", reject_band=(0.01, 100.0), denominator="kept"
        ),
    },
    **{name: {} for name in sorted(ALGOS)},
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_an_objective_is_the_sum_of_its_micro_batches(stale, grpo, name):
    # A row without a sampled token is in the totals and in no micro-batch.
    rows = pa.concat_tables([stale, without_tokens(stale.slice(0, 1))])
    learner = Learner()
    learner.load(grpo.policy(2))
    gradients, losses = [], []
    for tokens in (16384, 200):
        made = objective(
            rows, algo=name if name in ALGOS else "grpo", max_tokens_per_micro_batch=tokens, horizon=32, **PARTS[name]
        )
        mini = made.mini_batch(list(range(rows.num_rows)))
        batches, terms = list(made.batches(mini, learner)), []

        def loss_of(batch, made=made, mini=mini, terms=terms):
            terms.append(made.terms(learner, batch, mini))
            return terms[-1].loss

        gradients.append(learner.gradient(batches, loss_of))
        losses.append(sum(float(term.loss.detach()) for term in terms))
    assert len(batches) > 1
    assert_close(losses[0], losses[1], PASS, scale=1.0)
    assert_close(gradients[0], gradients[1], GRADIENT)


MARKING = {
    "clip_cov": ClipCovConfig(clip_cov_ratio=0.2, clip_cov_lb=0.0), "kl_cov": KlCovConfig(kl_cov_ratio=0.2),
}  # fmt: skip


@pytest.mark.parametrize("algo", MARKING)
def test_marks_are_of_the_whole_mini_batch_however_it_is_cut(stale, grpo, algo):
    learner = Learner()
    learner.load(grpo.policy(0))  # not where old log-probs are from: all distances are 0 there
    rows = pa.concat_tables([stale, without_tokens(stale.slice(0, 1))])
    marks, gradients = [], []
    for tokens in (16384, 200):
        made = objective(rows, algo=algo, algo_config=MARKING[algo], max_tokens_per_micro_batch=tokens)
        mini = made.mini_batch(list(range(rows.num_rows)))
        batches = list(made.batches(mini, learner))
        found = {}
        for batch in batches:
            for row, line in zip(batch.rows, batch.marked, strict=True):
                found[row] = line.nonzero().flatten().tolist()
        marks.append(found)
        gradients.append(learner.gradient(batches, lambda batch, of=made, m=mini: of.terms(learner, batch, m).loss))
    assert len(batches) > 1
    assert marks[0] == marks[1]
    trained = sum(made.sequences.trained_tokens)
    assert sum(map(len, marks[0].values())) == int(0.2 * trained)
    assert_close(gradients[0], gradients[1], GRADIENT)
    drawn_anew = [batch.marked for batch in made.batches(mini, learner)]
    same = all(torch.equal(a, b.marked) for a, b in zip(drawn_anew, batches, strict=True))
    assert same == (algo == "kl_cov")


def test_a_train_that_draws_tokens_ends_with_the_same_bytes(grpo, tmp_path):
    tables = settings(
        "clip_cov", run=PUBLISHED, clip_cov={"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0},
        train={"algo": "clip_cov", "policy_mini_batch_size": 2, "update_epochs_per_batch": 2},
    )  # fmt: skip
    session = Session(grpo, tables)
    digests = {session.train(2, output=tmp_path / name).manifest.digest for name in "ab"}
    assert len(digests) == 1


def test_what_marks_tokens_is_compared_and_previewed_with_its_share(grpo):
    tables = settings("grpo", run=PUBLISHED, clip_cov={"clip_cov_ratio": 0.2}, kl_cov={"kl_cov_ratio": 0.2})
    session = Session(grpo, tables)
    _, clip_cov, kl_cov = compared(session, ["reinforce", "clip_cov", "kl_cov"]).to_pylist()
    assert (clip_cov["share_name"], kl_cov["share_name"]) == ("clip_ratio", "held_ratio")
    assert 0 < clip_cov["share"] <= 0.2
    assert kl_cov["share"] == pytest.approx(0.2, abs=0.01)
    assert Session(grpo, merge(tables, {"train": {"algo": "kl_cov"}})).preview_train()["policy/held_ratio"] == (
        pytest.approx(kl_cov["share"])
    )


def without_tokens(row):
    """Return a row whose response is empty."""
    for name in ("response_ids", "loss_mask", "rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs"):
        index = row.schema.get_field_index(name)
        row = row.set_column(index, row.schema.field(index), pa.array([[]], row.schema.field(index).type))
    return row


@pytest.fixture(scope="module")
def stale(grpo, tmp_path_factory):
    """Rows one policy old, with log-probs under the policy that training starts from and under the reference."""
    tables = settings("grpo", run={"lag": 1}, advantage={"old_logprobs": "recompute", "ref_logprobs": True})
    return table(Session(grpo, tables).advantage(2, output=tmp_path_factory.mktemp("stale") / "advantage").output)


def test_stale_rows_are_weighed_against_the_policy_that_sampled_them(grpo, tmp_path):
    tables = settings(
        "grpo", run={"lag": 1}, advantage={"old_logprobs": "recompute"}, off_policy={"weight": "token", "cap": 1.5}
    )
    session = Session(grpo, tables)
    made = session.advantage(2, output=tmp_path / "advantage").output
    rows = table(made)
    found = objective(rows, off_policy=OffPolicyConfig(weight="token", cap=1.5)).sequences
    for weights, old, sampled, mask in zip(
        found.weights, found.old_logprobs, found.rollout_logprobs, found.loss_mask, strict=True
    ):
        on = mask != 0
        np.testing.assert_allclose(weights[on], np.minimum(np.exp(old[on] - sampled[on]), 1.5), rtol=1e-5)
        assert (weights[~on] == 0).all()
    assert max(float(w.max()) for w in found.weights) == 1.5
    numbers = session.preview_train(source=made, policy=grpo.policy(2))
    assert numbers["policy/off_policy_weight"] != pytest.approx(1.0, abs=1e-4)
    assert_close(numbers["train/ratio/max"], 1.0, PASS, scale=LOGITS)


@pytest.mark.parametrize("algo", ["grpo", "dapo"])
def test_the_denominator_can_be_what_was_kept_and_the_kl_s_is_all(stale, grpo, algo):
    band = OffPolicyConfig(reject="geometric", reject_band=(0.9, 1.0))
    learner = Learner()
    learner.load(grpo.policy(2))
    found = {}
    for denominator in ("all", "kept"):
        made = objective(
            stale, algo=algo, use_kl_loss=True, off_policy=dataclasses.replace(band, denominator=denominator)
        )
        mini = made.mini_batch(list(range(stale.num_rows)))
        (batch,) = made.batches(mini, learner)
        found[denominator] = made.terms(learner, batch, mini)
    kept, rows = made.kept_tokens, stale.num_rows
    share = sum(kept) / sum(made.sequences.trained_tokens) if algo == "dapo" else sum(n > 0 for n in kept) / rows
    assert 0 < share < 1
    assert found["all"].policy_loss.item() == pytest.approx(
        share * found["kept"].policy_loss.item(), rel=allowed(torch.float32, PASS)
    )
    assert found["all"].kl_loss.item() == pytest.approx(found["kept"].kl_loss.item(), rel=allowed(torch.float32, PASS))


def test_weights_against_the_sampler_need_log_probs_of_their_own(grpo):
    tables = settings("grpo", off_policy={"weight": "token"})
    with pytest.raises(InputError, match="rows lack old_logprobs"):
        Session(grpo, tables).preview_train(source=grpo.stage(2, "advantage"))


@pytest.mark.parametrize("back", ["grpo", "sapo"])
def test_a_run_can_go_over_to_another_algorithm_and_back(ppo, tmp_path, back):
    shutil.copytree(ppo.root, tmp_path / "run")
    run = Run(tmp_path / "run")
    for algo in (back, "ppo"):
        for stage in STAGES:
            getattr(Session(run, settings(algo)), stage)()
    assert (critic_digest(run.policy(3)), critic_digest(run.policy(4)) is None) == (None, False)
    assert verify(run.root).holds


def test_a_saved_critic_s_backbone_does_not_change_in_silence(ppo, tmp_path):
    with pytest.raises(SettingsError, match=r"has the backbone `own`, and `critic\.backbone` is shared"):
        Session(ppo, settings("ppo", critic={"backbone": "shared"})).preview_train()


def test_a_spoilt_critic_is_one_error(ppo, tmp_path):
    shutil.copytree(ppo.root, tmp_path / "run")
    (tmp_path / "run" / "policies" / "00000002" / "critic" / "value_head.safetensors").write_bytes(b"x" * 40)
    learner = Learner(critic=CriticConfig())
    with pytest.raises(InputError, match=r"the critic of .* is not the one"):
        learner.load(tmp_path / "run" / "policies" / "00000002")


def test_by_hand_gives_the_bytes_of_the_loop_whatever_asks_for_models(tmp_path):
    tables = settings(
        "ppo", train={"algo": "ppo", "lora_rank": 4, "dtype": "bfloat16"}, sync={"tolerance": 1.0},
        advantage={"use_kl_in_reward": True, "old_logprobs": "recompute"},
    )  # fmt: skip
    loop(Run(tmp_path / "loop"), tables)
    for _ in range(2):
        for stage in STAGES:
            getattr(Session(Run(tmp_path / "hand"), tables), stage)()
    assert same_bytes(tmp_path / "loop", tmp_path / "hand") == []
    assert read_manifest(tmp_path / "hand" / "step-000001" / "advantage").settings["passes"] == {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("rollout", "advantage", "says"),
    [
        ({"temperature": 0.5, "logprobs_mode": "raw"}, {}, "rows hold raw log-probs"),
        ({"logprobs_mode": "recomputed"}, {}, "rows have no log-probs"),
    ],
    ids=["raw", "none"],
)
def test_log_probs_of_another_distribution_are_refused(tmp_path, rollout, advantage, says):
    run = Run(tmp_path / "run")
    tables = merge(settings("grpo", advantage=advantage), {"rollout": rollout})
    for stage in ("rollout", "score", "advantage"):
        getattr(Session(run, tables), stage)()
    with pytest.raises(InputError, match=says):
        Session(run, tables).preview_train()


def test_stale_rows_without_recorded_log_probs_are_refused(tmp_path):
    run = Run(tmp_path / "run")
    tables = settings(
        "grpo", run={"lag": 1}, rollout={**SMALL["rollout"], "logprobs_mode": "recomputed"},
        advantage={"old_logprobs": "recompute"},
    )  # fmt: skip
    with pytest.raises(InputError, match="weighs old log-probs against the sampling policy's"):
        loop(run, tables)  # what a lag adds reads them from the first step on
    with pytest.raises(InputError, match="were sampled by another policy than"):
        loop(run, merge(tables, {"run": {"lag_defaults": False}}), force=True)
    assert len(metrics(run, "train")) == 1


def test_a_kl_in_the_reward_is_never_taken_from_nothing(tmp_path):
    run = Run(tmp_path / "run")
    tables = settings(
        "ppo", rollout={**SMALL["rollout"], "logprobs_mode": "recomputed"}, advantage={"use_kl_in_reward": True}
    )
    with pytest.raises(InputError, match="needs log-probs, and rows have none"):
        loop(run, tables)


# What is lost, changed, or of the user's own making


@pytest.mark.parametrize("what", ["gone", "not the one"])
def test_a_critic_that_is_gone_or_changed_is_found(ppo, tmp_path, what):
    shutil.copytree(ppo.root, tmp_path / "run")
    run = Run(tmp_path / "run")
    critic = run.policy(2) / "critic"
    if what == "gone":
        shutil.rmtree(critic)
    else:
        head = critic / "value_head.safetensors"
        data = head.read_bytes()
        head.unlink()  # a hard link: the step's own stays as it is
        head.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert any("the critic of" in line for line in verify(run.root).broken)
    session = Session(run, settings("ppo"))
    session.rollout()
    session.score()
    with pytest.raises(InputError, match=f"the critic of .* is {what}"):
        session.advantage()


def test_scores_of_a_rollout_that_was_replaced_are_refused(tmp_path):
    run = Run(tmp_path / "run")
    Session(run, settings("grpo")).rollout()
    Session(run, settings("grpo")).score()
    Session(run, merge(settings("grpo"), {"rollout": {"temperature": 0.9}})).rollout(0, force=True)
    with pytest.raises(InputError, match="was made from another `rollout`"):
        Session(run, settings("grpo")).advantage()


MINE = """
from dataclasses import dataclass
import numpy as np, torch
from nanoskyrl.algos.estimators.base import Estimates, Estimator
from nanoskyrl.algos.base import Algorithm

@dataclass(frozen=True)
class Config:
    pass

def algorithm(surrogate):
    made = {"estimator": "grpo", "loss_reduction": "token_mean", "source": "here"}
    return Algorithm(name="mine", surrogate=surrogate, Config=Config, **made)

def marking(marks):
    return Algorithm(name="mine", surrogate=lambda inputs, config: (value(inputs), {}), Config=Config, marks=marks,
                     estimator="grpo", loss_reduction="token_mean", source="here")

def fails(inputs, config):
    raise KeyError("kaboom")

def value(inputs):
    return inputs.log_ratio.exp() * inputs.advantages

FAILS = algorithm(fails)
NOTHING = algorithm(lambda inputs, config: None)
BARE = algorithm(lambda inputs, config: value(inputs))
SCALAR = algorithm(lambda inputs, config: (value(inputs).mean(), {}))
DETACHED = algorithm(lambda inputs, config: (value(inputs).detach(), {}))
NAN = algorithm(lambda inputs, config: (value(inputs) * float("nan"), {}))
GOOD = algorithm(lambda inputs, config: (value(inputs), {}))
MARKS_NONE = marking(lambda inputs, config, random: None)
MARKS_FAIL = marking(lambda inputs, config, random: 1 / 0)
NUMBER = 7
E_NONE = Estimator(name="mine", estimate=lambda batch, config: None)
E_FEW = Estimator(name="mine", estimate=lambda batch, config: Estimates([]))
E_NAN = Estimator(name="mine", estimate=lambda batch, config: Estimates([mask * float("nan") for mask in batch.masks]))
E_FAILS = Estimator(name="mine", estimate=lambda batch, config: 1 / 0)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "of_the_user.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "of_the_user.py"
    sys.modules.pop("of_the_user", None)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("FAILS", "algorithm `mine` failed: KeyError"), ("NOTHING", "no pair of an objective and named values"),
        ("BARE", "no pair of an objective"), ("SCALAR", r"has the shape \[\]"), ("DETACHED", "carries no gradient"),
        ("NUMBER", "is a int, not an Algorithm"), ("MARKS_NONE", "its marks are no Tensor of the shape"),
        ("MARKS_FAIL", "algorithm `mine` failed: ZeroDivisionError"),
    ],
)  # fmt: skip
def test_an_algorithm_of_the_user_s_that_is_none_is_one_error(grpo, mine, name, says):
    with pytest.raises(SettingsError, match=says):
        Session(grpo, settings(f"of_the_user:{name}", run=PUBLISHED)).preview_train()


@pytest.mark.parametrize("name", ["E_NONE", "E_FEW", "E_NAN", "E_FAILS", "NUMBER"])
def test_an_estimator_of_the_user_s_that_is_none_is_one_error(grpo, mine, name):
    made = settings("grpo", run=PUBLISHED, advantage={"estimator": f"of_the_user:{name}"})
    with pytest.raises(SettingsError, match=r"estimator `mine` failed|is a int, not an Estimator"):
        Session(grpo, made).preview_advantage()


def test_a_gradient_that_is_never_finite_is_no_training(grpo, mine, tmp_path):
    session = Session(grpo, settings("of_the_user:NAN", run=PUBLISHED))
    with pytest.raises(EngineError, match="the gradient is not finite"):
        session.preview_train()
    with pytest.raises(EngineError, match="was not finite in any of 1 optimizer steps"):
        session.train(2, output=tmp_path / "train")


def test_an_algorithm_of_the_user_s_that_was_changed_is_another(grpo, mine, tmp_path):
    made = settings("of_the_user:GOOD", run=PUBLISHED)
    Session(grpo, made).train(2, output=tmp_path / "train")
    assert Session(grpo, made).train(2, output=tmp_path / "train").up_to_date
    mine.write_text(f"{MINE}\n# A comment.\n")
    code._read.cache_clear()  # as in another process
    assert Session(grpo, made).train(2, output=tmp_path / "train").up_to_date
    mine.write_text(f"{MINE}\nMORE = 1\n")
    code._read.cache_clear()
    with pytest.raises(ConflictError, match="plugins"):
        Session(grpo, made).train(2, output=tmp_path / "train")


# Dry runs and comparison


def listing(root):
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*")}


def test_dry_runs_change_nothing(grpo, tmp_path):
    shutil.copytree(grpo.root, tmp_path / "run")
    before = listing(tmp_path / "run")
    session = Session(Run(tmp_path / "run"), settings("grpo", run=PUBLISHED))
    assert session.preview_advantage().equals(table(grpo.stage(2, "advantage")))
    numbers = session.preview_train()
    assert {"train/loss", "gradient norm", "policy/clip_ratio"} <= numbers.keys()
    assert listing(tmp_path / "run") == before


def test_a_dry_advantage_publishes_no_policy(tmp_path):
    run = Run(tmp_path / "run")
    tables = settings("grpo", rollout={**SMALL["rollout"], "engine": "scripted"}, run={"policy": "nobody/there"})
    for stage in ("rollout", "score"):
        getattr(Session(run, tables), stage)()
    assert Session(run, tables).preview_advantage().num_rows == 16
    assert not (run.root / "policies").exists()


def test_a_dry_advantage_loads_no_model(grpo, monkeypatch):
    import nanoskyrl.stages.learning.learner as learner

    monkeypatch.setattr(learner, "load_model", None)
    assert Session(grpo, settings("grpo")).preview_advantage().num_rows == 16


def test_on_policy_algorithms_differ_in_their_reduction_alone(tmp_path):
    run = Run(tmp_path / "run")
    loop(run, settings("grpo", loop={"steps": 1}))
    names = ["grpo", "sapo", "gspo", "dapo", "cispo", "gmpo", "dppo_tv", "dppo_kl", "reinforce"]
    tables = settings("grpo", train={"algo": "grpo", "loss_reduction": "token_mean"})
    found = compared(Session(run, tables), names, output=tmp_path / "compared.parquet")
    for row in found.to_pylist():
        assert_close([value for _, value in row["cosines"]], [1.0] * len(names), GRADIENT)
        assert row["share"] == {"sapo": pytest.approx(1), "reinforce": None}.get(row["algo"], 0)
        assert_close(row["gradient_norm"], found.column("gradient_norm")[0].as_py(), GRADIENT)
        assert len(row["weight"]) == 16
    assert pq.read_table(tmp_path / "compared.parquet").column("algo").to_pylist() == names


def test_off_policy_algorithms_differ(grpo):
    found = {
        row["algo"]: row
        for row in compared(Session(grpo, settings("grpo", run=PUBLISHED)), ["grpo", "sapo", "gspo"]).to_pylist()
    }
    assert found["grpo"]["ratio_max"] > 1.1
    assert found["gspo"]["share"] > found["grpo"]["share"]
    assert 0 < found["sapo"]["share"] < 1
    assert dict(found["grpo"]["cosines"])["gspo"] < 0.999


@pytest.mark.parametrize(
    ("algo", "made", "says"),
    [
        ("ppo", {}, "takes advantages of `gae`"),
        ("rloo", {}, "takes advantages of `rloo`"),
        ("grpo", {"overlong_buffer_length": 4}, "does not shape rewards by length"),
        ("sapo", {"use_kl_in_reward": True}, "has no KL in its reward"),
    ],
)
def test_advantages_of_another_algorithm_are_refused(grpo, tmp_path, algo, made, says):
    place = Session(grpo, settings("grpo", run={"lag": 1}, advantage=made)).advantage(2, output=tmp_path / "a").output
    with pytest.raises(SettingsError, match=says) as caught:
        Session(grpo, settings(algo)).preview_train(source=place, policy=grpo.policy(2))
    assert "--allow-estimator" in caught.value.hint


@pytest.mark.parametrize("algo", ["sapo", "gspo", "dapo", "cispo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov"])
def test_algorithms_of_grpo_s_family_take_its_advantages(grpo, algo):
    assert Session(grpo, settings(algo, run=PUBLISHED)).preview_train()["rows"] == 16


def test_the_defaults_of_an_algorithm_decide_what_was_left_open():
    found = {
        name: settled(AdvantageConfig(), lookup("algo", name), TrainConfig(), sampled(dynamic_sampling=name == "dapo"))
        for name in ALGOS
    }
    assert {name: config.estimator for name, config in found.items() if name != config.estimator} == {
        "ppo": "gae", "sapo": "grpo", "gspo": "grpo", "dapo": "grpo", "cispo": "grpo", "gmpo": "grpo",
        "dppo_tv": "grpo", "dppo_kl": "grpo", "clip_cov": "grpo", "kl_cov": "grpo",
        "reinforce": "reinforce_pp",
    }  # fmt: skip
    assert [name for name, config in found.items() if config.max_groups] == ["dapo"]
    assert [name for name, config in found.items() if config.overlong_buffer_length] == ["dapo"]
    assert EstimatorConfig().lambd == 0.95
