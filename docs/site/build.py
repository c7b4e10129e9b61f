"""Build the documentation site from the project's Markdown pages, each at the place where it stands.

    python docs/site/build.py dist/docs     # dist/docs/<version>/, beside the versions that are there already
    python docs/site/build.py --check       # every page is in the navigation, every link and anchor leads somewhere

The pages are written for a reader of the repository. What the site cannot serve (folders, sources) keeps its text and
loses its link.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
SETTINGS = Path(__file__).with_name("mkdocs.yml")
_PAGES = ("*.md", "docs/**/*.md", "examples/*/README.md", "metrics/*.md")
_SERVED = {".png", ".svg", ".yaml", ".j2", ".json"}
"""Files that a page may link to; they are copied."""
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^(?!\s*(?:[-*|]|\d+\. )).*\S\n(?=(?:- |\* |\d+\. |\| ))", re.MULTILINE)
"""A line of a paragraph before a list or a table; Python's Markdown wants an empty line between them."""
_BAR_IN_CODE = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
"""Code in a table's cell with an escaped bar, whose backslash Python's Markdown shows."""


def main(arguments: list[str]) -> int:
    """Build the site into the folder that is given, or check it; return the exit code."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch, "site")
        code = _build(Path(scratch), built)
        if code == 0 and arguments[0] != "--check":
            _publish(built, Path(arguments[0]))
    return code


def _build(scratch: Path, target: Path) -> int:
    staged = scratch / "pages"
    for page in _pages():
        _stage(page, staged)
    # The settings name no folder: INHERIT keeps them as they stand, with their tag for Python.
    own = scratch / "mkdocs.yml"
    own.write_text(
        yaml.safe_dump(
            {"INHERIT": str(SETTINGS), "docs_dir": str(staged), "site_dir": str(target), "copyright": _version()}
        )
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(own)]
    done = subprocess.run(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="", file=sys.stderr)
    return done.returncode


def _pages() -> Iterator[Path]:
    for pattern in _PAGES:
        yield from sorted(ROOT.glob(pattern))


def _stage(page: Path, staged: Path) -> None:
    """Write a page, and the files that it links to, where they stand in the repository."""
    parts = _FENCE.split(page.read_text(encoding="utf-8"))
    for number in range(0, len(parts), 2):  # the others are blocks of code
        text = _LINK.sub(lambda link: _link(link, page, staged), parts[number])
        text = _BLOCK.sub(lambda line: line[0] + "\n", text)
        parts[number] = _BAR_IN_CODE.sub(lambda code: _as_html(code[1]), text)
    target = staged / page.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(parts), encoding="utf-8")


def _as_html(code: str) -> str:
    bare = html.escape(code.replace(r"\|", "|"))
    return f"<code>{bare.replace('|', '&#124;')}</code>"


def _link(link: re.Match[str], page: Path, staged: Path) -> str:
    """Return a link as the site can follow it: to a page, to a copied file; else its text alone."""
    image, text, address = link.groups()
    name, hash_, anchor = address.partition("#")
    if not name or ":" in name:
        return link[0]
    file = (page.parent / name).resolve()
    if file.is_dir() and (file / "README.md") in set(_pages()):
        return f"[{text}]({name.rstrip('/')}/README.md{hash_}{anchor})"
    if file.suffix == ".md" and file in set(_pages()):
        return link[0]
    if file.is_file() and file.suffix in _SERVED:
        copy = staged / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        return link[0]
    return text if not image else link[0]


def _publish(built: Path, folder: Path) -> None:
    """Put a built version beside others; the selector of versions reads ``versions.json``, newest first."""
    version = _version()
    shutil.rmtree(folder / version, ignore_errors=True)
    shutil.copytree(built, folder / version)
    others = {path.parent.name for path in folder.glob("*/sitemap.xml")} | {
        path.parent.name for path in folder.glob("*/search")
    }
    newest = sorted(others, key=_order, reverse=True)
    entries = [{"version": each, "title": each, "aliases": ["latest"] if each == newest[0] else []} for each in newest]
    (folder / "versions.json").write_text(json.dumps(entries, indent=1) + "\n")
    (folder / "index.html").write_text(f'<!doctype html>\n<meta http-equiv="refresh" content="0; url={newest[0]}/">\n')
    print(f"{folder / version}: {sum(1 for _ in built.rglob('*.html'))} pages")


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _version() -> str:
    found = re.search(r'^VERSION = "(.+)"$', (ROOT / "wire/plaudit_wire/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
