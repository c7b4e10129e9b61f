"""How product code is cut into files and folders (CONTRIBUTING)."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from statistics import median

import pytest

from product_modules import ROOT, Module, importers, modules

MOST_MODULES = 340
LEAST_MEDIAN_LINES = 180
"""Both without the packages' fronts: most of them only mark a folder as a package, and are empty."""
MOST_LINES = 700
MOST_OF_A_SAMPLE = 48
"""Files that execute between a sample's prompt and its update."""
LEAST_MODULES = 4
"""Of a folder; below that it is a file. A folder that holds folders only has none of its own."""
LEAST_LINES = 80
"""Of a module that one neighbour imports and nothing else; below that it belongs into the neighbour."""

SMALL_FOLDERS = {
    "client/plaudit_client": "a library: the client, its blocking twin and their results, beside the adapters",
    "metrics/plaudit_metrics": "two programs; everything else is in a room",
}
"""Folders with fewer modules, and why."""

NAMED_BY_OTHERS = {
    "client/plaudit_client/adapters/verl.py": "verl's configuration names it: pkg://plaudit_client.adapters.verl",
}
"""Small modules that one neighbour imports and people name outside of Python, and where. So are modules run by name."""


def test_there_are_few_files_and_they_are_not_small():
    lines = [module.lines for module in modules().values() if not module.is_front]
    assert len(lines) <= MOST_MODULES
    assert median(lines) >= LEAST_MEDIAN_LINES


def test_no_file_is_too_long_to_read_at_once():
    assert {module.shown: module.lines for module in modules().values() if module.lines > MOST_LINES} == {}


@pytest.mark.long
def test_the_way_of_a_sample_leads_through_few_files():
    command = [sys.executable, ROOT / "tests" / "support" / "sample_way.py"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    assert int(shown.split()[0]) <= MOST_OF_A_SAMPLE, shown


def test_a_folder_holds_several_modules():
    number = Counter(module.folder for module in modules().values() if not module.is_front)
    small = {folder for folder, count in number.items() if count < LEAST_MODULES}
    assert small - SMALL_FOLDERS.keys() == set()
    assert SMALL_FOLDERS.keys() - small == set(), "these need no reason any more"


def test_a_small_module_has_more_than_one_neighbour_to_serve():
    lonely = {module.shown: module for module in modules().values() if serves_one_neighbour(module)}
    others = {name for name, module in lonely.items() if not runs_by_name(module)}
    assert others - NAMED_BY_OTHERS.keys() == set()
    assert NAMED_BY_OTHERS.keys() - lonely.keys() == set(), "these need no reason any more"


def serves_one_neighbour(module: Module) -> bool:
    others = importers()[module.name]
    small = not module.is_front and module.lines < LEAST_LINES
    return small and len(others) == 1 and all(modules()[other].folder == module.folder for other in others)


def runs_by_name(module: Module) -> bool:
    """It is a program: ``python -m`` runs it."""
    return '\nif __name__ == "__main__":\n' in module.text
