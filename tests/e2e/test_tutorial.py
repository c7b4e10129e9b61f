"""The tutorial as its reader follows it: each file saved, each command run, in the page's order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plaudit_metrics.sources.steps import read_steps

ROOT = Path(__file__).parents[2]
PLAUDIT = [sys.executable, "-m", "plaudit_workers.cli"]
_BLOCK = re.compile(
    r"`([a-z]+\.(?:py|yaml))`[^`]*(?:`[^`\n]+`[^`]*)*?```(?:python|yaml)\n(.*?)^```|```sh\n(.*?)^```", re.M | re.S
)

pytestmark = pytest.mark.timeout(600)


def actions(page: str) -> Iterator[tuple[str, str]]:
    """The files to save, with their text, and the command lines, under an empty name."""
    for block in _BLOCK.finditer(page):
        if block[1]:
            yield block[1], block[2]
        else:
            yield from (("", line) for line in block[3].splitlines())


def test_a_reader_of_the_tutorial_finds_the_hole_mends_it_and_trains(example: Callable[[str], Path]) -> None:
    folder = example("01-copy-digits").parents[1] / "tutorial"
    folder.mkdir()
    done: dict[str, list[subprocess.CompletedProcess[str]]] = {}
    commands = []
    for name, text in actions((ROOT / "docs" / "tutorial.md").read_text()):
        if name:
            (folder / name).write_text(text)
            continue
        commands.append(text)
        words = shlex.split(text)
        if words[0] == "plaudit":
            ended = subprocess.run([*PLAUDIT, *words[1:]], cwd=folder, capture_output=True, text=True, check=False)
            done.setdefault(words[1], []).append(ended)
        elif text == "python data.py":
            subprocess.run([sys.executable, "data.py"], cwd=folder, check=True)
    assert commands[:4] == [
        "make install",
        'export PATH="$PWD/.venv/bin:$PATH"',
        "python examples/01-copy-digits/prepare.py",
        "mkdir -p tutorial && cd tutorial",
    ]
    assert {path.name for path in folder.glob("*.*")} >= {"data.py", "job.yaml", "probes.py", "reward.py"}
    codes = {name: [each.returncode for each in ended] for name, ended in done.items()}
    wanted = {"validate": [0], "try": [0], "probe": [3, 0], "run": [0], "samples": [0], "audit": [0], "report": [0]}
    assert codes == wanted, done
    assert "ZeroDivisionError: division by zero" in done["try"][0].stdout
    assert "one_digit" in done["probe"][0].stdout
    assert (folder / "first-digit.html").exists()
    rewards = [step.statistics["reward/mean"] for step in read_steps(folder / "runs" / "first-digit" / "steps.jsonl")]
    assert len(rewards) == 60
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.3
