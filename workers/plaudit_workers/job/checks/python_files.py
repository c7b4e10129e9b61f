"""Check a Python file that a job names, without running it."""

from __future__ import annotations

import ast
from pathlib import Path

from plaudit_workers.job.problem import Problem


def python_problem(field: str, path: str, name: str, name_field: str) -> Problem | None:
    """Return the problem of a file, or of the function or class that the job expects in it, or None.

    Args:
        name: function or class; only the first part of a dotted name is looked up.
    """
    try:
        source = Path(path).read_bytes()
    except FileNotFoundError:
        return Problem(f"{field}.path", f"there is no file {path}", "Correct the path: it is relative to the job file")
    except OSError as error:
        return Problem(f"{field}.path", f"cannot read {path}: {error.strerror}", "Name a Python file")
    return source_problem(field, path, source, name, name_field)


def source_problem(field: str, path: str, source: bytes, name: str, name_field: str) -> Problem | None:
    """Return the same for a file that was already read."""
    try:
        tree = ast.parse(source, filename=path)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f"line {line} of {path}" if line else path
        return Problem(f"{field}.path", f"syntax error in {place}: {getattr(error, 'msg', error)}", "Fix the file")
    names = _names(tree)
    if names is None or name.split(".")[0] in names:
        return None
    defined = ", ".join(sorted(n for n in names if not n.startswith("_"))) or "nothing"
    return Problem(f"{field}.{name_field}", f"{path} does not define {name!r}", f"It defines: {defined}")


def _names(tree: ast.Module) -> set[str] | None:
    """Return the names that the module's top level binds; None if unknown (``import *``, names bound in a block)."""
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
