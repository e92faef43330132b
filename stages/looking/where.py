"""Conditions on rows, as `--where` takes them: Python's comparisons over the names of `row_facts.py`.

    reward < 0 and tool_calls > 2
    status == "truncated" or not success
    "not found" in response and env in ("tool_use", "webshop_lite")

They are worked out over whole Arrow columns. What is null makes a comparison null, and a row without an
answer is not chosen, as in SQL.
"""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import ast
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.stages.core.errors import SettingsError, did_you_mean

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "equal", ast.NotEq: "not_equal", ast.Lt: "less", ast.LtE: "less_equal", ast.Gt: "greater",
    ast.GtE: "greater_equal",
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide",
}  # fmt: skip
WORDS = {"true": True, "false": False, "null": None, "none": None}
EXAMPLE = "Write, for instance, --where 'reward < 0 and tool_calls > 2'"
LONGEST = 4000
"""Characters of a condition; Python's own parser gives up on deeply nested ones."""


@dataclass(frozen=True)
class Condition:
    """A condition that was read."""

    text: str
    tree: ast.expr
    names: frozenset[str]
    """The facts that it asks for."""

    def holds(self, column: Callable[[str], pa.Array], rows: int) -> pa.Array:
        """Return whether it holds for each row.

        Args:
            column: Returns a fact of all rows.
            rows: How many there are.

        Raises:
            SettingsError: it compares what cannot be compared, or comes to no yes or no.
        """
        try:
            found = _value(self.tree, column)
            found = found if isinstance(found, pa.Array) else pa.array([found.as_py()] * rows)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise SettingsError(
                f"`--where {self.text}` cannot be worked out: {str(error).splitlines()[0]}",
                hint="Compare numbers with numbers and texts with texts",
            ) from error
        if pa.types.is_null(found.type):
            return pa.array([False] * rows)
        if not pa.types.is_boolean(found.type):
            raise SettingsError(f"`--where {self.text}` is no yes or no but {found.type}", hint=EXAMPLE)
        return pc.fill_null(found, False)


def read_condition(text: str, known: Collection[str], prefixes: Collection[str] = ()) -> Condition:
    """Return a condition whose names are all known.

    Args:
        text: What the user wrote.
        known: Names of facts.
        prefixes: Names before a point, as in `part.answer`.

    Raises:
        SettingsError: it cannot be read, or names something else.
    """
    try:
        if len(text) > LONGEST:
            raise ValueError(f"it is longer than {LONGEST} characters")
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        hint = "Compare with `==`" if "=" in text else EXAMPLE
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise SettingsError(f"`--where {text}` cannot be read: {reason}", hint=hint) from error
    dotted = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    names = {ast.unparse(node) for node in dotted}
    inside = {id(node.value) for node in dotted}
    names |= {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id not in WORDS and id(node) not in inside
    }
    found = {name for name in names if name.partition(".")[0] in prefixes and "." in name}
    for name in sorted(names - found - set(known)):
        raise SettingsError(
            f"`--where` knows no `{name}`",
            hint=did_you_mean(name, known)
            or f"It knows {', '.join(sorted(known))}; texts need quotes; ratios and KL are in a step's folder `train`",
        )
    return Condition(text, tree, frozenset(names))


def _value(node: ast.expr, column: Callable[[str], pa.Array]) -> Any:
    """Return the Arrow array or scalar of an expression."""
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
            return pa.scalar(value)
        case ast.Name(id=name):
            return pa.scalar(WORDS[name]) if name in WORDS else column(name)
        case ast.Attribute(value=ast.Name(id=prefix), attr=name):
            return column(f"{prefix}.{name}")
        case ast.BoolOp(op=op, values=values):
            together = pc.and_kleene if isinstance(op, ast.And) else pc.or_kleene
            found = _truth(values[0], column)
            for value in values[1:]:
                found = together(found, _truth(value, column))
            return found
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return pc.invert(_truth(operand, column))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return pc.negate(_value(operand, column))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            sides = (_value(side, column).cast(pa.float64()) for side in (left, right))
            return getattr(pc, ARITHMETIC[type(op)])(*sides)
        case ast.Compare(left=left, ops=ops, comparators=rights):
            found = None
            for side, op, right in zip([left, *rights], ops, rights, strict=False):
                one = _compared(side, op, right, column)
                found = one if found is None else pc.and_kleene(found, one)
            return found
    raise TypeError(f"`{ast.unparse(node)}` is no comparison of names, numbers and texts")


def _truth(node: ast.expr, column: Callable[[str], pa.Array]) -> Any:
    found = _value(node, column)
    if pa.types.is_null(found.type):
        return found.cast(pa.bool_())
    if not pa.types.is_boolean(found.type):
        raise TypeError(f"`{ast.unparse(node)}` is no yes or no")
    return found


def _compared(left: ast.expr, op: ast.cmpop, right: ast.expr, column: Callable[[str], pa.Array]) -> Any:
    if isinstance(op, ast.In | ast.NotIn):
        found = _member(left, right, column)
        return pc.invert(found) if isinstance(op, ast.NotIn) else found
    ours, theirs = _value(left, column), _value(right, column)
    for one, other in ((ours, theirs), (theirs, ours)):
        if pa.types.is_null(other.type) and isinstance(op, ast.Is | ast.Eq):
            return pc.is_null(one)
        if pa.types.is_null(other.type) and isinstance(op, ast.IsNot | ast.NotEq):
            return pc.is_valid(one)
    if type(op) not in COMPARISONS:
        raise TypeError(f"`{ast.unparse(left)} ... {ast.unparse(right)}` is no comparison of names, numbers and texts")
    if pa.types.is_boolean(ours.type) != pa.types.is_boolean(theirs.type):  # success == 1
        ours, theirs = ours.cast(pa.float64()), theirs.cast(pa.float64())
    return getattr(pc, COMPARISONS[type(op)])(ours, theirs)


def _member(left: ast.expr, right: ast.expr, column: Callable[[str], pa.Array]) -> Any:
    """Return whether one text contains another, or a value is among several."""
    if isinstance(right, ast.List | ast.Tuple | ast.Set):
        if not all(isinstance(item, ast.Constant) for item in right.elts):
            raise TypeError(f"`{ast.unparse(right)}` holds more than numbers and texts")
        values = pa.array([ast.literal_eval(item) for item in right.elts])
        return pc.is_in(_value(left, column), value_set=values)
    if not (isinstance(left, ast.Constant) and isinstance(left.value, str)):
        raise TypeError(f"`{ast.unparse(left)}` is no text in quotes")
    return pc.match_substring(_value(right, column), left.value)
