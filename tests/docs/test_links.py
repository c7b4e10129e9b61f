"""Every link between the project's own pages leads somewhere."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pages
import pytest

from plaudit_metrics.statistics.verdict import VERDICTS


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


def test_pages_name_modules_and_names_of_ours_that_exist():
    today = (page for page in pages.PAGES if page.name != "CHANGELOG.md")
    named = {words for page in today for words in pages.code(page)}
    paths = {path for words in named for path in re.findall(r"\bplaudit_\w+(?:/[\w.-]+)+", words)}
    dotted = {name for words in named for name in re.findall(r"\bplaudit_\w+(?:\.\w+)+(?!/)", words)}
    assert len(paths) > 3
    assert [path for path in paths if not any(pages.ROOT.glob(f"*/{path}"))] == []
    assert len(dotted) > 5
    for name in dotted:
        pkgutil.resolve_name(name)


def test_the_page_on_choosing_reads_the_verdicts_that_a_run_prints():
    _, _, schedules = pages.text(pages.ROOT / "docs" / "choosing.md").partition("## Which schedule?")
    read = {found[1] for line in schedules.splitlines() if (found := re.match(r"\| `([\w-]+)`", line))}
    assert len(read) > 3
    assert read <= {*VERDICTS}
