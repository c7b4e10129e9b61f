"""``plaudit steps``, ``plaudit trace`` and ``plaudit report``: read a run's folder, without a running service.

Each command returns its exit code: 0, or 2 after one message on standard error; an ``OSError`` is left to ``plaudit``,
which names the file and the remedy for every command. What reads a run (numpy, pyarrow) is
imported when a command runs: ``plaudit --help`` imports this module for the arguments.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from plaudit_wire.printable import printable
from plaudit_wire.records import StepRecord

_REFUSED = 2
STEP_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("step", "step", "{:.0f}"),
    ("reward", "reward/mean", "{:z.3f}"),
    ("staleness", "reward_pipeline/staleness/mean", "{:.2f}"),
    ("step s", "step_s", "{:.2f}"),
    ("wait s", "trainer_wait_s", "{:.2f}"),
    ("exposed reward s", "exposed_reward_s", "{:.2f}"),
    ("no score", "reward_pipeline/masked_share", "{:.1%}"),
    ("waited for", "verdict", "{}"),
)
"""Heading, key, format."""


class _UnknownRunError(Exception):
    """The run or the step does not exist; the message names the paths that were tried."""


def steps_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plaudit steps``."""
    _run_arguments(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="every figure, as a JSON array")
    form.add_argument("--csv", action="store_true", help="every figure, as CSV")


def trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plaudit trace``."""
    _run_arguments(parser)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="number of the step")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: <run>-step-<N>.json")


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plaudit report``."""
    _run_arguments(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: <run>.html")


def top_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plaudit top``."""
    parser.add_argument("run", type=str, metavar="RUN", nargs="?", help="id of the run, or its folder (or use --url)")
    parser.add_argument("--url", help="address of the run's metrics service")
    parser.add_argument("--runs-folder", type=str, default="runs", metavar="FOLDER", help="of all runs (default: runs)")
    every = number("number of seconds up to 86400", 1e-3, 86_400)
    parser.add_argument("--every", type=every, default=1.0, metavar="SECONDS", help="refresh interval (default: 1)")


def number(what: str, least: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """Return a reader of finite numbers from ``least`` to ``most``, for an argument; any other is no ``what``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r:.80} is no {what}")
        return value

    return read


def steps(arguments: argparse.Namespace) -> int:
    """Run ``plaudit steps RUN``: print a table of the closed steps, or all of their figures."""
    return _exit_code(lambda: _write_steps(_steps_of(_folder(arguments)), arguments, sys.stdout))


def trace(arguments: argparse.Namespace) -> int:
    """Run ``plaudit trace RUN --step N``: write the step's timeline for ui.perfetto.dev."""
    return _exit_code(lambda: _write_trace(_folder(arguments), arguments))


def report(arguments: argparse.Namespace) -> int:
    """Run ``plaudit report RUN``: write one HTML file with the run's charts, steps and verdicts."""
    return _exit_code(lambda: _write_report(_folder(arguments, steps=False), arguments))


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=str, metavar="RUN", help="id of the run, or its folder")
    parser.add_argument("--runs-folder", type=str, default="runs", metavar="FOLDER", help="of all runs (default: runs)")


def _exit_code(work: Callable[[], None]) -> int:
    from plaudit_metrics.sources.samples import UnreadableFileError

    try:
        work()
    except (_UnknownRunError, UnreadableFileError) as error:
        sys.stderr.write(printable(f"{error}", keep="\n") + "\n")
        return _REFUSED
    return 0


def _folder(arguments: argparse.Namespace, *, steps: bool = True) -> Path:
    """Return the run's folder, which has closed steps unless a run without ``steps`` will do."""
    from plaudit_metrics.sources.steps import ENDING_FILE, FILE_NAME

    files = [FILE_NAME] if steps else [FILE_NAME, ENDING_FILE, "job.yaml"]
    for folder in (Path(arguments.runs_folder) / arguments.run, Path(arguments.run)):
        if any((folder / name).exists() for name in files):
            return folder
    raise _UnknownRunError(
        f"no run {arguments.run!r} with closed steps: neither {arguments.runs_folder}/{arguments.run} nor "
        f"{arguments.run} contains {FILE_NAME}. Give the path of the run's folder, or --runs-folder"
    )


def _steps_of(folder: Path) -> list[StepRecord]:
    from plaudit_metrics.sources.steps import FILE_NAME, read_steps

    return read_steps(folder / FILE_NAME)


def _write_steps(records: Sequence[StepRecord], arguments: argparse.Namespace, output: TextIO) -> None:
    from plaudit_metrics.sources.steps import flat_step
    from plaudit_metrics.statistics.columns import failures_of

    rows = [{key: value for key, value in flat_step(record).items() if key != "waits"} for record in records]
    if arguments.json:
        json.dump(rows, output, indent=1)
        output.write("\n")
    elif arguments.csv:
        writer = csv.DictWriter(output, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    else:
        output.write(_table(rows))
        failures = failures_of(rows[-1]) if rows else ()
        output.writelines(printable(f"{scorer}: {text}") + "\n" for scorer, text in failures)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [[heading for heading, _, _ in STEP_COLUMNS]]
    cells += [
        [printable(form.format(row[key])) if key in row else "-" for _, key, form in STEP_COLUMNS] for row in rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(STEP_COLUMNS))]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "".join(f"{line}\n" for line in lines)


def _write_trace(folder: Path, arguments: argparse.Namespace) -> None:
    import msgspec

    from plaudit_metrics.service.trace import chrome_trace
    from plaudit_metrics.sources.sample_schema import FOLDER, samples_file
    from plaudit_metrics.sources.samples import read_step_samples

    record = next((each for each in _steps_of(folder) if each.step == arguments.step), None)
    if record is None:
        raise _UnknownRunError(f"the run in {folder} has no closed step {arguments.step}")
    file = samples_file(folder / FOLDER, record.step, record.incarnation)
    if not file.exists():
        raise _UnknownRunError(
            f"no samples of step {record.step} are stored: there is no {file}. A run stores them unless "
            "metrics.keepSamples is false"
        )
    stored = read_step_samples(folder, record.step, record.incarnation)
    output = arguments.output = arguments.output or Path(f"{folder.resolve().name}-step-{record.step}.json")
    output.write_bytes(msgspec.json.encode(chrome_trace(record, stored.samples, stored.groups)))
    sys.stdout.write(f"{output}: {len(stored.samples)} samples; open it at https://ui.perfetto.dev\n")


def _write_report(folder: Path, arguments: argparse.Namespace) -> None:
    from plaudit_metrics.terminal.report import report as html

    run = folder.resolve().name
    output = arguments.output = arguments.output or Path(f"{run}.html")
    output.write_text(html(folder, run), encoding="utf-8")
    sys.stdout.write(f"{output}: {output.stat().st_size / 1e6:.1f} MB; open it in a browser\n")
