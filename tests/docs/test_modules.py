"""A name has one home, and modules import each other without circles (CONTRIBUTING)."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import product_modules
from product_modules import Import, Module, modules, target

FRONTS = {
    "reward/plaudit_reward/errors.py": "users' functions import it: plaudit_reward.errors.InfrastructureError",
}
"""Modules besides the packages' own that import names for others, and why."""


def test_every_distribution_is_found():
    parts = {"client", "wire", "job", "metrics", "sandbox", "reward", "model_server", "workers", "operator"}
    assert {name for name in modules() if "." not in name} == {f"plaudit_{part}" for part in parts}


def test_no_module_passes_on_a_name_of_another():
    """Only a front does. What a module imports and does not use, it imports for others."""
    assert [each for module in modules().values() if not is_front(module) for each in passed_on(module)] == []
    assert {name for name in FRONTS if (product_modules.ROOT / name).exists()} == FRONTS.keys()


def test_every_name_is_imported_from_its_home():
    """From the module that defines it, or from a package's front."""
    own = {name: defined(module) for name, module in modules().items()}
    wrong = []
    for module in modules().values():
        for imported in module.imports:
            home = modules().get(imported.source)
            inner = target(imported) != imported.source
            if home is None or is_front(home) or inner or not imported.name or imported.name in own[home.name]:
                continue
            if imported.name in {each.bound for each in home.imports}:
                wrong.append(f"{module.shown}: {imported.name} from {imported.source}")
    assert wrong == []


def test_modules_do_not_import_in_a_circle():
    assert circle() == []


def test_what_these_tests_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each finding once, in modules that have it."""
    texts = {
        "front": ("__init__.py", "from plaudit_x.home import Thing\n__all__ = ['Thing']\n"),
        "home": ("home.py", "class Thing: ...\n"),
        "listed": ("listed.py", "from plaudit_x.home import Thing\n__all__ = ['Thing']\nprint(Thing)\n"),
        "unused": ("unused.py", "from plaudit_x.home import Thing as Other\n"),
        "quoted": ("quoted.py", "from plaudit_x.home import Thing\ndef f(x: 'Thing | None'): ...\n"),
        "a": ("a.py", "from plaudit_x.b import y\nx = y\n"),
        "b": ("b.py", "from plaudit_x import c\ny = c\n"),
        "c": ("c.py", "if True:\n    import plaudit_x.a\nprint(plaudit_x.a)\n"),
        "lazy": ("lazy.py", "def f():\n    from plaudit_x.typed import z\n    return z\n"),
        "typed": ("typed.py", "if TYPE_CHECKING:\n    from plaudit_x.lazy import f\nz: 'f' = 1\n"),
    }
    made = {}
    for key, (file, text) in texts.items():
        (tmp_path / file).write_text(text)
        name = "plaudit_x" if key == "front" else f"plaudit_x.{key}"
        made[name] = Module(name, tmp_path / file)
    monkeypatch.setattr(product_modules, "ROOT", tmp_path)
    monkeypatch.setattr(product_modules, "modules", lambda: made)
    found = {name: passed_on(module) for name, module in made.items()}
    assert {name for name, names in found.items() if names} == {"plaudit_x", "plaudit_x.listed", "plaudit_x.unused"}
    assert set(circle()) == {"plaudit_x.a", "plaudit_x.b", "plaudit_x.c"}


def is_front(module: Module) -> bool:
    return module.is_front or module.shown in FRONTS


def passed_on(module: Module) -> list[str]:
    """The names that a module imports from ours and lists in ``__all__``, or does not use."""
    listed, used = exported(module.tree), uses(module.tree)
    return [
        f"{module.shown}: {each.bound} from {each.source}"
        for each in module.imports
        if each.name and each.source != "__future__" and (each.bound in listed or each.bound not in used)
    ]


def exported(tree: ast.Module) -> set[str]:
    return {
        item.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for name in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(name, ast.Name) and name.id == "__all__" and node.value is not None
        for item in ast.walk(node.value)
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    }


def uses(tree: ast.Module) -> set[str]:
    """Every name that is read, in annotations within quotes too."""
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
        elif isinstance(node, ast.arg | ast.AnnAssign | ast.FunctionDef | ast.AsyncFunctionDef):
            annotation = node.returns if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else node.annotation
            for each in ast.walk(annotation) if annotation is not None else ():
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    used |= set(re.findall(r"\w+", each.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            used.add(node.value)  # Callable[["LossSpec"], …], cast("Scorer", …)
    return used


def defined(module: Module) -> set[str]:
    """Every name that a module binds at its top level, other than by an import."""
    names = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def circle() -> list[str]:
    """The modules of a circle of imports that run when a module is imported; empty if there is none."""
    graph: dict[str, set[str]] = defaultdict(set)
    for module in product_modules.modules().values():
        graph[module.name] |= {target_ for each in module.imports if (target_ := at_import(each)) != module.name}
    graph = {name: {each for each in others if each in graph} for name, others in graph.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [*error.args[1]]
    return []


def at_import(imported: Import) -> str:
    return target(imported) if imported.runs_at_import else ""
