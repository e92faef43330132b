"""Stage `filter`: drops trajectories between `score` and `advantage`, by expressions over their columns.

A run has it where `run.stages` names it. What is dropped is counted in the manifest by the
name of its expression, and the estimator never sees it.
"""

import ast
import functools
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from nanoskyrl.stages.core.checked import Checked
from nanoskyrl.stages.core.errors import SettingsError, did_you_mean
from nanoskyrl.stages.core.pipeline import Stage
from nanoskyrl.stages.core.rows import from_table
from nanoskyrl.stages.core.trajectory import TOKEN_COLUMNS, Trajectory, columns_of

COLUMNS = tuple(column.name for column in columns_of("score") if column.name not in TOKEN_COLUMNS)
"""The names that expressions may use; `prompt_tokens` and `completion_tokens` count the tokens."""
FUNCTIONS = (len, abs, min, max)
OPEN = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In,
    ast.NotIn, ast.Not,
)  # fmt: skip
"""Operators that leave open what a null leaves open; the others compare with None."""
NODES = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Constant, ast.Name, ast.Call, ast.List, ast.Tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterConfig(Checked):
    """What is dropped."""

    drop: dict[str, str] = field(default_factory=dict)
    """Expressions by name, such as { too_long = "completion_tokens > 400" }: a trajectory goes if one is true of one
    of its rows. They use the columns of score; a null leaves open what it is part of, and == None finds it."""

    def check(self) -> None:
        """Refuse what is no expression over columns."""
        for name, text in self.drop.items():
            names = [node.id for node in ast.walk(_parsed(name, text)) if isinstance(node, ast.Name)]
            known = (*COLUMNS, *(function.__name__ for function in FUNCTIONS))
            if unknown := next((one for one in names if one not in known), None):
                raise SettingsError(
                    f"`filter.drop.{name}` uses `{unknown}`, which is no column that can be asked for",
                    hint=did_you_mean(unknown, COLUMNS) or f"There are {', '.join(COLUMNS)}",
                )


def drop_rows(table: pa.Table, config: FilterConfig) -> tuple[pa.Table, Mapping[str, int]]:
    """Drop trajectories of which an expression of `filter.drop` is true, each under the name of the first that is.

    Example: skyrl filter --set 'filter.drop={too_long = "completion_tokens > 400"}'

    Raises:
        SettingsError: an expression cannot be worked out of a row.
    """
    ids = table.column("trajectory_id").to_pylist()
    reasons: dict[str, str] = {}
    for name, text in config.drop.items():
        evaluate = _evaluator(name, text)
        for trajectory, row in zip(ids, from_table(table), strict=True):
            if trajectory not in reasons and evaluate(row) is True:
                reasons[trajectory] = name
    stays = [trajectory not in reasons for trajectory in ids]
    return table.filter(pa.array(stays, pa.bool_())), Counter(reasons[one] for one in ids if one in reasons)


FILTER = Stage(name="filter", input="score", config=FilterConfig, run=drop_rows)


def _parsed(name: str, text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SettingsError(
            f"`filter.drop.{name}` is no expression: {text!r}", hint="Write, for instance, completion_tokens > 400"
        ) from error


def _evaluator(name: str, text: str) -> Callable[[Trajectory], Any]:
    """Return what an expression comes to for a row: true, false, or None where a null leaves it open."""
    import simpleeval

    row_of: dict[str, Trajectory] = {}
    evaluator: Any = simpleeval.EvalWithCompoundTypes(
        functions={function.__name__: _with_nulls(function) for function in FUNCTIONS},
        names=lambda node: getattr(row_of["row"], node.id),
    )
    evaluator.operators = {
        **{kind: _with_nulls(evaluator.operators[kind]) for kind in OPEN},
        ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    }  # fmt: skip
    evaluator.nodes = {
        **{kind: evaluator.nodes[kind] for kind in NODES},
        ast.BoolOp: lambda node: _joined(isinstance(node.op, ast.And), map(evaluator._eval, node.values)),
        ast.Subscript: lambda node: _item(evaluator._eval(node.value), evaluator._eval(node.slice)),
    }
    parsed = _parsed(name, text)

    def evaluate(row: Trajectory) -> Any:
        row_of["row"] = row
        try:
            found = evaluator.eval(text, parsed)
        except Exception as error:  # operators raise whatever they like
            raise SettingsError(
                f"`filter.drop.{name}` cannot be worked out of trajectory {row.trajectory_id}: {error}",
                hint="Compare numbers with numbers and words with words",
            ) from error
        if found is None or isinstance(found, bool):
            return found
        raise SettingsError(f"`filter.drop.{name}` is {found!r}, and no yes or no", hint="Compare it with something")

    return evaluate


def _with_nulls(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator that leaves open what a null leaves open."""

    @functools.wraps(work)
    def of_known(*values: Any) -> Any:
        return None if any(value is None for value in values) else work(*values)

    return of_known


def _joined(is_and: bool, values: Any) -> bool | None:
    """Return `and` or `or` of values that may be open."""
    found = None if None in (all_of := [None if value is None else bool(value) for value in values]) else is_and
    return (not is_and) if (not is_and) in all_of else found


def _item(of: Any, key: Any) -> Any:
    """Return an item of a list or table, null where there is none."""
    try:
        return None if of is None else of[key]
    except (KeyError, IndexError):
        return None
