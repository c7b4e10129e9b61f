"""A public class name stands for one thing (CONTRIBUTING)."""

from __future__ import annotations

import ast
from collections import defaultdict

from product_modules import modules

TWINS = {"RewardClient", "SyncRewardClient"}
"""The same interface over HTTP and over Redis."""


def test_no_two_public_classes_have_one_name():
    places = defaultdict(list)
    for module in modules().values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.shown)
    several = {name: files for name, files in places.items() if len(files) > 1}
    assert {name: files for name, files in several.items() if name not in TWINS} == {}
    assert several.keys() == TWINS
