"""Each stage on small real shards: what goes in, what comes out, and what is the same when it runs again."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest
from outputs import add_advantages
from tolerances import LOGITS, PASS, assert_close

from nanoskyrl.envs.base import Score
from nanoskyrl.stages.advantage import Models, advantage, preview as preview_advantage
from nanoskyrl.stages.core.errors import ConflictError, InputError, Notice, ProofError, SettingsError
from nanoskyrl.stages.core.manifest import Head, read_manifest
from nanoskyrl.stages.core.metrics import MetricsLog, read_metrics
from nanoskyrl.stages.core.output import open_output
from nanoskyrl.stages.core.rows import from_table, list_column, row_arrays, to_table
from nanoskyrl.stages.core.shards import read_part, read_parts
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.core.trajectory import schema_of
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.engines.task_order import TaskOrder
from nanoskyrl.stages.eval import EvalConfig, evaluate
from nanoskyrl.stages.learning.advantage_config import AdvantageConfig
from nanoskyrl.stages.learning.learner import Learner
from nanoskyrl.stages.learning.train_config import OptimizerConfig, TrainConfig
from nanoskyrl.stages.looking.compare import compare
from nanoskyrl.stages.looking.headlines import headline
from nanoskyrl.stages.models.policy import policy_digest, read_info, resolve_policy
from nanoskyrl.stages.rollout import prepare, rollout
from nanoskyrl.stages.score import ScoreConfig, score, score_table, weighted
from nanoskyrl.stages.sync import SyncConfig, sync
from nanoskyrl.stages.train import preview, train

STARTER = resolve_policy("starter")
SMALL = RolloutConfig(train_batch_size=4, n_samples_per_prompt=4, max_generate_length=32, rows_per_part=8)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """One step of the small loop, made once for the module."""
    root = tmp_path_factory.mktemp("shards")
    rollout(STARTER, root / "rollout", SMALL)
    score(root / "rollout", root / "score", ScoreConfig())
    advantage(root / "score", root / "advantage", AdvantageConfig())
    train(root / "advantage", root / "train", TrainConfig(), policy=STARTER)
    return root


def table(directory):
    return pa.concat_tables(read_parts(directory, read_manifest(directory)))


def contents(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_a_rollout_run_again_gives_the_same_bytes(shards, tmp_path):
    rollout(STARTER, tmp_path / "rollout", SMALL)
    assert contents(tmp_path / "rollout") == contents(shards / "rollout")


def test_a_rollout_whose_second_part_was_lost_makes_only_that_and_ends_with_the_same_bytes(shards, tmp_path):
    whole = contents(shards / "rollout")
    directory = tmp_path / "rollout"
    directory.mkdir()
    manifest = read_manifest(shards / "rollout")
    started = {k: getattr(manifest, k) for k in ("stage", "settings", "inputs", "policy", "code", "packages")}
    (directory / "_started.json").write_text(json.dumps(started))
    (directory / "part-00000.parquet").write_bytes(whole["part-00000.parquet"])
    kept = (directory / "part-00000.parquet").stat().st_mtime_ns
    rollout(STARTER, directory, SMALL)
    assert contents(directory) == whole
    assert (directory / "part-00000.parquet").stat().st_mtime_ns == kept


def test_a_finished_rollout_is_up_to_date_and_other_settings_are_refused(shards):
    before = contents(shards / "rollout")
    rollout(STARTER, shards / "rollout", SMALL)
    assert contents(shards / "rollout") == before
    with pytest.raises(ConflictError, match=r"settings\.rollout\.temperature.*1\.0.*0\.5"):
        rollout(STARTER, shards / "rollout", RolloutConfig(**{**_plain(SMALL), "temperature": 0.5}))


def _plain(config):
    import dataclasses

    return dataclasses.asdict(config)


def test_text_columns_are_the_decoded_ids(shards):
    from nanoskyrl.stages.models.loading import load_tokenizer
    from nanoskyrl.stages.models.rendering import Renderer

    decode = Renderer(load_tokenizer(STARTER)).decode
    for row in from_table(table(shards / "rollout")):
        assert decode(row.prompt_ids) == row.prompt
        assert decode(row.response_ids) == row.response


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """An evaluation with files beside its shards, made once for the module."""
    place = tmp_path_factory.mktemp("evaluated") / "text_math"
    evaluate(STARTER, place, EvalConfig(limit=4), SMALL)
    (place / "_files").mkdir()
    (place / "_files" / "predictions.jsonl").write_text("{}\n")
    return place


@pytest.mark.parametrize("stage", ["rollout", "score", "advantage", "eval"])
def test_a_stage_s_folder_is_a_data_set_to_every_reader(shards, evaluated, stage, tmp_path, monkeypatch):
    import datasets
    import duckdb
    import pandas as pd
    import polars as pl
    import pyarrow.parquet as pq

    folder = evaluated if stage == "eval" else shards / stage
    rows = read_manifest(folder).rows_out
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    found = {
        "pandas": pd.read_parquet(folder).shape,
        "pyarrow": pq.read_table(folder).shape,
        "polars": pl.read_parquet(f"{folder}/*.parquet").shape,
        "duckdb": duckdb.sql(f"select * from '{folder}/*.parquet'").shape,
        "datasets": datasets.load_dataset(
            "parquet", data_files=f"{folder}/*.parquet", split="train", cache_dir=str(tmp_path)
        ).shape,
    }
    assert found == dict.fromkeys(found, (rows, len(schema_of(stage).names)))


@pytest.mark.parametrize("stage", ["rollout", "score", "advantage"])
def test_shards_open_in_plain_pyarrow_and_pandas_with_the_columns_of_their_stage(shards, stage):
    import pandas as pd
    import pyarrow.parquet as pq

    part = shards / stage / "part-00000.parquet"
    assert pq.read_table(part).column_names == schema_of(stage).names
    frame = pd.read_parquet(part)
    assert list(frame.columns) == schema_of(stage).names
    for _, row in frame.iterrows():
        assert len(row.response_ids) == len(row.loss_mask) == len(row.rollout_logprobs)
        assert (np.isnan(row.rollout_logprobs.astype(float)) == (row.loss_mask == 0)).all()
        assert json.loads(row.messages)[0]["role"] in ("system", "user")
    check(table(shards / stage), stage)


def test_no_stage_after_rollout_encodes_text(shards, tmp_path, monkeypatch):
    from transformers import PreTrainedTokenizerBase

    def refuse(*args, **kwargs):
        raise AssertionError("text was encoded again")

    for name in ("encode", "__call__", "_encode_plus", "apply_chat_template"):
        monkeypatch.setattr(PreTrainedTokenizerBase, name, refuse)
    score(shards / "rollout", tmp_path / "score", ScoreConfig())
    advantage(tmp_path / "score", tmp_path / "advantage", AdvantageConfig(old_logprobs="recompute"), policy=STARTER)
    train(tmp_path / "advantage", tmp_path / "train", TrainConfig(), policy=STARTER)
    sync(tmp_path / "train", tmp_path / "sync", SyncConfig(), target=tmp_path / "policies" / "00000001")


def test_score_leaves_the_columns_of_rollout_as_they_are(shards):
    before, after = table(shards / "rollout"), table(shards / "score")
    assert after.select(before.column_names).replace_schema_metadata(None) == before.replace_schema_metadata(None)


def test_scoring_again_gives_the_same_bytes(shards, tmp_path):
    score(shards / "rollout", tmp_path / "score", ScoreConfig())
    assert contents(tmp_path / "score") == contents(shards / "score")


def test_a_reward_function_that_raises_leaves_null_and_says_so(make_trajectory):
    def broken(trajectory):
        raise ValueError("no answer from the judge")

    scored = score_table(to_table([make_trajectory()]), broken)
    assert scored.column("reward").to_pylist() == [None]
    assert scored.column("score_status").to_pylist() == ["verifier_error"]
    assert "no answer from the judge" in scored.column("reward_parts")[0].as_py()


@pytest.mark.parametrize(
    ("name", "seconds", "status"), [("hang", 0.5, "verifier_timeout"), ("die", 120.0, "verifier_error")]
)
def test_a_reward_function_that_never_returns_is_killed_and_its_row_says_so(make_trajectory, name, seconds, status):
    scorer = weighted({f"test_rewards:{name}": 1.0}, None, timeout_seconds=seconds)
    rows = [make_trajectory(), make_trajectory(trajectory_id="t1", status="failed", stop_reason="error", error="x")]
    scored = score_table(to_table(rows), scorer)
    assert scored.column("score_status").to_pylist() == [status, "skipped"]
    assert scored.column("reward").to_pylist() == [None, None]
    both = weighted({"test_rewards:one": 1.0}, None)
    assert score_table(to_table(rows[:1]), both).column("reward").to_pylist() == [1.0]  # the next one starts anew


def test_a_failed_row_is_skipped_and_keeps_reward_and_success_null(make_trajectory):
    failed = make_trajectory(status="failed", stop_reason="error", error="ConnectionError: gone")
    scored = score_table(to_table([failed]), lambda t: Score(reward=0.0, success=False))
    assert scored.select(["reward", "success", "score_status"]).to_pylist() == [
        {"reward": None, "success": None, "score_status": "skipped"}
    ]


def test_a_trajectory_of_two_rows_is_judged_once_and_its_reward_stands_on_both(make_trajectory):
    # Pitfall 8.
    rows = [make_trajectory(step_index=0, is_last_step=False), make_trajectory(step_index=1)]
    seen = []
    scored = score_table(to_table(rows), lambda t: seen.append(t) or Score(reward=1.0, success=True))
    assert scored.column("reward").to_pylist() == [1.0, 1.0]
    assert len(seen) == 1
    assert len(seen[0].turns) == 2


def test_weighted_rewards_add_up_and_one_unjudged_leaves_the_whole_null(make_trajectory):
    from nanoskyrl.stages.score import weighted

    class Env:
        def score(self, trajectory):
            return Score(reward=0.5, success=True, parts={"answer": 0.5})

    both = weighted({"env": 1.0, "test_rewards:two": 0.25}, Env())
    assert both(make_trajectory()).reward == pytest.approx(0.5 + 0.25 * 2)
    assert weighted({"env": 1.0, "test_rewards:nothing": 1.0}, Env())(make_trajectory()).reward is None


def test_failures_are_left_out_of_the_group_and_are_not_zeros(group):
    # Pitfall 11: as zeros the success would get 2.475 and the honest failure -.354.
    rows = group([1.0, 0.0]) + [
        row_with(group([None])[0], f"x{i}", status="failed", stop_reason="error", error="e", score_status="skipped")
        for i in range(6)
    ]
    found = add_advantages(to_table(rows, "score"), AdvantageConfig())
    assert found.column("drop_reason").to_pylist() == [None, None] + ["failed"] * 6
    values = [None if a is None else float(a[0]) for a in row_arrays(found.column("advantages"))]
    assert values == [pytest.approx(0.7071, abs=1e-4), pytest.approx(-0.7071, abs=1e-4)] + [None] * 6


def row_with(row, name, **changes):
    import dataclasses

    return dataclasses.replace(row, trajectory_id=name, **changes)


def test_unscored_rows_have_null_advantages_and_the_baseline_is_of_the_others(group):
    # Pitfall 10.
    found = add_advantages(to_table(group([1.0, 0.0, None, None]), "score"), AdvantageConfig(estimator="dr_grpo"))
    assert [None if a is None else float(a[0]) for a in row_arrays(found.column("advantages"))] == [
        0.5,
        -0.5,
        None,
        None,
    ]
    assert found.column("drop_reason").to_pylist() == [None, None, "unscored", "unscored"]


@pytest.mark.parametrize(
    ("singleton", "value", "reason"), [("zero", 0.0, None), ("raw", 1.0, None), ("drop", None, "singleton")]
)
def test_a_group_of_one_gets_what_the_setting_says(group, singleton, value, reason):
    # Pitfall 3.
    found = add_advantages(to_table(group([1.0]), "score"), AdvantageConfig(singleton=singleton))
    assert found.column("drop_reason").to_pylist() == [reason]
    (advantages,) = row_arrays(found.column("advantages"))
    assert (None if advantages is None else float(advantages[0])) == value


def test_a_group_of_one_can_be_an_error(group):
    with pytest.raises(SettingsError, match="one scored trajectory"):
        add_advantages(to_table(group([1.0]), "score"), AdvantageConfig(singleton="error"))


def test_equal_rewards_give_exactly_zero_and_can_be_left_out(group):
    # Pitfall 4: twelve times 0.7 has a variance only by rounding.
    rows = to_table(group([float(np.float32(0.7))] * 12), "score")
    kept = add_advantages(rows, AdvantageConfig())
    assert all((a == 0).all() for a in row_arrays(kept.column("advantages")))
    dropped = add_advantages(rows, AdvantageConfig(drop_zero_variance=True))
    assert dropped.column("drop_reason").to_pylist() == ["zero_variance"] * 12


def test_overlong_rows_are_left_out_but_count_in_the_mean(group):
    cut = row_with(group([0.0])[0], "cut", status="truncated", stop_reason="length")
    found = add_advantages(to_table([group([1.0])[0], cut], "score"), AdvantageConfig(overlong_filter=True))
    assert found.column("drop_reason").to_pylist() == [None, "overlong"]
    assert float(row_arrays(found.column("advantages"))[0][0]) == pytest.approx(0.7071, abs=1e-4)


def test_group_statistics_count_trajectories_and_not_rows(group):
    first, second = group([1.0, 0.0])
    rows = [row_with(first, "a", step_index=0, is_last_step=False), row_with(first, "a", step_index=1), second]
    found = add_advantages(to_table(rows, "score"), AdvantageConfig(estimator="dr_grpo"))
    assert [float(a[0]) for a in row_arrays(found.column("advantages"))] == [0.5, 0.5, -0.5]


VOCABULARY = json.loads((STARTER / "config.json").read_bytes())["vocab_size"]


def with_token(source, target, name, token):
    """Write shards again, with another token at the end of a list of their sixth row; return that row's id."""
    made, rows = read_manifest(source), table(source)
    ids = [row.copy() for row in row_arrays(rows.column(name))]
    ids[5][-1] = token
    rows = rows.set_column(rows.column_names.index(name), rows.field(name), list_column(ids, pa.int32()))
    head = Head(stage=made.stage, settings=made.settings, inputs=made.inputs, policy=made.policy)
    with open_output(target, head) as out:
        out.write_part(0, rows)
        out.finish(rows_in=rows.num_rows)
    return rows.column("trajectory_id")[5].as_py()


@pytest.mark.parametrize(
    ("name", "token"), [("response_ids", VOCABULARY), ("prompt_ids", -1), ("prompt_ids", 2**31 - 1)]
)
def test_a_token_that_the_policy_does_not_know_is_named_before_anything_is_loaded(shards, tmp_path, name, token):
    place, config = tmp_path / "advantage", TrainConfig()
    message = f"of `{place}` holds the token {token} in `{name}`, and the vocabulary of `{STARTER}` has {VOCABULARY}"
    trajectory = with_token(shards / "advantage", place, name, token)
    for work in (
        lambda: train(place, tmp_path / "train", config, policy=STARTER),
        lambda: train([shards / "advantage", place], tmp_path / "train", config, policy=STARTER),
        lambda: preview(place, config, policy=STARTER),
        lambda: compare(place, ["grpo", "sapo"], config, policy=STARTER),
    ):
        with pytest.raises(InputError, match=re.escape(f"trajectory `{trajectory}` {message}")):
            work()
    assert not (tmp_path / "train" / "_manifest.json").exists()


@pytest.mark.parametrize("asked", [{"old_logprobs": "recompute"}, {"ref_logprobs": True}, {"estimator": "gae"}])
def test_a_token_that_a_model_of_advantage_does_not_know_is_named(shards, tmp_path, asked):
    trajectory = with_token(shards / "score", tmp_path / "score", "response_ids", VOCABULARY)
    message = re.escape(f"trajectory `{trajectory}` of `{tmp_path / 'score'}` holds the token {VOCABULARY} in")
    config = AdvantageConfig(**asked)
    with pytest.raises(InputError, match=message):
        advantage(tmp_path / "score", tmp_path / "advantage", config, policy=STARTER, reference=STARTER)
    with pytest.raises(InputError, match=message):
        preview_advantage(tmp_path / "score", config, Models(STARTER, STARTER))
    advantage(tmp_path / "score", tmp_path / "advantage", AdvantageConfig())  # no model is asked


def test_the_largest_token_of_the_vocabulary_is_trained_on(shards, tmp_path):
    with_token(shards / "advantage", tmp_path / "advantage", "response_ids", VOCABULARY - 1)
    assert preview(tmp_path / "advantage", TrainConfig(), policy=STARTER)["rows"] == 16


def test_recomputed_old_logprobs_agree_with_those_recorded_on_policy(shards, tmp_path):
    advantage(shards / "score", tmp_path / "advantage", AdvantageConfig(old_logprobs="recompute"), policy=STARTER)
    found = table(tmp_path / "advantage")
    for old, recorded, mask in zip(
        *(row_arrays(found.column(c)) for c in ("old_logprobs", "rollout_logprobs", "loss_mask")), strict=True
    ):
        assert_close(old[mask == 1], recorded[mask == 1], PASS, scale=LOGITS)
        assert (old[mask == 0] == 0).all()


def test_training_again_gives_the_same_bytes_for_weights_state_and_diagnostics(shards, tmp_path):
    train(shards / "advantage", tmp_path / "train", TrainConfig(), policy=STARTER)
    assert contents(tmp_path / "train") == contents(shards / "train")


def test_how_rows_are_cut_into_micro_batches_changes_only_rounding(shards, tmp_path):
    from safetensors.torch import load_file

    train(shards / "advantage", tmp_path / "small", TrainConfig(max_tokens_per_micro_batch=64), policy=STARTER)
    one, many = (load_file(d / "policy" / "model.safetensors") for d in (shards / "train", tmp_path / "small"))
    start = load_file(STARTER / "model.safetensors")
    moved = max(float((one[name] - start[name]).abs().max()) for name in one)
    apart = max(float((one[name] - many[name]).abs().max()) for name in one)
    # Adam's first step moves every weight by lr, whatever the size of its gradient: where a gradient is all
    # rounding the sign may differ. So the bound is on the mean.
    mean = sum(float((one[name] - many[name]).abs().sum()) for name in one) / sum(v.numel() for v in one.values())
    assert apart <= 2.1 * moved
    assert mean < 0.01 * moved


def test_the_next_step_goes_on_from_the_saved_optimizer(shards, tmp_path):
    policy, state = shards / "train" / "policy", shards / "train" / "state"
    train(shards / "advantage", tmp_path / "with", TrainConfig(), policy=policy, state=state)
    train(shards / "advantage", tmp_path / "fresh", TrainConfig(), policy=policy)
    weights = [(tmp_path / name / "policy" / "model.safetensors").read_bytes() for name in ("with", "fresh")]
    assert weights[0] != weights[1]


def test_a_live_learner_and_a_fresh_one_end_with_the_same_bytes(shards, tmp_path):
    from nanoskyrl.stages.learning.learner import Learner

    live = Learner()
    train(shards / "advantage", tmp_path / "a1", TrainConfig(), policy=STARTER, engine=live)
    for name, engine in (("live", live), ("fresh", None)):
        train(
            shards / "advantage", tmp_path / name, TrainConfig(), policy=tmp_path / "a1" / "policy",
            state=tmp_path / "a1" / "state", engine=engine,
        )  # fmt: skip
    assert contents(tmp_path / "live") == contents(tmp_path / "fresh")


def test_the_trained_policy_loads_in_plain_transformers(shards):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(shards / "train" / "policy")
    tokenizer = AutoTokenizer.from_pretrained(shards / "train" / "policy")
    assert model.config.vocab_size >= len(tokenizer)


def test_diagnostics_name_every_row_that_was_trained(shards):
    found = table(shards / "train")
    assert found.column("trajectory_id").to_pylist() == table(shards / "advantage").column("trajectory_id").to_pylist()
    assert_close(found.column("ratio_mean").to_pylist(), [1.0] * found.num_rows, PASS, scale=LOGITS)


def test_lora_trains_an_adapter_that_plain_peft_loads_with_the_same_logprobs(shards, tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    train(shards / "advantage", tmp_path / "train", TrainConfig(lora_rank=4, lr=1e-2), policy=STARTER)
    adapter = tmp_path / "train" / "policy"
    info = read_info(adapter)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(STARTER), str(adapter)).eval()
    ids = torch.tensor([info.canary_ids])
    with torch.no_grad():
        logp = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert_close(logp, info.canary_logprobs, PASS, scale=LOGITS)
    assert info.base == policy_digest(STARTER)


def test_a_run_does_not_change_between_adapters_and_the_whole_model(shards, tmp_path):
    train(shards / "advantage", tmp_path / "adapters", TrainConfig(lora_rank=4), policy=STARTER)
    for trained, asked, says in (
        (tmp_path / "adapters", 8, "has adapters of rank 4, and `train.lora_rank` is 8"),
        (tmp_path / "adapters", 0, "has adapters of rank 4, and `train.lora_rank` is 0"),
        (shards / "train", 8, "was trained as a whole"),
    ):
        with pytest.raises(SettingsError, match=says):
            Learner(OptimizerConfig(lora_rank=asked)).load(trained / "policy")


def test_sync_publishes_by_hard_links_and_proves_the_weights(shards, tmp_path):
    target = tmp_path / "policies" / "00000001"
    sync(shards / "train", tmp_path / "sync", SyncConfig(), target=target)
    assert policy_digest(target) == read_manifest(shards / "train").facts["policy"]
    assert (target / "model.safetensors").stat().st_ino == (
        shards / "train" / "policy" / "model.safetensors"
    ).stat().st_ino


def test_sync_fails_when_the_engine_kept_the_old_weights(shards, tmp_path):
    # Pitfall 17.
    from nanoskyrl.stages.engines.base import HfConfig
    from nanoskyrl.stages.engines.hf import HfEngine
    from nanoskyrl.stages.models.policy import publish

    class Stale(HfEngine):
        def load(self, policy):
            if self._model is None:
                super().load(policy)

    publish(STARTER, tmp_path / "policies" / "00000000", name="starter")
    engine = Stale(HfConfig(device="cpu"))
    engine.load(tmp_path / "policies" / "00000000")
    target = tmp_path / "policies" / "00000001"
    with pytest.raises(ProofError, match="differ"):
        sync(shards / "train", tmp_path / "strict", SyncConfig(tolerance=1e-9), target=target, engine=engine)
    with pytest.warns(Notice, match="did not change, and it has no sums"):
        sync(shards / "train", tmp_path / "loose", SyncConfig(tolerance=10.0), target=target, engine=engine)


def test_sync_refuses_a_policy_that_was_changed_after_training(shards, tmp_path):
    import shutil

    shutil.copytree(shards / "train", tmp_path / "train")
    weights = tmp_path / "train" / "policy" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(InputError, match="not the policy that its manifest names"):
        sync(tmp_path / "train", tmp_path / "sync", SyncConfig(), target=tmp_path / "policies" / "00000001")


def test_each_task_comes_once_before_any_comes_again():
    # Pitfall 15: eight prompts in steps of three; an epoch's end inside a step neither repeats nor loses one.
    tasks = prepare(STARTER, SMALL, {"text_math": {"n_train": 8}}).environment.tasks("train")
    orders = [TaskOrder(seed=0, step=step, env="text_math", split="train") for step in range(8)]
    drawn = [task.task_id for order in orders for task in order.choose(tasks, 3)]
    for epoch in range(3):
        assert sorted(drawn[8 * epoch : 8 * epoch + 8]) == sorted(task.task_id for task in tasks)


def test_stopping_at_the_end_of_an_epoch_goes_on_with_the_next(tmp_path):
    # Pitfall 15: eight prompts, an epoch of four steps, stopped after step 4: step 5 still has its tasks.
    settings = {"text_math": {"n_train": 8}}
    seen = []
    for step in range(6):
        config = RolloutConfig(**{**_plain(SMALL), "step": step, "train_batch_size": 2, "engine": "scripted"})
        rollout(None, tmp_path / f"step-{step}", config, settings=settings)
        seen += sorted(set(table(tmp_path / f"step-{step}").column("task_id").to_pylist()))
    assert len(seen) == 12
    assert len(set(seen[:8])) == 8


def test_named_tasks_are_attempted_in_their_order(tmp_path):
    names = ("addition-1-000005", "addition-1-000002")
    rollout(None, tmp_path / "r", RolloutConfig(engine="scripted", tasks=names, n_samples_per_prompt=2))
    assert table(tmp_path / "r").column("task_id").to_pylist() == [name for name in names for _ in range(2)]


@pytest.mark.parametrize("env", ["text_math", "tool_use"])
def test_the_scripted_expert_succeeds_and_its_rows_are_untrainable(tmp_path, env):
    rollout(
        None, tmp_path / "r", RolloutConfig(env=env, engine="scripted", train_batch_size=64, n_samples_per_prompt=1)
    )
    score(tmp_path / "r", tmp_path / "s", ScoreConfig())
    found = table(tmp_path / "s")
    assert found.column("success").to_pylist() == [True] * 64
    assert found.column("reward").to_pylist() == [1.0] * 64
    assert not any(found.column("trainable").to_pylist())
    advantage(tmp_path / "s", tmp_path / "a", AdvantageConfig())
    assert read_manifest(tmp_path / "a").dropped == {"untrainable": 64}
    with pytest.raises(InputError, match="untrainable"):
        train(tmp_path / "a", tmp_path / "t", TrainConfig(), policy=STARTER)


def test_tokens_that_no_engine_counted_are_null_everywhere(tmp_path):
    config = RolloutConfig(engine="scripted", train_batch_size=2, n_samples_per_prompt=2)
    log = MetricsLog(tmp_path / "metrics.jsonl")
    manifest = rollout(None, tmp_path / "r", config, log=log)
    assert table(tmp_path / "r").column("completion_tokens").to_pylist() == [None] * 4
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert [line[f"rollout/{key}"] for key in ("rows", "response_tokens/mean", "response_tokens/total")] == [
        4, None, None,
    ]  # fmt: skip
    assert "1.0 turns and ? sampled tokens each" in headline(manifest, tmp_path / "r")
    score(tmp_path / "r", tmp_path / "s", ScoreConfig())
    by_length = AdvantageConfig(overlong_buffer_length=4, overlong_max_length=8)
    found = add_advantages(table(tmp_path / "s"), by_length)
    assert found.column("reward").to_pylist() == [1.0] * 4
    assert found.column("shaped_reward").to_pylist() == [None] * 4  # no length, no punishment for length


def test_scripted_actions_come_from_a_file_and_run_out_as_silence(tmp_path):
    script = tmp_path / "actions.jsonl"
    script.write_text('{"task_id": "addition-1-000001", "actions": ["<answer>0</answer>"]}\n')
    config = RolloutConfig(engine="scripted", tasks=("addition-1-000001", "addition-1-000002"), n_samples_per_prompt=1)
    rollout(None, tmp_path / "r", config, settings={"scripted": {"actions": str(script)}})
    assert table(tmp_path / "r").column("response").to_pylist() == ["<answer>0</answer>", ""]


def test_a_truncated_distribution_is_refused_by_train(tmp_path):
    config = RolloutConfig(**{**_plain(SMALL), "top_p": 0.9})
    rollout(STARTER, tmp_path / "r", config)
    score(tmp_path / "r", tmp_path / "s", ScoreConfig())
    advantage(tmp_path / "s", tmp_path / "a", AdvantageConfig())
    with pytest.raises(InputError, match="truncated distribution"):
        train(tmp_path / "a", tmp_path / "t", TrainConfig(), policy=STARTER)


def test_rows_without_logprobs_are_refused_until_they_are_recomputed(tmp_path):
    rollout(STARTER, tmp_path / "r", RolloutConfig(**{**_plain(SMALL), "logprobs_mode": "recomputed"}))
    score(tmp_path / "r", tmp_path / "s", ScoreConfig())
    advantage(tmp_path / "s", tmp_path / "a", AdvantageConfig())
    with pytest.raises(InputError, match="no log-probs"):
        train(tmp_path / "a", tmp_path / "t", TrainConfig(), policy=STARTER)
    advantage(tmp_path / "s", tmp_path / "b", AdvantageConfig(old_logprobs="recompute"), policy=STARTER)
    train(tmp_path / "b", tmp_path / "t", TrainConfig(), policy=STARTER)


def test_old_logprobs_of_another_policy_are_refused(shards, tmp_path):
    advantage(shards / "score", tmp_path / "a", AdvantageConfig(old_logprobs="recompute"), policy=STARTER)
    with pytest.raises(InputError, match="another policy"):
        train(tmp_path / "a", tmp_path / "t", TrainConfig(), policy=shards / "train" / "policy")


def test_stages_read_and_write_urls(shards):
    import fsspec

    from nanoskyrl.stages.core.storage import as_path

    memory = fsspec.filesystem("memory")
    for name, data in contents(shards / "rollout").items():
        memory.pipe(f"/run/rollout/{name}", data)
    score(as_path("memory://run/rollout"), as_path("memory://run/score"), ScoreConfig())
    advantage(as_path("memory://run/score"), as_path("memory://run/advantage"), AdvantageConfig())
    assert memory.cat("/run/score/_manifest.json") == (shards / "score" / "_manifest.json").read_bytes()
    assert memory.cat("/run/advantage/part-00001.parquet") == (shards / "advantage" / "part-00001.parquet").read_bytes()
    read_part(as_path("memory://run/advantage/part-00000.parquet"))
