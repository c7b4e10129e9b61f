"""The modules of every distribution, and which of them import which."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Import:
    """One name that a module imports."""

    source: str
    """The module as written: of ``from a.b import c`` it is ``a.b``, of ``import a.b`` too."""
    name: str
    """The name taken from it; empty for ``import a.b``."""
    bound: str
    """The name under which the importing module has it."""
    runs_at_import: bool
    """It is neither inside a function nor for type checkers only."""


class Module:
    """A file of a distribution."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    @property
    def shown(self) -> str:
        """The path below the root."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def is_front(self) -> bool:
        """It is the ``__init__`` of a package."""
        return self.path.name == "__init__.py"

    @property
    def folder(self) -> str:
        return self.path.parent.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of a product's name, in functions too."""
        found = (each for node, at_import in _imports(self.tree, True) for each in self._described(node, at_import))
        return [each for each in found if each.source.startswith("plaudit_")]

    def _described(self, node: ast.Import | ast.ImportFrom, at_import: bool) -> Iterator[Import]:
        for alias in node.names:
            if isinstance(node, ast.Import):
                yield Import(alias.name, "", alias.asname or alias.name, at_import)
                continue
            source = node.module or ""
            if node.level:
                package = self.name if self.is_front else self.name.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*above, *([node.module] if node.module else [])])
            yield Import(source, alias.name, alias.asname or alias.name, at_import)


def distributions() -> list[Path]:
    """Every top folder that holds a ``pyproject.toml`` and a package of ours."""
    return sorted(
        file.parent
        for file in ROOT.glob("*/pyproject.toml")
        if any(folder.is_dir() for folder in file.parent.glob("plaudit_*"))
    )


@cache
def modules() -> Mapping[str, Module]:
    """Every module by its dotted name; a package's front by that of the package."""
    found = {}
    for part in distributions():
        for path in sorted(part.glob("plaudit_*/**/*.py")):
            way = path.relative_to(part).with_suffix("").parts
            name = ".".join(way[:-1] if way[-1] == "__init__" else way)
            found[name] = Module(name, path)
    return found


def target(imported: Import) -> str:
    """The module that an import loads: of ``from a import b`` the module ``a.b`` if there is one, else ``a``."""
    inner = f"{imported.source}.{imported.name}"
    return inner if imported.name and inner in modules() else imported.source


@cache
def importers() -> Mapping[str, set[str]]:
    """The modules that import each module, at whatever time."""
    found: dict[str, set[str]] = {name: set() for name in modules()}
    for module in modules().values():
        for imported in module.imports:
            if target(imported) in found and target(imported) != module.name:
                found[target(imported)].add(module.name)
    return found


def _imports(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield the imports below a node, each with whether it runs when the module is imported."""
    for child in _blocks(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_import
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports(child, False)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for each in child.body:
                yield from _imports(ast.Module([each], []), False)
            for each in child.orelse:
                yield from _imports(ast.Module([each], []), at_import)
        else:
            yield from _imports(child, at_import)


def _blocks(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements, handlers and cases right below a node; expressions, most of a file, import nothing."""
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        inner = getattr(node, field, [])
        yield from inner if isinstance(inner, list) else []
