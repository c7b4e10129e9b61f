"""How product code is cut into files and folders (CONTRIBUTING)."""

from __future__ import annotations

from collections import Counter
from statistics import median

from product_modules import importers, modules

MOST_FILES = 340
LEAST_MEDIAN_LINES = 120
LEAST_MODULES = 4
"""Of a folder; below that it is a file. A folder that holds folders only has none of its own."""
LEAST_LINES = 80
"""Of a module that one neighbour imports and nothing else; below that it belongs into the neighbour."""

SMALL_FOLDERS: dict[str, str] = {}
"""Folders with fewer modules, and why."""


def test_there_are_few_files_and_they_are_not_small():
    lines = [module.lines for module in modules().values()]
    assert len(lines) <= MOST_FILES
    assert median(lines) >= LEAST_MEDIAN_LINES


def test_a_folder_holds_several_modules():
    number = Counter(module.folder for module in modules().values() if not module.is_front)
    small = {folder for folder, count in number.items() if count < LEAST_MODULES}
    assert small - SMALL_FOLDERS.keys() == set()
    assert SMALL_FOLDERS.keys() - small == set(), "these need no reason any more"


def test_a_small_module_has_more_than_one_neighbour_to_serve():
    lonely = {
        module.shown: others
        for module in modules().values()
        if not module.is_front and module.lines < LEAST_LINES
        for others in [importers()[module.name]]
        if len(others) == 1 and all(modules()[other].folder == module.folder for other in others)
    }
    assert lonely == {}
