"""`skyrl sql`."""

from typing import Annotated

import typer

from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import JsonOption, RunOption, data_stream, emit, print_data, print_json, run_at, say


def sql(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [QUERY]",
            help="A run or a stage's directory, and one SELECT; without it, the tables are listed.",
            show_default=False,
        ),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option(
            help="A saved question: environments, failed-calls, length, never-solved, signal, who-made.",
            show_default=False,
        ),
    ] = None,
    start: Annotated[
        str | None, typer.Option("--id", help="Of who-made: a trajectory, by the start of its id.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Rows; default 100, with --json all.", min=1)] = None,
    print_query: Annotated[bool, typer.Option("--print", help="Print a saved question's SQL.")] = False,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a run in SQL: all stages as tables, which are only read; or a saved question.

    Example: skyrl sql runs/default "select step, avg(reward) from trajectories group by step order by step"
    """
    from nanoskyrl.stages.looking import ask

    place, query = _meant(words or [], question)
    where = run_at(place or run).root
    if question is not None:
        query = ask.question(question)
    if print_query and query is not None:
        emit(query.rstrip())
        return
    if query is None:
        found = ask.tables(where)
        print_data(found, (f"{name}: {', '.join(columns)}" for name, columns in found.items()), as_json)
        if not as_json:
            asks = (f"\n  {name:<14}{ask.asks(text)}" for name, text in ask.questions().items())
            say(f"\nQuestions, for --question:{''.join(asks)}")
        return
    answer = ask.ask(where, query, start=start, limit=limit or (None if as_json else 100))
    if as_json:
        print_json(answer.to_plain())
    else:
        ask.print_answer(answer, file=data_stream())


def _meant(words: list[str], question: str | None) -> tuple[str | None, str | None]:
    """Return the place and the query among the words; a lone word with a space is a query, unless a folder is there."""
    from nanoskyrl.stages.core.errors import SettingsError

    if len(words) > 2 or (question is not None and len(words) > 1):
        raise SettingsError(f"{len(words)} words are too many", hint="Put the query in quotes")
    if len(words) == 2:
        return words[0], words[1]
    if not words:
        return None, None
    is_place = question is not None or as_path(words[0]).is_dir() or not any(map(str.isspace, words[0]))
    return (words[0], None) if is_place else (None, words[0])
