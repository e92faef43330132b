"""`skyrl grade`."""

import json
from typing import Annotated

import typer

from nanoskyrl.stages.core.errors import EXIT_OK, EXIT_SHORT, SettingsError
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import emit, say


def grade(
    file: Annotated[
        str,
        typer.Argument(help="JSONL of kind, gold and pred; with --logs, SWE-bench predictions.", show_default=False),
    ],
    logs: Annotated[
        str | None, typer.Option(help="Folder of logs that SWE-bench's harness left.", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Rows of SWE-bench, for --logs: Parquet, JSONL or CSV.", show_default=False)
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print which answer was taken, and as what it was compared.")
    ] = False,
    reasoning: Annotated[
        list[str] | None,
        typer.Option(
            help="Opening and closing mark of reasoning, with a space between; may be repeated.", show_default=False
        ),
    ] = None,
) -> int:
    """Grade answers by the graders of every environment and benchmark; print each row with `correct` and `why`.

    With --explain, also which answer was taken, in which form it was stated, and as what it was compared.

    Kinds: math, set, tuple, mcq, number, code, tool_call, tool_call_set, final_answer, stated_answer.

    Example: skyrl grade answers.jsonl
    """
    from nanoskyrl.envs.graders.reading import REASONING
    from nanoskyrl.stages.looking.grade import grade_logs, grade_rows

    if logs is not None:
        if data is None:
            raise SettingsError("`--logs` needs the rows of the benchmark", hint="Name them with `--data FILE`")
        rows, numbers = grade_logs(as_path(file), as_path(logs), data)
        for row in rows:
            emit(json.dumps(row, ensure_ascii=False))
        say(json.dumps(numbers))
        return EXIT_OK if numbers["judged"] == numbers["predictions"] else EXIT_SHORT
    marks = [tuple(pair.split()) for pair in reasoning or ()]
    if any(len(pair) != 2 for pair in marks):
        raise SettingsError(
            "`--reasoning` takes two marks", hint="Write, for instance, `--reasoning '<think> </think>'`"
        )
    counts = {True: 0, False: 0, None: 0}
    try:
        for row in grade_rows(as_path(file), explain=explain, marks=marks or REASONING):
            counts[row.get("graded_correct", row["correct"])] += 1
            emit(json.dumps(row, ensure_ascii=False))
    finally:
        if any(counts.values()):
            say(f"{counts[True]} right, {counts[False]} wrong, {counts[None]} without a verdict")
    return EXIT_SHORT if counts[None] else EXIT_OK
