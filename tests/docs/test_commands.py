"""Every command line that a page shows can be typed: the program knows its command and its options.

kubectl and helm are asked themselves, where they are installed or built by tests/cluster.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import shutil
import subprocess
from collections.abc import Sequence

import pages
import pytest

from plaudit_operator import plugin
from plaudit_workers import cli

COMMANDS = sorted(
    {command for page in pages.PAGES for command in pages.commands(page)},
    key=lambda command: (str(command), command.whole),
)
_OPTION = re.compile(r"(?<![\w-])(--?[a-z][a-z-]*)")
_BARE = {"plaudit", "python", "python3", "pip", "pytest"}
_PLACEHOLDER = {"N": "1", "1,2": "1"}


def of(program: str) -> list[pages.Command]:
    return [command for command in COMMANDS if command.words[0] == program and len(command.words) > 1]


@pytest.mark.alike
@pytest.mark.parametrize("command", of("plaudit"), ids=str)
def test_plaudit_knows_the_command(command: pages.Command, capsys: pytest.CaptureFixture[str]):
    words = [_PLACEHOLDER.get(word, word) for word in command.words[1:] if word != "…"]
    parses, said = _parses(cli._parser(), words), capsys.readouterr().err
    assert parses or (not command.whole and "arguments are required" in said), said


@pytest.mark.parametrize("command", [c for c in of("kubectl") if c.words[1] == "plaudit"], ids=str)
def test_the_plugin_knows_the_command(command: pages.Command, capsys: pytest.CaptureFixture[str]):
    words = command.words[2:]
    parses, said = _parses(plugin._parser(), words), capsys.readouterr().err
    assert parses or (not command.whole and "arguments are required" in said), said


def test_readmes_can_be_pasted_into_a_shell_without_an_environment():
    """From the root of a checkout: our programs and Python by their path, and packages into an environment of ours."""
    readmes = [pages.ROOT / "README.md", *sorted(pages.ROOT.glob("examples/*/README.md"))]
    lines = [line for page in readmes for block in pages.blocks(page, "", "sh", "bash") for line in block.splitlines()]
    assert [line for line in lines if line.split(" ")[0] in _BARE] == []


def test_who_begins_reads_how_pages_find_plaudit():
    """Pages write the bare command, because jobs lie in folders of their readers: the first ones set PATH before it."""
    put = 'export PATH="$PWD/.venv/bin:$PATH"'
    assert f"`{put}`" in pages.text(pages.ROOT / "README.md")
    tutorial = [line for block in pages.blocks(pages.ROOT / "docs/tutorial.md", "sh") for line in block.splitlines()]
    assert tutorial.index(put) < next(n for n, line in enumerate(tutorial) if line.split(" ")[0] in _BARE)


def _parses(parser: argparse.ArgumentParser, words: Sequence[str]) -> bool:
    try:
        parser.parse_args(words)
    except SystemExit as ended:
        return ended.code == 0
    return True


@pytest.mark.parametrize("command", of("make"), ids=str)
def test_the_makefile_has_the_target(command: pages.Command):
    targets = re.findall(r"^([a-z0-9-]+):", (pages.ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in command.words[1:]:
        assert word in targets or "=" in word, word


@pytest.mark.alike
@pytest.mark.parametrize("command", [c for p in ("kubectl", "helm") for c in of(p) if c.words[1] != "plaudit"], ids=str)
def test_kubectl_and_helm_know_the_options(command: pages.Command, path_with_cluster: str):
    program = shutil.which(command.words[0], path=path_with_cluster)
    if program is None:
        pytest.skip(f"{command.words[0]} is not installed")
    verbs = _verbs(program, command.words[1:])
    known = _options(program, verbs)
    for word in itertools.takewhile(lambda word: word != "--", command.words[1:]):
        if word.startswith("-") and word != "-":
            assert word.partition("=")[0] in known, f"{' '.join(verbs)} has no {word}"


def _verbs(program: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """The command and, where it has commands of its own, that one too; a namespace may stand before it."""
    plain = [word for before, word in zip(("", *words), words, strict=False) if not {word[0], before} & {"-", "-n"}]
    first = plain[0]
    assert _help(program, first), f"{program} has no {first}"
    nested = first in ("create", "rollout", "set", "config") and _help(program, *plain[:3])
    return tuple(plain[:3]) if nested else (first,)


def _options(program: str, verbs: tuple[str, ...]) -> set[str]:
    general = _help(program, "options") if program.endswith("kubectl") else ""
    return set(_OPTION.findall(_help(program, *verbs) + general))


@functools.cache
def _help(program: str, *verbs: str) -> str:
    words = [program, *verbs] if verbs == ("options",) else [program, *verbs, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout if done.returncode == 0 else ""
