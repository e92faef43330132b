"""Cases drawn for everything that reads what others wrote: `python tests/faults/fuzz.py 100000` tries so many of each.

A case is a seed; what fails is printed with it. Texts are pieces that the reader knows, with anything between, cut and
joined; bytes are those of a good file with some changed, left out, doubled or cut off.
"""

import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from nasty import PIECES

from nanoskyrl.envs.actions import final_answer, tool_calls
from nanoskyrl.envs.graders.answers import as_number, leading_number, same_answer
from nanoskyrl.envs.graders.judge import first_object
from nanoskyrl.envs.graders.reading import stated
from nanoskyrl.envs.tool_formats import channels, hermes, json_marks, literals, tagged
from nanoskyrl.envs.tool_formats.base import calls_in, in_own_tags
from nanoskyrl.stages.core.config import merge, parse_set, stage_config
from nanoskyrl.stages.core.errors import NanoskyrlError
from nanoskyrl.stages.core.manifest import MANIFEST, read_manifest
from nanoskyrl.stages.core.rows import from_table, to_json
from nanoskyrl.stages.core.safe_text import printable, struck
from nanoskyrl.stages.core.shards import read_part
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.engines.openai import _as_reply
from nanoskyrl.stages.engines.vllm.client import Lost, _checked, _message

MARKS = (
    *PIECES, "<|channel|>", "<|message|>", "<|call|>", "<|start|>", "<|end|>", "commentary to=functions.x", "<|python_tag|>", "[TOOL_CALLS]",
    "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|tool_call_start|>", "<|tool_call_end|>",
    "<function=x>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>x",
    "<|tool_call>call:x{", "<tool_call|>", '<|"|>', "<atem:function_calls>", '<invoke name="x">', "</invoke>", "[x(a=1)]", "[x(a='", "{'a': ", '{"name": "x", "arguments": ',
    '{"a":', "[", "]", "{", "}", "(", ")", '"', "'", "\\", "\\u", "\\boxed{", "####", "$", "Answer:", "<think>", "</think>", "\n", "\0", "\ud800",
    "1e999", "NaN", "-", "0x", "1/0", "9" * 400, "½", "٣", "²", "[" * 300, "{" * 300, "\u202e", "\x1b[",
)  # fmt: skip
READERS: dict[str, Callable[[str], Any]] = {
    "hermes": hermes.read, "harmony": channels.read_harmony, "atem": channels.read_atem, "llama": json_marks.read_llama,
    "mistral": json_marks.read_mistral, "deepseek": json_marks.read_deepseek, "pythonic": literals.read_pythonic,
    "gemma": literals.read_gemma, "xml": tagged.read_xml, "glm": tagged.read_glm,
}  # fmt: skip


def text(draw: random.Random) -> str:
    """Draw a text."""
    found = []
    for _ in range(draw.randint(0, 12)):
        piece = (
            draw.choice(MARKS)
            if draw.random() < 0.8
            else "".join(chr(draw.randrange(1, 0x3000)) for _ in range(draw.randint(1, 6)))
        )
        found.append(piece[: draw.randint(1, len(piece))] if draw.random() < 0.15 else piece)
    return "".join(found)


def value(draw: random.Random, depth: int = 0) -> Any:
    """Draw a value as JSON has them."""
    kind = draw.randrange(9 if depth < 3 else 6)
    if kind < 6:
        return (
            None,
            True,
            draw.choice((0, -1, 1 << 70, 3)),
            draw.choice((0.5, float("nan"), float("inf"), -1e308)),
            text(draw),
            "",
        )[kind]
    if kind == 6:
        return [value(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    names = (
        "choices",
        "message",
        "content",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "usage",
        "prompt_tokens",
        "finish_reason",
        "error",
        "",
    )
    return {draw.choice(names): value(draw, depth + 1) for _ in range(draw.randint(0, 4))}


def spoilt(draw: random.Random, data: bytes) -> bytes:
    """Draw changes to bytes."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        if not found:
            break
        at, how = draw.randrange(len(found)), draw.randrange(5)
        if how == 0:
            found[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            del found[at : at + draw.randint(1, 40)]
        elif how == 2:
            found[at:at] = found[at : at + draw.randint(1, 40)]
        elif how == 3:
            found[at : at + 4] = draw.randbytes(4)
        else:
            del found[at:]
    return bytes(found)


def calls(read: Callable[[str], Any], draw: random.Random) -> None:
    """A format of tool calls answers, and what it finds can be stored and shown."""
    found = read(text(draw))
    to_json([call.args for call in calls_in(found)])
    in_own_tags(found)


def actions(draw: random.Random) -> None:
    """Environments read every text."""
    written = text(draw)
    to_json([call.args for call in tool_calls(written)])
    final_answer(written)


def answers(draw: random.Random) -> None:
    """Graders read every answer."""
    one, other = text(draw), text(draw)
    stated(one)
    as_number(one)
    leading_number(one)
    same_answer(one, other)


def judge(draw: random.Random) -> None:
    """A judge's answer is an object, or is none."""
    with contextlib.suppress(ValueError):
        first_object(text(draw))


def chat(draw: random.Random) -> None:
    """An endpoint's answer is a reply, or one of the errors that the engine counts."""
    found = value(draw)
    if draw.random() < 0.7:
        found = {"choices": [{"message": value(draw), "finish_reason": value(draw)}], "usage": value(draw)}
    try:
        reply = _as_reply(found)
        assert isinstance(reply.text, str)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        pass


def completion(draw: random.Random) -> None:
    """A server's tokens are tokens, or are lost."""
    try:
        tokens, nats, _ = _checked(value(draw), value(draw), draw.choice(("stop", "length", None)))
        assert all(type(token) is int for token in tokens)
        assert nats is None or all(nat <= 0.001 for nat in nats)
    except (Lost, TypeError):
        pass
    _message(to_json(value(draw)).encode("utf-8", "replace"))


def setting(draw: random.Random) -> None:
    """Settings are taken, or refused in one error."""
    table = draw.choice(("rollout", "train", "score", "advantage", "sync", "eval", "run", "loop", "critic", text(draw)))
    key = draw.choice(
        (
            "lr",
            "env",
            "engine",
            "seed",
            "lag",
            "steps",
            "train_batch_size",
            "temperature",
            "max_turns",
            "rewards",
            text(draw),
        )
    )
    try:
        settings = merge(
            parse_set(f"{table}.{key}={to_json(value(draw))}" if draw.random() < 0.6 else f"{table}.{key}={text(draw)}")
        )
        stage_config(settings, table)
    except NanoskyrlError:
        pass


def stored(draw: random.Random) -> None:
    """Whatever is stored is JSON again, and whatever is shown steers nothing."""
    found = value(draw)
    json.loads(to_json(found))
    shown = printable(struck(text(draw)))
    assert not any(ord(char) < 32 and char not in "\n\t" for char in shown)


@cache
def good() -> tuple[Path, bytes, bytes]:
    """Return a folder, the bytes of a part, and those of a manifest, as a stage writes them."""
    from nanoskyrl.stages.core.runs import Run
    from nanoskyrl.stages.running.session import Session

    top = Path(tempfile.mkdtemp(prefix="nanoskyrl-fuzz-"))
    settings = {"rollout": {"engine": "scripted", "train_batch_size": 2, "n_samples_per_prompt": 2}}
    session = Session(Run(top / "run"), settings)
    session.rollout(0)
    place = Run(top / "run").stage(0, "rollout")
    return top, (place / "part-00000.parquet").read_bytes(), (place / MANIFEST).read_bytes()


def part(draw: random.Random) -> None:
    """A part is read as it was written, or refused in one error."""
    top, data, _ = good()
    path = top / "part-00000.parquet"
    path.write_bytes(spoilt(draw, data))
    try:
        table = read_part(path)
        check(table, "rollout")
        list(from_table(table))
    except NanoskyrlError:
        pass


def manifest(draw: random.Random) -> None:
    """A manifest is read, or refused in one error."""
    top, _, data = good()
    place = top / "stage"
    place.mkdir(exist_ok=True)
    (place / MANIFEST).write_bytes(
        spoilt(draw, data) if draw.random() < 0.7 else to_json(value(draw)).encode("utf-8", "replace")
    )
    with contextlib.suppress(NanoskyrlError):
        read_manifest(place)


CASES: dict[str, Callable[[random.Random], None]] = {
    **{f"calls: {name}": (lambda draw, read=read: calls(read, draw)) for name, read in READERS.items()},
    "actions": actions, "answers": answers, "judge": judge, "chat wire": chat, "completions": completion,
    "settings": setting, "stored text": stored, "parts": part, "manifests": manifest,
}  # fmt: skip


def tried(name: str, seeds: range) -> list[str]:
    """Try cases; return what was wrong with which."""
    found = []
    for seed in seeds:
        try:
            CASES[name](random.Random(f"{name}-{seed}"))
        except Exception as error:
            found.append(f"{name} {seed}: {type(error).__name__}: {ascii(str(error))[:200]}")
            if len(found) >= 5:
                break
    return found


def main(count: int, names: list[str]) -> int:
    """Try so many of each, and print a table."""
    print("| Reader | Cases | Wrong | Seconds |\n| --- | ---: | ---: | ---: |")
    wrong = 0
    for name in names or CASES:
        began = time.perf_counter()
        found = tried(name, range(count))
        wrong += len(found)
        print(f"| {name} | {count:,} | {len(found)} | {time.perf_counter() - began:.0f} |", flush=True)
        print("".join(f"{line}\n" for line in found), end="", file=sys.stderr, flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
