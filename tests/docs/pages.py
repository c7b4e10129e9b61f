"""The project's pages, and what stands in them: links, command lines, YAML, names of fields and values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "docs" / "kubernetes"
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/*/README.md", "charts/**/*.md", "metrics/*.md", "tests/**/*.md")
    for page in ROOT.glob(pattern)
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_PROGRAMS = ("kubectl", "helm", "plaudit", "make")
_ENDS = {"|", "||", "&&", ";", ">", ">>", "&"}


@dataclass(frozen=True)
class Command:
    """A command line of a page."""

    page: str
    words: tuple[str, ...]
    whole: bool = True
    """Whether it can be typed as it stands; in running text a command is often only named."""

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def name(page: Path) -> str:
    """A page's path as a person says it."""
    return page.relative_to(ROOT).as_posix()


def text(page: Path) -> str:
    """What stands on a page."""
    return page.read_text(encoding="utf-8")


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Target and anchor of every link that stays in the project."""
    for link in _LINK.findall(_FENCE.sub("", text(page))):
        if not re.match(r"[a-z]+:", link):
            target, _, anchor = link.partition("#")
            yield target, anchor


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = _HEADING.findall(_FENCE.sub("", text(page)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of some languages; "" is a block that names none."""
    return [block for language, block in _FENCE.findall(text(page)) if language in languages]


def code(page: Path) -> list[str]:
    """What stands between backticks in running text."""
    return _CODE.findall(_FENCE.sub("", text(page)))


def commands(page: Path) -> Iterator[Command]:
    """Every line that runs kubectl, helm, plaudit or make, out of blocks and running text; each part of a pipe."""
    lines = [line for block in blocks(page, "", "sh", "bash") for line in block.replace("\\\n", " ").splitlines()]
    named = [words for words in code(page) if words.partition(" ")[0] in _PROGRAMS and " " in words]
    for line, whole in [*((line, True) for line in lines), *((words, False) for words in named)]:
        for words in _parts(line):
            program = words[0].rpartition("/")[2]
            if program in _PROGRAMS:
                yield Command(name(page), (program, *words[1:]), whole)


def _parts(line: str) -> Iterator[list[str]]:
    line = re.sub(r"<(\w[\w-]*)>", r"\1", line)  # a placeholder
    lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars="|&;><()")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        return  # a table or an output, not a command
    part: list[str] = []
    for word in words:
        if word in _ENDS or word in ("$(", "(", ")", "$"):
            if part:
                yield part
            part = []
        elif part or "=" not in word:  # variables before a program are not it
            part.append(word)
    if part:
        yield part
