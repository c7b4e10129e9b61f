"""Looks into a Python file that a job names, without running it."""

from __future__ import annotations

import ast
from pathlib import Path

from plaudit_workers.job.problem import Problem


def python_problem(field: str, path: str, name: str, name_field: str) -> Problem | None:
    """What is wrong with a file and the function or class wanted from it; None when nothing is.

    Args:
        field: the section of the job that names both.
        path: the file, absolute.
        name: function or class; of a dotted name its first part is looked for.
        name_field: how the field that holds the name is called.
    """
    try:
        source = Path(path).read_bytes()
    except FileNotFoundError:
        return Problem(f"{field}.path", f"there is no file {path}", "Paths are relative to the job file; mend it there")
    except OSError as error:
        return Problem(f"{field}.path", f"{path} cannot be read: {error.strerror}", "Name a Python file")
    return source_problem(field, path, source, name, name_field)


def source_problem(field: str, path: str, source: bytes, name: str, name_field: str) -> Problem | None:
    """The same, of a file that was read already."""
    try:
        tree = ast.parse(source, filename=path)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f"line {line} of {path}" if line else path
        return Problem(f"{field}.path", f"syntax error in {place}: {getattr(error, 'msg', error)}", "Mend the file")
    names = _names(tree)
    if names is None or name.split(".")[0] in names:
        return None
    there = ", ".join(sorted(n for n in names if not n.startswith("_"))) or "nothing"
    return Problem(f"{field}.{name_field}", f"{path} has no {name!r}", f"It has: {there}")


def _names(tree: ast.Module) -> set[str] | None:
    """What the module's top level binds; None when that cannot be known (``import *``, names bound in a block)."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            case ast.Assign():
                names |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                return None
    return None if "*" in names else names
