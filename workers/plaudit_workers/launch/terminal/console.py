"""Print what a run does: a line for each step as ``steps.jsonl`` grows, a summary with the ledger at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from plaudit_metrics.sources.history import read_steps
from plaudit_metrics.statistics.validation import validation_rewards

_COLUMNS = (
    ("step", "step", 6, "{:.0f}"),
    ("reward", "reward/mean", 8, "{:.3f}"),
    ("no score", "reward_pipeline/masked_share", 10, "{:.0%}"),
    ("staleness", "reward_pipeline/staleness/mean", 10, "{:.2f}"),
    ("step s", "step_s", 8, "{:.2f}"),
    ("exposed reward s", "exposed_reward_s", 17, "{:.2f}"),
)


class StepLines:
    """Print each newly closed step once.

    Args:
        steps_file: ``steps.jsonl`` of the run; only lines added from now on are printed.
        as_json: print the lines of ``steps.jsonl`` as they are, for programs, instead of a table.
    """

    def __init__(self, steps_file: Path, console: Console, *, as_json: bool = False) -> None:
        self._file = steps_file
        self._console = console
        self._as_json = as_json
        self._offset = steps_file.stat().st_size if steps_file.exists() else 0
        self._header_printed = False
        self.closed = 0
        """Steps closed since this object was made."""

    def print_new(self) -> None:
        """Print what was added to the file since the last call; a torn last line waits for its rest."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self.closed += 1
                self._print(line)

    def _print(self, line: bytes) -> None:
        step = json.loads(line)
        if self._as_json:
            print(line.decode().strip(), flush=True)
            return
        if step["num_samples"]:  # step 0 is the validation before any training
            self._print_row(step)
        if line_of_rewards := _validation_line(step):
            self._console.out(line_of_rewards, highlight=False)

    def _print_row(self, step: dict[str, Any]) -> None:
        if not self._header_printed:
            self._header_printed = True
            header = "".join(title.rjust(width) for title, _, width, _ in _COLUMNS)
            self._console.out(header + "  waited for", style="bold", highlight=False)
        cells = (_cell(step.get(key), width, form) for _, key, width, form in _COLUMNS)
        self._console.out("".join(cells) + f"  {step.get('verdict', '')}", highlight=False)


def _validation_line(step: dict[str, Any]) -> str | None:
    """Format the mean validation reward of each data source; None for a step without validation."""
    rewards = validation_rewards(step)
    if not rewards:
        return None
    means = ", ".join(f"{source} {reward:.3f}" for source, reward in sorted(rewards.items()))
    return f"{step['step']:6.0f}  validation reward: {means}"


def _cell(value: float | None, width: int, form: str) -> str:
    return ("-" if value is None else form.format(value)).rjust(width)


def print_summary(console: Console, folder: Path, *, restarts: dict[str, int]) -> None:
    """Print the first and last rewards of the run, its ledger and the restarts of its processes."""
    steps = read_steps(folder / "steps.jsonl")
    rewards = [step.statistics["reward/mean"] for step in steps if "reward/mean" in step.statistics]
    if rewards:
        last = rewards[-10:]
        console.out(
            f"mean reward: {rewards[0]:.3f} at the first step, {sum(last) / len(last):.3f} over the last {len(last)}",
            highlight=False,
        )
    ledger_file = folder / "ledger.json"
    if ledger_file.exists():
        ledger = json.loads(ledger_file.read_text())
        counts = ", ".join(f"{name} {count}" for name, count in sorted(ledger.items()) if isinstance(count, int))
        console.out(f"ledger (groups): {counts}", highlight=False)
    if restarts:
        console.out("restarted: " + ", ".join(f"{name} {n}x" for name, n in restarts.items()), highlight=False)
    console.out(f"run folder: {folder}", highlight=False)
