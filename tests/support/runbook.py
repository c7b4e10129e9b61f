"""The runbook as a reader walks through it: the first command of an alert's entry, run on a broken run."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from plaudit_metrics.monitoring.rules import RUNBOOK

TEXT = (Path(__file__).parents[2] / RUNBOOK).read_text()
SECTIONS = {part.partition("\n")[0]: part for part in TEXT.split("\n## ")[1:]}
"""The entry of each alert."""

_COMMANDS = r"`((?:curl|kubectl|plaudit|redis-cli) [^`]*)`"


def commands(alert: str) -> list[str]:
    """Return the commands of an entry's **Look**, in their order, each on one line."""
    look = SECTIONS[alert].partition("**Look**")[2].partition("**Do**")[0]
    return [" ".join(found.split()) for found in re.findall(_COMMANDS, look)]


def first_command(alert: str, beginning: str = "") -> str:
    """Return the first command of an entry that begins so."""
    return next(command for command in commands(alert) if command.startswith(beginning))


def answer(
    alert: str, program: str = "", folder: Path | None = None, environment: Mapping[str, str] = {}, **values: str
) -> str:
    """Run the first command of an entry; return what it prints.

    Args:
        alert: name of the alert.
        program: of several commands the first one of this program.
        folder: where it runs.
        environment: variables besides those of this process.
        **values: of the placeholders: ``RUN`` (the address), and of those in angle brackets such as ``n`` and ``job``.
    """
    command = first_command(alert, program)
    for name, value in values.items():
        command = command.replace(f"${name}", value).replace(f"<{name}>", value)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | environment,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout
