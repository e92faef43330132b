"""The tool `calculator`: arithmetic on numbers, by walking the parsed expression; nothing is ever evaluated as code."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from nanoskyrl.envs.tools import ToolError

MAX_EXPRESSION_LENGTH = 200
MAX_DIGITS = 1000
"""Results with more digits are refused: computing them would take longer than anyone waits."""


def _limited(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def check(left: Any, right: Any) -> Any:
        if not all(isinstance(value, int | float) for value in (left, right)):
            raise ToolError("only numbers can be worked with")
        if function is operator.pow:
            if isinstance(left, float) or isinstance(right, float) or right < 0:
                left, right = float(left), float(right)
            elif abs(left) > 1 and right * math.log10(abs(left)) > MAX_DIGITS:
                raise ToolError("the result is too large")
        result = function(left, right)
        if isinstance(result, complex):
            raise ToolError("the result is not a real number")
        if isinstance(result, int) and result.bit_length() > MAX_DIGITS * 4:
            raise ToolError("the result is too large")
        return result

    return check


def _number(node: ast.Constant) -> int | float:
    if isinstance(node.value, bool) or not isinstance(node.value, int | float):
        raise ToolError("only numbers can be worked with")
    return node.value


def calculator(expression: str) -> str:
    """Work out an arithmetic expression with + - * / // % ** and brackets."""
    import simpleeval

    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ToolError(f"the expression is longer than {MAX_EXPRESSION_LENGTH} characters")
    binary = {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    }  # fmt: skip
    operators: dict[Any, Any] = {kind: _limited(function) for kind, function in binary.items()}
    operators |= {ast.USub: operator.neg, ast.UAdd: operator.pos}
    evaluator = simpleeval.SimpleEval(operators=operators, functions={}, names={})
    # Nothing but numbers and operators: attributes and methods of a number can hold a gigabyte.
    nodes: dict[Any, Any] = {kind: (evaluator.nodes or {})[kind] for kind in (ast.BinOp, ast.UnaryOp)}
    evaluator.nodes = {**nodes, ast.Constant: _number}
    try:
        value = evaluator.eval(expression, ast.parse(expression.strip(), mode="eval").body)
    except ToolError:
        raise
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    except Exception as error:  # the parser and the operators raise whatever they like
        raise ToolError(f"cannot work out this expression ({type(error).__name__})") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the result is too large")
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)
