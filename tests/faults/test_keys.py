"""S7: a key of ours is struck out of whatever others say, before it is stored, printed or raised."""

import json
import subprocess
import sys

import pytest

from nanoskyrl.stages.core.errors import EngineError, InputError
from nanoskyrl.stages.core.rows import clean_text, to_json
from nanoskyrl.stages.core.safe_text import keep_secret, printable, struck

KEY = "sk-live-0123456789abcdef"
SAID = {
    "as it is": f"Incorrect API key provided: {KEY}.",
    "in base64": "Basic c2stbGl2ZS0wMTIzNDU2Nzg5YWJjZGVm is wrong",
    "in an address": f"no route to https://user:{KEY}@host/v1",
    "as a query": f"GET /v1/models?api_key={KEY}&x=1",
    "quoted for an address": "x?k=sk%2Dlive%2D0123456789abcdef".replace("%2D", "-"),
    "a header in an exception": f"headers={{'Authorization': 'Bearer {KEY}', 'x-api-key': '{KEY}'}}",
    "twice, in another's sentence": f"{KEY}{KEY} and {KEY}",
}
OTHERS = {
    "another's password in an address": ("http://joe:hunter22@host/x", "hunter22"),
    "another's header": ("Authorization: Bearer abcd1234efgh5678ijkl", "abcd1234efgh5678ijkl"),
    "another's header, as a table": ("{'x-api-key': 'q9w8e7r6t5'}", "q9w8e7r6t5"),
    "another's query": ("https://h/x?access_token=zzz999yyy888", "zzz999yyy888"),
    "a proxy's header": ("Proxy-Authorization: Basic am9lOmh1bnRlcjI=", "am9lOmh1bnRlcjI="),
}


@pytest.fixture(autouse=True)
def _named():
    keep_secret(KEY)


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_our_key_is_struck_out_of_what_is_stored_and_raised(said):
    for text in (
        struck(said),
        clean_text(said),
        to_json({"error": [said]}),
        str(EngineError(said)),
        EngineError("x", hint=said).hint,
    ):
        assert KEY not in text
        assert "c2stbGl2ZS0wMTIz" not in text
    assert isinstance(json.loads(to_json({"error": [said]}))["error"][0], str)


@pytest.mark.parametrize(("said", "secret"), OTHERS.values(), ids=OTHERS)
def test_so_are_passwords_and_headers_of_any_name(said, secret):
    assert secret not in struck(said)
    assert secret not in str(InputError(said))


def test_json_stays_json_wherever_a_key_stands():
    for text in (f'authorization: {KEY}"', f"{KEY}\\", f'x-api-key="{KEY}\\"', 'authorization: abcd"'):
        assert json.loads(to_json({"a": text, "headers": {"Authorization": KEY}}))["headers"] == {
            "Authorization": "[key]"
        }


def test_what_is_no_key_stays():
    for text in (
        "the basic idea",
        "a bearer of news",
        "token=1",
        "see http://host:80/x",
        "x = key",
        "2 + 2 = 4",
        "a@b.c",
    ):
        assert struck(text) == text


def test_the_environment_names_keys():
    program = (
        "from nanoskyrl.stages.core.safe_text import struck\n"
        "print(struck('a hunter2hunter2 b c3c3c3c3c3 d false e plainvalue9'))"
    )
    env = {
        "MY_API_KEY": "hunter2hunter2",
        "HF_TOKEN": "c3c3c3c3c3",
        "TOKENIZERS_PARALLELISM": "false",
        "PLAIN": "plainvalue9",
    }
    ran = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout == "a [key] b [key] d false e plainvalue9\n"


# A policy's escape sequences

STEERING = (
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\x1bP1;1|17/ab\x1b\\",
    "a\rb",
    "\x08\x08",
    "\u202eabc",
    "\x7f",
    "\x1b[?1049h",
)


@pytest.mark.parametrize("text", STEERING, ids=ascii)
def test_no_character_steers_a_terminal(text):
    shown = printable(f"x{text}y\n\tz")
    assert not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or c == "\u202e" for c in shown)
    assert (shown[0], shown[-4:]) == ("x", "y\n\tz")


@pytest.mark.parametrize("terminal", [True, False])
def test_show_prints_escapes_for_what_a_policy_wrote(tmp_path, make_trajectory, terminal):
    import io

    from nanoskyrl.stages.core.rows import to_table
    from nanoskyrl.stages.core.shards import write_part
    from nanoskyrl.stages.looking import show as module
    from nanoskyrl.stages.looking.console import SafeConsole

    text = "".join(STEERING)
    row = make_trajectory(
        response=text, task_id=text, error=text, status="failed", stop_reason="error",
        messages=[{"role": "user", "content": text}, {"role": "assistant", "content": text}],
    )  # fmt: skip
    write_part(tmp_path / "part-00000.parquet", to_table([row]))
    for chosen in (None, 0):
        out = io.StringIO()
        real = module.SafeConsole
        try:
            module.SafeConsole = lambda file: SafeConsole(file=file, force_terminal=terminal)
            module.show(tmp_path / "part-00000.parquet", module.View(row=chosen), file=out)
        finally:
            module.SafeConsole = real
        for bad in ("\x1b[2J", "\x1b]0", "\x07", "\x9b", "\u202e", "\x1b[?1049h", "\x7f", "\x08"):
            assert bad not in out.getvalue()


# By servers' own words, to the disk


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)


def leaks(folder, *texts):
    """Return where our key stands: in a file's bytes, in a column, or in what was said."""
    import pyarrow.parquet as pq

    found = [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    found += [
        path for path in folder.rglob("*.parquet") if KEY in json.dumps(pq.read_table(path).to_pylist(), default=str)
    ]
    return found + [text for text in texts if KEY in text]


SERVERS = {
    "a refusal": lambda body: (400, {"error": {"message": f"key {KEY} may not"}}),
    "a wrong key": lambda body: (401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}),
    "a failure": lambda body: (500, {"error": {"message": f"Authorization: Bearer {KEY}"}}),
    "busy": lambda body: (429, {"detail": f"{KEY} is over its limit"}),
    "its answer": lambda body: (200, answer(f"#### 4 {KEY}")),
    "a tool's name": lambda body: (
        200,
        answer(None, [{"function": {"name": KEY, "arguments": json.dumps({"x": KEY})}}]),
    ),
    "no completion": lambda body: (200, {KEY: KEY}),
    "no JSON": lambda body: (200, f"<html>{KEY}</html>"),
}


def answer(text, calls=None):
    message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
    return {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}


@pytest.mark.parametrize("says", SERVERS.values(), ids=SERVERS)
def test_a_server_that_repeats_the_key_has_it_neither_stored_nor_printed(says, quick, tmp_path, monkeypatch):
    from endpoints import served
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, PlainTextResponse
    from running import skyrl_here

    monkeypatch.setenv("THE_CREDENTIAL_OF_MINE", KEY)
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        assert request.headers["authorization"] == f"Bearer {KEY}"
        status, content = says(await request.json())
        return PlainTextResponse(content) if isinstance(content, str) else JSONResponse(content, status)

    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "r1", "question": "What is 2 + 2?", "answer": "#### 4"}\n')
    with served(app) as address:
        done = skyrl_here(
            "eval", "--bench", "gsm8k", "--data", rows, "--endpoint", f"{address}/v1", "--model", "m", "--out", tmp_path / "out",
            "--set", "openai.key_env=THE_CREDENTIAL_OF_MINE", "--set", "openai.retries=1",
        )  # fmt: skip
    assert list((tmp_path / "out").rglob("*"))
    assert leaks(tmp_path, done.stdout, done.stderr) == []
