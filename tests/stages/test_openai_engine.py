"""Engine `openai` against real HTTP servers: what is sent, what comes back, and what happens when it does not."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from benches import run_bench, table_of
from endpoints import endpoint

from nanoskyrl.envs.base import Observation, Task
from nanoskyrl.envs.memory import Memory
from nanoskyrl.envs.tool_formats.own import tools_in_words
from nanoskyrl.stages.core.errors import EngineError, SettingsError, ShortError
from nanoskyrl.stages.engines.base import UNREACHABLE, SamplingParams
from nanoskyrl.stages.engines.chat_wire import text_of, to_wire
from nanoskyrl.stages.engines.listening import Listener
from nanoskyrl.stages.engines.openai import GIVE_UP_AFTER, OpenaiConfig, OpenaiEngine
from nanoskyrl.stages.engines.turns import Attempt, Identity, TurnLimits

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Shorten the pauses between tries, which the client doubles up to these."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)


@pytest.fixture
def rows(tmp_path):
    """Return a maker of files with so many rows of GSM8K's layout; the answer to row i is i."""

    def make(count):
        path = tmp_path / f"rows-{count}.jsonl"
        lines = [{"id": f"r{i}", "question": f"What is {i} + 0?", "answer": f"#### {i}"} for i in range(count)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return make


def knows(body):
    """Answer right."""
    return f"#### {body['messages'][-1]['content'].split()[2]}"


def ask(server, rows, output, **more):
    tables = {
        "openai": {"base_url": server.url, "model": "m", "retries": 2, **more.pop("openai", {})},
        more.pop("name", "gsm8k"): {"data": rows},
    }
    return run_bench("gsm8k", output, engine_name="openai", tables=tables, **more)


def test_answers_are_graded_and_tokens_counted(rows, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    with endpoint(knows) as server:
        found = ask(server, rows(5), tmp_path / "out", n_samples=2, temperature=0.5)
    assert (found["success"], found["samples"], found["prompt_tokens"], found["completion_tokens"]) == (1.0, 10, 70, 30)
    body = server.asked[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.5, 1024)
    assert 0 <= body["seed"] < 2**31
    assert len({body["seed"] for body in server.asked}) == 10
    assert server.keys[0] == "Bearer a-key"
    table = table_of(tmp_path / "out")
    assert table.column("trainable").to_pylist() == [False] * 10
    assert table.column("response_ids").null_count == 10
    assert table.column("prompt_tokens").to_pylist() == [7] * 10
    assert "a-key" not in "".join(path.read_text() for path in (tmp_path / "out").glob("*.json"))


def said(text, **fields):
    """Return a reply, and what stands beside its choice."""
    return {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": text}}], **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"usage": None}, {"usage": {}}, {"usage": []}, {"usage": "much"},
        *({"usage": {"prompt_tokens": n, "completion_tokens": n}} for n in (None, -1, True, "7", 1 << 40, {})),
    ],
)  # fmt: skip
def test_what_an_endpoint_does_not_count_is_null(fields, rows, tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text("[m]\nprompt = 1\ncompletion = 1\n")
    with endpoint(lambda body: said(knows(body), **fields)) as server:
        found = ask(server, rows(2), tmp_path / "out", prices=str(prices))
    assert (found["success"], found["samples"]) == (1.0, 2)
    counts = [found[key] for key in ("prompt_tokens", "completion_tokens", "completion_tokens_mean", "cost")]
    assert counts == [None] * 4
    table = table_of(tmp_path / "out")
    assert [table.column(f"{kind}_tokens").null_count for kind in ("prompt", "completion")] == [2, 2]


def test_a_sum_over_turns_is_known_if_each_turn_was_counted(tmp_path):
    usage = {"prompt_tokens": 5, "completion_tokens": 2}

    def answer(body):
        return said(CALL, usage=usage) if len(body["messages"]) == 2 else said("Answer: 42")

    with endpoint(answer) as server:
        found = run_bench(
            "hle", tmp_path / "out", engine_name="openai", limit=1,
            tables={"openai": {"base_url": server.url, "model": "m"}, "hle": {"tools": ["calculator"]}},
        )  # fmt: skip
    assert (found["turns_mean"], found["prompt_tokens"], found["completion_tokens"]) == (2.0, None, None)


def test_what_ends_a_turn_and_what_is_remembered_is_sent(tmp_path):
    def answer(body):
        return CALL if len(server.asked) < 3 else "Answer: 42"

    with endpoint(answer) as server:
        found = run_bench(
            "hle", tmp_path / "out", engine_name="openai", limit=1,
            rollout={"stop_strings": ("END",), "top_k": 5, "memory": "last_turns", "memory_turns": 1},
            tables={"openai": {"base_url": server.url, "model": "m"}, "hle": {"tools": ["calculator"]}},
        )  # fmt: skip
    assert found["turns_mean"] == 3.0
    assert [len(body["messages"]) for body in server.asked] == [2, 4, 4]
    assert all((body["stop"], body["top_k"]) == (["END"], 5) for body in server.asked)


def test_arguments_of_the_chat_template_are_sent_nested_ones_too(rows, tmp_path):
    given = {"enable_thinking": False, "budget": {"tokens": 64}}
    with endpoint(knows) as server:
        ask(server, rows(1), tmp_path / "a", rollout={"chat_template_kwargs": given})
        ask(server, rows(1), tmp_path / "b")
        ask(server, rows(1), tmp_path / "c", openai={"extra": {"chat_template_kwargs": given}})
    assert [body.get("chat_template_kwargs") for body in server.asked] == [given, None, given]


@pytest.mark.parametrize(
    ("tool_format", "reply"),
    [
        (
            "auto",
            "<tool_call>\n<function=calculator>\n<parameter=expression>\n6*7\n</parameter>\n</function>\n</tool_call>",
        ),
        ("auto", '{"name": "calculator", "parameters": {"expression": "6*7"}}'),
        ("auto", "<|tool_call_start|>[calculator(expression='6*7')]<|tool_call_end|>"),
        ("mistral", '[TOOL_CALLS]calculator[ARGS]{"expression": "6*7"}'),
    ],
)
def test_calls_that_a_server_leaves_in_the_text_are_read_in_the_models_format(tool_format, reply, tmp_path):
    def answer(body):
        last = body["messages"][-1]
        return f"Answer: {last['content']}" if last["role"] == "tool" else reply

    with endpoint(answer) as server:
        found = run_bench(
            "hle", tmp_path / "out", engine_name="openai", limit=1, rollout={"tool_format": tool_format},
            tables={"openai": {"base_url": server.url, "model": "m"}, "hle": {"tools": ["calculator"]}},
        )  # fmt: skip
    assert (found["tool_calls_valid"], found["turns_mean"]) == (1, 2.0)
    assistant, tool = server.asked[1]["messages"][-2:]
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"expression": "6*7"}
    assert (assistant["tool_calls"][0]["id"], tool["content"]) == (tool["tool_call_id"], "42")


@pytest.mark.parametrize("reply", ["<tool_call>oops</tool_call>", "<tool_call>{oops}</tool_call>"])
def test_what_no_format_reads_as_a_call_of_a_tool_on_offer_stays_as_it_is(reply):
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
    assert Listener().heard(reply, tools) == (reply, {"role": "assistant", "content": reply})
    assert Listener().heard("<tool_call>calculator</tool_call>", tools)[0] == text_of(
        None, [("calculator", "")]
    ).replace('"name"', '"tool"').replace('"arguments"', '"args"')


def test_an_attempt_whose_next_question_cannot_be_made_fails_alone(tmp_path):
    class Silent:
        def start(self):
            return self

        def reset(self, task, seed):
            return Observation(messages=[])

    engine = OpenaiEngine(OpenaiConfig(base_url="http://127.0.0.1:9", model="m"))
    who = Identity(trajectory_id="a", group_id="g", sample=0, env="e", seed=7, policy_version=None, policy_digest=None)
    limits = TurnLimits(max_turns=2, max_generate_length=8, max_input_length=99, max_sequence_length=99)
    attempt = Attempt(
        Task(task_id="t", split="test", prompt="x"), who, Silent(), engine, SamplingParams(), limits, stepwise=False,
        memory=Memory(kind="summary"),
    )  # fmt: skip
    attempt._summary = "nothing yet"
    assert attempt.chat_request() is None
    assert (attempt.ended, attempt.rows()[0].status) == (True, "failed")


def test_calls_of_a_prompts_history_go_as_calls_or_as_words():
    call = {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "6*7"}}}
    messages = [
        {"role": "user", "content": "Q"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
    for sent in (to_wire(messages, tools, "native"), to_wire(messages, (), "text")):
        assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"expression": "6*7"}'
        assert sent[2]["tool_call_id"] == sent[1]["tool_calls"][0]["id"] == "c1"
    told = to_wire(messages, tools, "text")
    assert told[2]["content"] == '<tool_call>{"tool": "calculator", "args": {"expression": "6*7"}}</tool_call>'
    assert told[3] == {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}


def test_replies_cut_off_count_as_truncated(rows, tmp_path):
    with endpoint(lambda body: ("I was about to", "length")) as server:
        found = ask(server, rows(2), tmp_path / "out")
    assert (found["truncated"], found["no_answer"], found["success"]) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_may_pass_is_tried_again(status, rows, tmp_path):
    seen = set()

    def answer(body):
        key = body["messages"][-1]["content"]
        if key not in seen:
            seen.add(key)
            return status
        return knows(body)

    with endpoint(answer) as server:
        found = ask(server, rows(4), tmp_path / "out")
    assert (found["success"], found["not_scored"]) == (1.0, 0)
    assert len(server.asked) == 8


def test_an_endpoint_that_fails_ends_short_with_a_count_and_no_zeros(rows, tmp_path):
    out = tmp_path / "out"
    with (
        endpoint(lambda body: 503) as server,
        pytest.raises(ShortError, match="6 of 6 attempts at gsm8k were not answered") as error,
    ):
        ask(server, rows(6), out)
    assert error.value.exit_code == 3
    assert "asked again" in str(error.value.hint)
    assert list(out.glob("part-*")) == []
    assert not (out / "_summary.json").exists()


def test_a_dead_endpoint_is_given_up_after_some_requests(rows, tmp_path):
    with endpoint(lambda body: 503) as server, pytest.raises(ShortError, match="40 of 40"):
        ask(server, rows(40), tmp_path / "out", openai={"concurrency": 1, "retries": 0})
    assert len(server.asked) == GIVE_UP_AFTER


def test_the_same_command_goes_on_and_asks_only_what_was_not_answered(rows, tmp_path):
    out, data = tmp_path / "out", rows(9)
    with endpoint(lambda body: 503 if "What is 4" in body["messages"][-1]["content"] else knows(body)) as server:
        with pytest.raises(ShortError, match="1 of 9 attempts"):
            ask(server, data, out)
        before = {body["messages"][-1]["content"] for body in server.asked}
    assert len(before) == 9
    with endpoint(knows) as server:
        found = ask(server, data, out)
    assert [body["messages"][-1]["content"].split("?")[0] for body in server.asked] == ["What is 4 + 0"]
    assert (found["success"], found["samples"]) == (1.0, 9)
    with endpoint(knows) as server:
        whole = ask(server, data, tmp_path / "whole")
        again = ask(server, data, tmp_path / "whole")
    assert whole == found == again
    assert len(server.asked) == 9
    for name in ("part-00000.parquet", "_manifest.json", "_summary.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert [path.name for path in tmp_path.glob(".*")] == []  # the journal is gone with its purpose


def test_a_torn_line_in_the_journal_costs_one_request(rows, tmp_path):
    out, data = tmp_path / "out", rows(3)
    fails_at_2 = endpoint(lambda body: 503 if "What is 2" in body["messages"][-1]["content"] else knows(body))
    with fails_at_2 as server, pytest.raises(ShortError):
        ask(server, data, out)
    journal = tmp_path / ".out.replies.jsonl"
    text = journal.read_text().rstrip("\n")
    journal.write_text(text[:-20])
    with endpoint(knows) as server:
        assert ask(server, data, out)["success"] == 1.0
    assert len(server.asked) == 2


def test_browsecomp_keeps_no_journal(tmp_path):
    with endpoint(lambda body: 503) as server, pytest.raises(ShortError):
        run_bench(
            "browsecomp", tmp_path / "out", engine_name="openai",
            tables={"openai": {"base_url": server.url, "model": "m", "retries": 0}},
        )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_refused_request_fails_alone_and_is_counted(rows, tmp_path):
    with endpoint(lambda body: 400 if "What is 1 " in body["messages"][-1]["content"] else knows(body)) as server:
        found = ask(server, rows(3), tmp_path / "out")
    assert (found["success"], found["tasks"], found["not_scored"], found["status"]["failed"]) == (1.0, 2, 1, 1)
    table = table_of(tmp_path / "out")
    assert sum("refuses the request" in (error or "") for error in table.column("error").to_pylist()) == 1
    assert table.column("reward").null_count == 1
    assert sorted(table.column("prompt_tokens").to_pylist()) == [0, 7, 7]  # a refusal reads nothing


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_address_ends_at_once_and_says_so(status, rows, tmp_path):
    with endpoint(lambda body: status) as server, pytest.raises(EngineError, match="refuses us") as error:
        ask(server, rows(3), tmp_path / "out")
    assert "$OPENAI_API_KEY" in str(error.value.hint)


@pytest.mark.parametrize("answer", [{"choices": []}, {"error": "overloaded"}, {"choices": [{"message": None}]}])
def test_a_reply_that_is_none_is_no_answer_and_no_crash(answer, rows, tmp_path):
    with endpoint(lambda body: answer) as server, pytest.raises(ShortError, match="no chat completion"):
        ask(server, rows(1), tmp_path / "out")


def test_nobody_listening_ends_short(rows, tmp_path):
    with endpoint(knows) as server:
        pass
    with pytest.raises(ShortError, match=UNREACHABLE):
        ask(server, rows(2), tmp_path / "out", openai={"retries": 0})


def test_grades_do_not_depend_on_how_many_are_asked_at_once(rows, tmp_path):
    tables, most = [], []
    for concurrency in (1, 16):
        out = tmp_path / str(concurrency)
        with endpoint(lambda body: knows(body) if body["seed"] % 2 else "no", together=concurrency) as server:
            ask(server, rows(20), out, n_samples=2, openai={"concurrency": concurrency})
        tables.append((out / "part-00000.parquet").read_bytes())
        most.append(server.most_at_once)
    assert tables[0] == tables[1]
    assert most == [1, 16]


def test_endpoint_and_model_must_be_named():
    with pytest.raises(SettingsError, match=r"needs `openai\.base_url`") as error:
        OpenaiEngine(OpenaiConfig())
    assert "--endpoint" in str(error.value.hint)


# Tools


def test_native_calls_become_text_and_go_back_as_calls(tmp_path):
    def answer(body):
        last = body["messages"][-1]
        if last["role"] == "tool":
            return f"Answer: {last['content']}"
        call = {"id": "x", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'}}
        return {
            "choices": [
                {"finish_reason": "tool_calls", "message": {"role": "assistant", "content": None, "tool_calls": [call]}}
            ],
            "usage": {"prompt_tokens": 5, "completion_tokens": 2},
        }

    with endpoint(answer) as server:
        found = run_bench(
            "hle", tmp_path / "out", engine_name="openai", limit=1,
            tables={"openai": {"base_url": server.url, "model": "m"}, "hle": {"tools": ["calculator"]}},
        )  # fmt: skip
    assert (found["tool_calls_valid"], found["turns_mean"], found["prompt_tokens"]) == (1, 2.0, 12)
    first, second = server.asked
    assert first["tools"][0]["function"]["name"] == "calculator"
    assistant, tool = second["messages"][-2:]
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"]
    assert tool["content"] == "42"


def test_without_native_tools_the_model_is_told_in_words():
    messages = [
        {"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "42"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
    sent = to_wire(messages, tools, "text")
    assert sent[0]["content"] == f"S\n{tools_in_words(tools)}"
    assert '"name": "calculator"' in sent[0]["content"]
    assert sent[-1] == {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}
    assert to_wire(messages[1:], tools, "text")[0]["role"] == "system"
    assert to_wire(messages, (), "text") == messages


def test_the_result_of_a_call_that_was_none_goes_as_the_users_word():
    messages = [
        {"role": "assistant", "content": "<tool_call>{oops</tool_call>"},
        {"role": "tool", "content": "error: x"},
    ]
    sent = to_wire(messages, [{"function": {}}], "native")
    assert sent == [messages[0], {"role": "user", "content": "error: x"}]


@pytest.mark.parametrize(
    ("content", "calls", "text"),
    [
        ("hi", [], "hi"), (None, [], ""), (None, [("calculator", '{"expression": "6*7"}')], CALL),
        ("so", [("f", "")], 'so\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ],
)  # fmt: skip
def test_a_reply_is_one_text(content, calls, text):
    assert text_of(content, calls) == text


def test_arguments_that_are_no_json_reach_the_parser_of_actions_as_they_are():
    from nanoskyrl.envs.actions import tool_calls

    found = tool_calls(text_of(None, [("f", '{"a": ')]))
    assert [call.error for call in found] == ["malformed"]


@pytest.mark.timeout(120)
def test_a_reply_that_drips_without_end_is_given_up(rows, tmp_path, monkeypatch):
    class Drips(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:  # each piece comes in time
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.05)

        def log_message(self, *_):
            pass

    monkeypatch.setattr("nanoskyrl.stages.engines.openai.PAUSE_SECONDS", 0.0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Drips)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        with pytest.raises(ShortError, match="did not come to an end in time"):
            ask(server, rows(1), tmp_path / "out", openai={"timeout_seconds": 0.3, "retries": 0})
    finally:
        server.shutdown()
        server.server_close()
