"""Tasks that need tools, and the tools they need."""

import json
import os
import sys
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import skyrl_here

from nanoskyrl.envs.actions import ParsedCall, tool_calls
from nanoskyrl.envs.bm25 import LEAST_CACHED, Index, cached_index
from nanoskyrl.envs.sandbox import base as sandbox
from nanoskyrl.envs.tools import ToolError, carry_out, offer
from nanoskyrl.envs.worlds.tool_use.environment import ToolUse, ToolUseConfig
from nanoskyrl.envs.worlds.tool_use.python_exec import make_python_exec
from nanoskyrl.envs.worlds.tool_use.search import Corpus, read_corpus, shipped
from nanoskyrl.envs.worlds.tool_use.tasks import GENERATORS, KINDS
from nanoskyrl.envs.worlds.tool_use.world import world
from nanoskyrl.stages.core.errors import InputError, SandboxError, SettingsError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", [1, 2, 5])
def test_the_expert_of_every_kind_is_told_the_answer_by_its_tools(kind, level):
    environment = ToolUse(ToolUseConfig(kinds=(kind,), level=level, n_train=12, n_test=6))
    for split in ("train", "test"):
        for task in environment.tasks(split):
            episode = environment.start()
            episode.reset(task, 0)
            *actions, answer = environment.expert(task)
            steps = [episode.step(action) for action in actions]
            calls = [call for step in steps for call in step.tool_calls]
            assert all(call.ok for call in calls), calls
            assert str(task.ground_truth) in steps[-1].observation
            assert answer == f"<answer>{task.ground_truth}</answer>"


@pytest.mark.parametrize("kind", GENERATORS)
def test_kinds_have_enough_tasks_and_the_splits_share_none(kind):
    environment = ToolUse(ToolUseConfig(kinds=(kind,), n_train=200, n_test=50))
    train, test = environment.tasks("train"), environment.tasks("test")
    assert (len(train), len(test)) == (200, 50)
    assert not {(t.prompt, str(t.metadata)) for t in train} & {(t.prompt, str(t.metadata)) for t in test}
    again = ToolUse(ToolUseConfig(kinds=(kind,), n_train=200, n_test=50))
    assert list(again.tasks("train")) == list(train)
    assert again.expert(test[3]) == environment.expert(test[3])


def test_a_mixture_takes_its_kinds_in_turns_and_offers_what_they_need():
    environment = ToolUse(ToolUseConfig(kinds=KINDS, n_train=60))
    tasks = environment.tasks("train")
    assert [task.metadata["kind"] for task in tasks[:6]] == list(KINDS)
    assert set(environment.tools) == {"calculator", "search", "wiki", "python_exec"}
    assert list(ToolUse(ToolUseConfig(n_train=1)).tools) == ["calculator", "search"]


def test_more_hops_need_more_pages():
    for level in range(1, 6):
        environment = ToolUse(ToolUseConfig(kinds=("multi_hop",), level=level, n_train=20))
        for task in environment.tasks("train"):
            titles = [call.args["title"] for action in environment.expert(task) for call in tool_calls(action)]
            assert len(titles) == len(set(titles)) == level
            assert titles[0] in task.prompt
            assert not any(title in task.prompt for title in titles[1:])  # they have to be found out


def test_the_world_has_one_page_for_every_name_it_mentions():
    things = world()
    assert len(things) == 272
    for thing in things.values():
        for relation, value in thing.facts.items():
            if relation in ("river", "mayor", "birthplace", "employer", "founder", "seat"):
                assert value in things


def test_the_rows_of_a_table_decide_the_answer():
    environment = ToolUse(ToolUseConfig(kinds=("data",), n_train=40))
    for task in environment.tasks("train"):
        assert task.metadata["files"]["data.csv"].startswith("name,region,price,count\n")
        assert "data.csv" in task.prompt


# Tools


def call(text, *names):
    return carry_out(tool_calls(f"<tool_call>{text}</tool_call>")[0], offer(names))


def test_a_function_of_the_users_is_a_tool():
    schema = offer(("my_tools:weather",))["weather"].schema["function"]
    assert schema["description"] == "Say what the weather will be."
    assert schema["parameters"]["properties"]["unit"] == {"default": "C", "enum": ["C", "F"], "type": "string"}
    assert schema["parameters"]["required"] == ["town"]
    found = call('{"name": "weather", "arguments": {"town": "Rome", "days": 2}}', "my_tools:weather")
    assert json.loads(found.result) == {"town": "Rome", "unit": "C", "days": 2, "sky": "blue"}
    assert call('{"name": "nothing"}', "my_tools:nothing").result == "null"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("{}", "town"),
        ('{"town": 5}', "town"),
        ('{"town": "Rome", "unit": "K"}', "'c' or 'f'"),
        ('{"town": "Rome", "days": "many"}', "days"),
        ('{"town": "Rome", "when": "now"}', "when"),
    ],
)
def test_wrong_arguments_come_back_with_what_is_wrong(args, says):
    found = call(f'{{"name": "weather", "arguments": {args}}}', "my_tools:weather")
    assert (found.ok, found.error) == (False, "bad_arguments")
    assert says in found.result


def test_a_tool_that_raises_is_an_observation():
    found = call('{"name": "broken", "arguments": {"x": 1}}', "my_tools:broken")
    assert (found.ok, found.error) == (False, "tool_error")
    assert "KeyError" in found.result


def test_tools_that_cannot_be_offered_are_refused():
    with pytest.raises(SettingsError, match="has no `sun`"):
        offer(("my_tools:sun",))
    with pytest.raises(SettingsError, match="no JSON schema"):
        offer(("my_tools:no_schema",))
    with pytest.raises(SettingsError, match="is a coroutine"):
        offer(("my_tools:later",))
    with pytest.raises(SettingsError, match="unknown tool `serch`"):
        offer(("serch",))
    with pytest.raises(SettingsError, match="two tools are called `weather`"):
        offer(("my_tools:weather", "my_tools:weather"))


def test_a_sandbox_that_does_not_work_stops_before_the_first_task(monkeypatch):
    monkeypatch.setattr(sandbox, "why_not", lambda name: "not here")
    with pytest.raises(SandboxError, match="no sandbox works here"):
        ToolUse(ToolUseConfig(kinds=("data",)))
    ToolUse(ToolUseConfig())  # nobody asked for it


def test_a_sandbox_that_breaks_later_is_no_observation(monkeypatch):
    def broken(*_, **__):
        raise SandboxError("gone")

    monkeypatch.setattr("nanoskyrl.envs.worlds.tool_use.python_exec.run_python", broken)
    with pytest.raises(SandboxError):
        call('{"name": "python_exec", "arguments": {"code": "1"}}', "python_exec")


def test_python_exec_says_what_was_printed_or_how_it_failed():
    python_exec = make_python_exec("monty")
    assert python_exec("print(1)\nprint(2)") == "1\n2"
    assert "printed nothing" in python_exec("x = 1")
    with pytest.raises(ToolError, match="ZeroDivisionError"):
        python_exec("1 / 0")
    with pytest.raises(ToolError, match=r"first(?s:.*)NameError"):
        python_exec("print('first')\nx")
    assert len(python_exec("print('x' * 9000)")) < 5000


def test_a_session_of_python_exec_lasts_one_episode():
    environment = ToolUse(ToolUseConfig(tools=("python_exec",), python_session=True, n_train=2))
    one, other = environment.start(), environment.start()
    for episode, task in zip((one, other), environment.tasks("train"), strict=True):
        episode.reset(task, 0)
    set_x = '<tool_call>{"tool": "python_exec", "args": {"code": "x = 41"}}</tool_call>'
    print_x = '<tool_call>{"tool": "python_exec", "args": {"code": "print(x + 1)"}}</tool_call>'
    assert one.step(set_x).tool_calls[0].ok
    assert one.step(print_x).observation == "42"
    assert "NameError" in other.step(print_x).observation


def test_the_command_offers_tools_of_the_users(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text('def twice(x: int) -> int:\n    """Double a number."""\n    return 2 * x\n')
    flags = ("--env", "tool_use", "--engine", "scripted", "--train-batch-size", 2, "--n-samples-per-prompt", 1)
    done = skyrl_here("rollout", *flags, "--tools", "calculator,mine:twice", "--sandbox", "monty")
    sys.modules.pop("mine", None)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "runs/default/step-000000/rollout/_manifest.json").read_text())
    assert manifest["settings"]["tool_use"]["tools"] == ["calculator", "mine:twice"]
    assert list(manifest["settings"]["plugins"]) == ["mine:twice"]


# Search


def test_wiki_reads_a_page_by_its_title_or_names_others():
    assert shipped().wiki("  kENYA ").startswith("Kenya: Kenya is a country")
    with pytest.raises(ToolError, match="no page 'the capital of Kenya'; there is Kenya"):
        shipped().wiki("the capital of Kenya")
    with pytest.raises(ToolError, match="no page"):
        shipped().wiki("")


NO_WORDS = '{"title": "a", "text": "the"}'
ROWS = [{"title": "Zog", "text": "A zog is a small bell."}, {"title": "Mip", "text": "A mip is a boat."}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_corpus_of_the_users_replaces_the_encyclopedia(tmp_path, suffix):
    path = tmp_path / f"corpus{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        path.write_text("\n".join(map(json.dumps, ROWS)))
    data = tmp_path / "tasks.jsonl"
    data.write_text('{"prompt": "What is a zog?", "ground_truth": "a bell"}')
    environment = ToolUse(ToolUseConfig(corpus=str(path), data=str(data), tools=("search", "wiki")))
    episode = environment.start()
    episode.reset(environment.tasks("train")[0], 0)
    step = episode.step('<tool_call>{"tool": "search", "args": {"query": "small bell"}}</tool_call>')
    assert step.observation == "Zog: A zog is a small bell."
    with pytest.raises(SettingsError, match="replaces the pages"):
        ToolUseConfig(corpus=str(path), kinds=("search",))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"title": "x"}', "no title and text"),
        ('{"title": "x", "txt": "y"}', "no title and text"),
        ("", "empty"),
        (NO_WORDS, "no words"),
    ],
)
def test_a_broken_corpus_is_refused(tmp_path, line, says):
    path = tmp_path / "corpus.jsonl"
    path.write_text(line)
    with pytest.raises(InputError, match=says):
        read_corpus(str(path))


def test_a_large_corpus_is_indexed_once(tmp_path, monkeypatch):
    texts = [f"page {i} about thing{i % 700}" for i in range(LEAST_CACHED)]
    built = []
    init = Index.__init__

    def counted(self, texts, folder=None):
        built.extend([1] * (folder is None))
        init(self, texts, folder)

    monkeypatch.setattr(Index, "__init__", counted)
    first = cached_index("c", texts, tmp_path)
    again = cached_index("c", texts, tmp_path)
    assert built == [1]
    assert first.find("thing77 page", 3) == again.find("thing77 page", 3) != []
    cached_index("c", [*texts, "another"], tmp_path)
    assert built == [1, 1]
    assert len(os.listdir(tmp_path)) == 2


def test_many_threads_use_one_corpus():
    corpus, found = Corpus(ROWS), []
    threads = [threading.Thread(target=lambda: found.append(corpus.search("boat"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["Mip: A mip is a boat."] * 16


def test_a_call_of_a_tool_that_is_not_offered_names_those_that_are():
    found = carry_out(ParsedCall("wiki", {"title": "Kenya"}), offer(("calculator",)))
    assert (found.error, found.result) == ("unknown_tool", "there is no tool 'wiki'; there is calculator")
