"""Every link between the project's own pages leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pages
import pytest


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_links_lead_to_files_and_headings(page: Path):
    for target, anchor in pages.links(page):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            assert anchor in pages.anchors(there), f"{target}#{anchor}"


def test_every_page_of_kubernetes_is_in_its_index():
    index = {target for target, _ in pages.links(pages.KUBERNETES / "README.md")}
    assert {page.name for page in pages.KUBERNETES.glob("*.md")} - {"README.md"} <= index


def test_contributing_names_files_that_exist():
    named = re.findall(r"`([\w./-]+/[\w./-]+)`", (pages.ROOT / "CONTRIBUTING.md").read_text())
    packages = {part.name: part for part in pages.ROOT.glob("*/plaudit_*")}
    missing = []
    for name in named:
        part, _, rest = name.partition("/")
        package = packages.get(f"plaudit_{part}")
        places = [
            pages.ROOT / name,
            pages.ROOT / "workers" / "plaudit_workers" / name,
            *([package / rest] if package else []),
        ]
        if not any(place.exists() for place in places):
            missing.append(name)
    assert len(named) > 20
    assert missing == []
