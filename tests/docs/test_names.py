"""A public class name stands for one thing, and a log message for one event (CONTRIBUTING)."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from product_modules import modules

TWINS = {"RewardClient"}
"""The same interface over HTTP and over Redis."""
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def files() -> Iterator[tuple[str, ast.Module]]:
    for module in modules().values():
        yield module.shown, module.tree


def test_no_two_public_classes_have_one_name():
    places = defaultdict(list)
    for file, tree in files():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(file)
    several = {name: files for name, files in places.items() if len(files) > 1}
    assert {name: files for name, files in several.items() if name not in TWINS} == {}
    assert several.keys() == TWINS


def test_a_log_message_is_constant_and_what_varies_is_a_field():
    """``get_logger``'s methods format nothing: what stood for ``%s`` would be lost."""
    calls = {
        f"{file}:{call.lineno}": call.args for file, tree in files() for call in ast.walk(tree) if is_logging(call)
    }
    assert len(calls) > 100
    assert [place for place, given in calls.items() if len(given) != 1 or isinstance(given[0], ast.JoinedStr)] == []


def is_logging(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="logger"), attr=level)):
            return level in LEVELS
    return False
