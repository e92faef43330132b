"""A run as tables for SQL: views over its Parquet parts, which DuckDB reads only as far as a question needs.

The database lives in memory and nothing can be written from it: one SELECT at a time is taken, the parts of the run are
the only files that it can open, no extension can be loaded, and its settings are locked. Digests are not checked here;
`verify` does.
"""

import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.manifest import Manifest, is_finished, read_manifest
from nanoskyrl.stages.core.metrics import grouped, read_metrics
from nanoskyrl.stages.core.pipeline import OURS
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.storage import is_local
from nanoskyrl.stages.core.trajectory import RENAMED, STAGE_ORDER, TOKEN_COLUMNS, schema_of
from nanoskyrl.stages.models.policy import read_info

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY_LIMIT = "2GB"
"""Of the database; what needs more goes through files in the temporary folder."""
EVALUATED = "evaluations"
"""The table of what evaluations attempted."""
STEP = "try_cast(regexp_extract(filename, 'step-([0-9]{1,9})/[^/]+/[^/]+$', 1) as integer) as step"
EVALUATION = (
    "regexp_extract(filename, '([^/]+)/[^/]+/[^/]+$', 1) as policy, "
    "regexp_extract(filename, '([^/]+)/[^/]+$', 1) as evaluation"
)
LONE_SURROGATE = r"\\u[dD][89abAB][0-9a-fA-F]{2}|\\u[dD][c-fC-F][0-9a-fA-F]{2}"
"""What a model may write and Python's JSON holds, and DuckDB's does not."""
CALL = '[{"tool": "VARCHAR", "args": "JSON", "result": "VARCHAR", "ok": "BOOLEAN", "error": "VARCHAR"}]'
OUTPUT_TYPES = {
    "step": pa.int32(), "stage": pa.string(), "folder": pa.string(), "digest": pa.string(), "policy": pa.string(),
    "rows_in": pa.int64(), "rows_out": pa.int64(), "dropped": pa.string(), "settings": pa.string(),
    "facts": pa.string(), "inputs": pa.string(), "code": pa.string(), "packages": pa.string(),
}  # fmt: skip
POLICY_TYPES = {"version": pa.int32(), "digest": pa.string(), "parent": pa.string(), "source": pa.string()}
METRIC_TYPES = {
    "step": pa.int32(), "stage": pa.string(), "time": pa.float64(), "name": pa.string(), "value": pa.float64(),
    "text": pa.string(),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """One finished directory of a stage."""

    directory: Path
    manifest: Manifest
    step: int | None = None

    def files(self) -> list[str]:
        """Return its parts."""
        return [str(self.directory / part.name) for part in self.manifest.parts]

    @property
    def columns(self) -> str:
        """The stage whose columns its rows have: of one of somebody's own, that whose tables it passed on."""
        stage = str(self.manifest.facts.get("table", self.manifest.stage))
        return stage if stage in OURS else "score"


def finished_outputs(place: Path) -> list[FinishedOutput]:
    """Return every finished output of a run, or the one of a stage's directory.

    Raises:
        InputError: nothing of the kind is there, or a manifest cannot be read.
    """
    place = place.resolve() if is_local(place) else place
    if not is_local(place):
        raise InputError(f"`{place}` is not on this machine", hint="Copy it here: only local files are queried")
    if is_finished(place):
        return [FinishedOutput(place, read_manifest(place))]
    run, found = Run(place), []
    for step in run.steps():
        folders = sorted(path for path in run.step(step).iterdir() if path.is_dir() and is_finished(path))
        found += [FinishedOutput(folder, read_manifest(folder), step) for folder in folders]
    found += [FinishedOutput(folder, read_manifest(folder)) for folder in run.evaluations()]
    if not found:
        raise InputError(
            f"`{place}` is neither a run with a finished stage nor the directory of one",
            hint="Name a run directory such as runs/default",
        )
    return found


@contextmanager
def open_database(place: Path) -> Iterator["DuckDBPyConnection"]:
    """Open a run, or the directory of one stage, as a database that can only be read.

    Tables: one of each stage by the name of its folder; `trajectories`, of each step the stage that tells most;
    `turns`, `tool_calls` and `tokens` of these; `evaluations`; `outputs`, `policies` and `metrics`.

    Raises:
        InputError: nothing of the kind is there, or a manifest cannot be read.
    """
    import duckdb

    outputs = finished_outputs(place)
    with tempfile.TemporaryDirectory(prefix="skyrl-sql-") as scratch:
        settings = {
            "memory_limit": MEMORY_LIMIT, "temp_directory": scratch, "preserve_insertion_order": True,
            "autoinstall_known_extensions": False, "autoload_known_extensions": False,
            "allow_community_extensions": False, "python_enable_replacements": False,
        }  # fmt: skip
        with duckdb.connect(":memory:", config=settings) as database:
            _fill(database, place, outputs)
            files = [file for output in outputs for file in output.files()]
            database.execute("set allowed_paths = ?", [files])
            database.execute("set enable_external_access = false")
            for name, query in _views(outputs):
                database.execute(f'create view "{name}" as {query}')
            database.execute("set lock_configuration = true")
            yield database


def _fill(database: "DuckDBPyConnection", place: Path, outputs: list[FinishedOutput]) -> None:
    """Write the tables that do not come from parts, and empty ones that know the columns of stages."""
    database.execute("create schema columns_of")
    for stage in STAGE_ORDER:
        _create(database, f"columns_of.{stage}", schema_of(stage).empty_table())
    lines = read_metrics(Run(place).metrics) if not is_finished(place) else []
    for name, types, rows in (
        ("outputs", OUTPUT_TYPES, [_described(output, place) for output in outputs]),
        ("policies", POLICY_TYPES, [] if is_finished(place) else _policies(Run(place), outputs)),
        ("metrics", METRIC_TYPES, [metric for line in lines for metric in _metrics_of(line)]),
    ):
        fields = [pa.field(field, of) for field, of in types.items()]
        _create(database, name, pa.Table.from_pylist(rows, pa.schema(fields)))


def _create(database: "DuckDBPyConnection", name: str, table: pa.Table) -> None:
    database.register("given", table)
    database.execute(f"create table {name} as select * from given")
    database.unregister("given")


def _described(output: FinishedOutput, place: Path) -> dict[str, Any]:
    manifest, inside = output.manifest, output.directory != place.resolve()
    plain = {name: getattr(manifest, name) for name in ("stage", "digest", "policy", "rows_in", "rows_out")}
    texts = ("dropped", "settings", "facts", "inputs", "code", "packages")
    folder = output.directory.relative_to(place.resolve()) if inside else output.directory
    return {
        **plain, **{name: json.dumps(getattr(manifest, name), ensure_ascii=True) for name in texts},
        "step": output.step, "folder": str(folder),
    }  # fmt: skip


def _policies(run: Run, outputs: list[FinishedOutput]) -> list[dict[str, Any]]:
    """Return the policies of a run; their digests as those who made or used them recorded them."""
    digests: dict[int, str | None] = {}
    for output in outputs:
        manifest = output.manifest
        if manifest.stage == "train" and output.step is not None:
            digests[output.step + 1] = manifest.facts.get("policy")
            digests.setdefault(output.step, manifest.policy)
    found = []
    for version in run.policies():
        info = read_info(run.policy(version))
        digest = digests.get(version)
        found.append({"version": version, "digest": digest, "parent": info.parent, "source": info.source})
    return found


def _metrics_of(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    head = {name: line.get(name) for name in ("step", "stage", "time")}
    for name, value in line.items():
        if name in (*head, "host"):
            continue
        is_number = isinstance(value, int | float)
        yield {
            **head, "name": name, "value": float(value) if is_number else None,
            "text": None if is_number or value is None else str(value),
        }  # fmt: skip


def _views(outputs: list[FinishedOutput]) -> Iterator[tuple[str, str]]:
    """Yield the name and the query of every view."""

    def name_of(output: FinishedOutput) -> str:
        stage = output.manifest.stage
        return EVALUATED if stage == "eval" else output.directory.name if output.step is not None else stage

    for name, found in grouped((name_of(output), output) for output in outputs if output.manifest.parts).items():
        yield name, _of_parts(found, EVALUATION if name == EVALUATED else STEP)
    yield "trajectories", _of_parts(_most_telling(outputs), STEP, "advantage")
    keys = "step, trajectory_id, step_index, env, task_id"
    yield (
        "turns",
        f"select {keys}, number - 1 as turn, t.* from (select {keys}, unnest(turns) as t, "
        "generate_subscripts(turns, 1) as number from trajectories)",
    )
    yield (
        "tool_calls",
        f"select {keys}, turn, number - 1 as call, c.* from (select {keys}, turn, unnest(calls) as c, "
        f"generate_subscripts(calls, 1) as number from (select {keys}, turn, from_json(coalesce("
        f"try_cast(tool_calls as json), try_cast(regexp_replace(tool_calls, '{LONE_SURROGATE}', '\\\\ufffd', 'g') "
        f"as json)), '{CALL}') as calls from turns where tool_calls <> '[]'))",
    )
    lists = [name for name in TOKEN_COLUMNS if name != "prompt_ids"]
    unnested = ", ".join(f'unnest("{name}") as "{name.replace("response_ids", "token_id")}"' for name in lists)
    yield (
        "tokens",
        "select step, trajectory_id, step_index, unnest(range(len(response_ids))) as position, "
        f"{unnested} from trajectories",
    )


def telling_outputs(place: Path) -> list[FinishedOutput]:
    """Return of each step of a run the output with trajectories that tells most, or the one of a stage's directory.

    Raises:
        InputError: nothing of the kind is there, or a manifest cannot be read.
    """
    return _most_telling(finished_outputs(place))


def _most_telling(outputs: list[FinishedOutput]) -> list[FinishedOutput]:
    """Return of each step the output that tells most; evaluations and second opinions are not the run's own."""
    if len(outputs) == 1:
        return [output for output in outputs if output.manifest.stage != "train" and output.manifest.parts]
    found: dict[int | None, FinishedOutput] = {}
    for stage in reversed(STAGE_ORDER):
        for output in outputs:
            if output.directory.name == output.manifest.stage == stage:
                found.setdefault(output.step, output)
    return [found[step] for step in sorted(found, key=lambda step: -1 if step is None else step)]


def _of_parts(outputs: list[FinishedOutput], place: str, stage: str | None = None) -> str:
    """Return a query of all rows of some outputs, with the columns of a stage where one is named.

    Parts are read together as far as they have the same columns: those of a stage and of a version of the schema.
    """

    def columns(output: FinishedOutput) -> tuple[str, int]:
        return output.manifest.stage, output.manifest.schema_version

    queries = []
    for (_, version), alike in itertools.groupby(sorted(outputs, key=columns), key=columns):
        files = [file for output in alike for file in output.files()]
        if not files:
            continue
        listed = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
        renamed = ", ".join(f"{then} as {now}" for then, now in RENAMED.items())
        old = f" rename ({renamed})" if version == 1 and outputs[0].manifest.stage != "train" else ""
        queries.append(f"select {place}, * exclude (filename){old} from read_parquet([{listed}], filename = true)")
    if stage is not None:
        queries.insert(0, f"select null::integer as step, * from columns_of.{stage}")
    return " union all by name ".join(queries)


def check_query(database: "DuckDBPyConnection", query: str) -> None:
    """Raise SettingsError unless a query is one SELECT."""
    import duckdb

    try:
        statements = database.extract_statements(query)
    except duckdb.Error as error:
        raise SettingsError(f"this is no SQL: {first_lines(error)}", hint=TABLES_HINT) from error
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        found = ", ".join(str(statement.type).rpartition(".")[2] for statement in statements) or "nothing"
        raise SettingsError(f"only one SELECT is taken, and this is {found}", hint=TABLES_HINT)


TABLES_HINT = "`skyrl sql RUN` lists the tables and their columns"


def first_lines(error: Exception) -> str:
    """Return the error of a query without the picture of where it stands."""
    return re.split(r"\n\s*\n|\nLINE ", str(error).strip())[0].replace("\n", " ")
