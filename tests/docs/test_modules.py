"""Modules import each other without circles (CONTRIBUTING)."""

from __future__ import annotations

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import product_modules
from product_modules import Import, Module, modules, target


def test_every_distribution_is_found():
    packages = {name for name in modules() if "." not in name}
    assert {"plaudit_client", "plaudit_wire", "plaudit_metrics", "plaudit_reward", "plaudit_operator"} <= packages
    assert all(name.startswith("plaudit_") for name in modules())


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
    assert set(circle()) == {"plaudit_x.a", "plaudit_x.b", "plaudit_x.c"}


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
