"""Questions to a run in SQL: written by hand, or saved ones by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.table import Column, Table
from rich.text import Text

from nanoskyrl.stages.core.errors import InputError, SettingsError, did_you_mean
from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.core.safe_text import one_line, shortened
from nanoskyrl.stages.looking.console import open_console, with_rows
from nanoskyrl.stages.looking.database import TABLES_HINT, check_query, first_lines, open_database

QUESTIONS = Path(__file__).parent / "questions"
WIDE = 10_000
"""Characters of a line where no terminal breaks it."""
LONGEST = 1000
"""Characters of a cell; `--json` gives the whole."""


@dataclass(frozen=True, slots=True)
class QueryResult:
    """What a query found."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    more: bool
    """Whether there are rows beyond the limit."""

    def to_plain(self) -> list[dict[str, Any]]:
        """Return each row by column, as values of JSON."""
        return [{name: _plain(value) for name, value in zip(self.columns, row, strict=True)} for row in self.rows]


def questions() -> dict[str, str]:
    """Return the saved questions by name, each SQL whose first line says what it answers."""
    return {path.stem: path.read_text() for path in sorted(QUESTIONS.glob("*.sql"))}


def asks(sql: str) -> str:
    """Return what a saved question answers."""
    return sql.partition("\n")[0].removeprefix("-- ")


def question(name: str) -> str:
    """Return the SQL of a saved question.

    Raises:
        SettingsError: there is none of this name.
    """
    known = questions()
    if name not in known:
        hint = did_you_mean(name, known) or f"There are {', '.join(known)}"
        raise SettingsError(f"no question `{name}` is saved", hint=hint)
    return known[name]


def ask(place: Path, query: str, *, start: str | None = None, limit: int | None = None) -> QueryResult:
    """Return what a query finds in a run.

    Args:
        place: A run, or the directory of a stage.
        query: One SELECT; `$id` in it stands for `start`.
        start: Start of a trajectory's id; None: of any.
        limit: Rows that are returned; None: all.

    Raises:
        InputError: there is no run, or a part is missing or not what its manifest says.
        SettingsError: it is no SELECT, or names what is not there.
    """
    import duckdb

    with open_database(place) as database:
        check_query(database, query)
        parameters = {"id": start or ""} if "$id" in query else {}
        if start and not parameters:
            raise SettingsError("`--id` is for questions that ask for one", hint="Write `$id` where it belongs")
        try:
            found = database.execute(query, parameters)
            columns = tuple(name for name, *_ in found.description or ())
            rows = found.fetchall() if limit is None else found.fetchmany(limit + 1)
        except duckdb.Error as error:
            if isinstance(error, duckdb.IOException) or ".parquet" in str(error):
                raise InputError(
                    f"a part cannot be read: {first_lines(error)}", hint="`skyrl verify` says which are broken"
                ) from error
            raise SettingsError(f"the query cannot be answered: {first_lines(error)}", hint=TABLES_HINT) from error
    return QueryResult(columns, rows if limit is None else rows[:limit], limit is not None and len(rows) > limit)


def tables(place: Path) -> dict[str, list[str]]:
    """Return the tables of a run, each with its columns and their types."""
    query = (
        "select table_name, column_name, data_type from information_schema.columns "
        "where table_schema = 'main' order by table_name, ordinal_position"
    )
    return grouped(
        (table, f"{column} {'STRUCT(...)[]' if of.startswith('STRUCT') else of}")
        for table, column, of in ask(place, query).rows
    )


def print_answer(answer: QueryResult, file: IO[str] | None = None) -> None:
    """Print an answer as a table that fits the terminal, or in whole lines where there is none."""
    console = open_console(file, WIDE)
    columns = (_column(name, [row[index] for row in answer.rows]) for index, name in enumerate(answer.columns))
    cells = ([Text(_cell(value)) for value in row] for row in answer.rows)
    console.print(with_rows(Table(*columns, box=None, pad_edge=False), cells))
    if not answer.rows:
        console.print("no rows")
    if answer.more:
        console.print(f"... and more; the first {len(answer.rows)} are shown, --limit shows others")


def _column(name: str, values: Sequence[Any]) -> Column:
    """Return the head of a column; numbers stand to the right, and are never cut."""
    numbers = all(isinstance(value, int | float | None) for value in values)
    widest = max((len(_cell(value)) for value in values), default=0) if numbers else 0
    return Column(Text(one_line(name)), justify="right" if numbers else "left", no_wrap=True, min_width=widest)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return shortened(one_line(str(value)), LONGEST)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if abs(value) != float("inf") and value == value else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(item) for item in value]
    return str(value)
