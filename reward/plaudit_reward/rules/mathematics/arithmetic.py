"""Evaluate plain arithmetic that a model wrote. verl calls ``eval`` here, which runs any code that the model wrote."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

_MAX_EXPONENT = 1000
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_MANY: dict[type[ast.expr], Callable[[list[Any]], Any]] = {ast.Tuple: tuple, ast.List: list, ast.Set: set}


def evaluate(text: str) -> Any:
    """Return the value of an expression of numbers, ``+ - * / // % **`` and brackets, or a tuple, list or set of them.

    Raises:
        ValueError: the text is not such an expression, or has no value.
    """
    try:
        return _value(ast.parse(text.lstrip(" \t"), mode="eval").body)
    except (SyntaxError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not arithmetic: {error}") from error


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            a, b = _value(left), _value(right)
            if not isinstance(a, int | float) or not isinstance(b, int | float):
                raise ValueError("arithmetic works on numbers only")
            if isinstance(sign, ast.Pow) and abs(b) > _MAX_EXPONENT:
                raise ValueError(f"the exponent {b} is too large")
            return _BINARY[type(sign)](a, b)
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            return _MANY[type(node)]([_value(item) for item in items])
    raise ValueError(f"{type(node).__name__} is not arithmetic")
