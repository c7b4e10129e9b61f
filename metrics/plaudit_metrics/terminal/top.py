"""``plaudit top``: a live view of a run on a terminal.

It shows verdict, failures, steps, stages, queues, workers and slowest samples. ``frame`` lays out a ``RunOverview``,
which ``overview.py`` reads from the run, as rich draws it. Without a terminal one frame is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from plaudit_metrics.service.answers import REDIS_AWAY
from plaudit_metrics.statistics.columns import failures_of
from plaudit_metrics.statistics.stages import STAGES
from plaudit_metrics.terminal.commands import STEP_COLUMNS
from plaudit_metrics.terminal.overview import OverviewSource, RunOverview, UnknownRunError, begun, source_of
from plaudit_wire.errors import described
from plaudit_wire.printable import printable, shown
from plaudit_wire.records import OUTCOMES, PAUSE, REDIS, UNKNOWN

_REFUSED = 2
_LATE_S = 5.0
_STEPS = 10
_SAMPLES = 5
_BAR = 30
_NARROW = 120
"""Columns of a terminal below which only the most important columns are shown."""
_DRAWN = {
    "trainer": ("T", "green"),
    "generation": ("G", "blue"),
    "sandboxes": ("m", "bright_cyan"),
    "tools": ("o", "bright_blue"),
    "sample_queue": ("q", "yellow"),
    "limiter": ("L", "magenta"),
    "score": ("S", "red"),
    "group_scorer": ("g", "dark_orange"),
    "ready_queue": ("r", "cyan"),
    PAUSE: ("P", "bright_magenta"),
    REDIS: ("R", "bright_red"),
    UNKNOWN: ("?", "white"),
}
"""Part of a step's time → letter and colour that draw it: a bar can be read without colours."""


def top(arguments: argparse.Namespace) -> int:
    """Run ``plaudit top [RUN | --url URL]`` and return the exit code."""
    try:
        source = source_of(arguments.run, arguments.url, arguments.runs_folder)
        overview = source.read()
        console = Console()
        view = _view(overview, "", console)
    except UnknownRunError as error:
        sys.stderr.write(printable(str(error)) + "\n")
        return _REFUSED
    if console.is_terminal and sys.stdin.isatty():
        _draw(source, overview, console, max(arguments.every, 0.1))
    else:
        console.print(view)
    return 0


def _draw(source: OverviewSource, overview: RunOverview, console: Console, every_s: float) -> None:
    """Draw until ``q`` or Ctrl-C. While the service does not respond, the last overview stays, with a message."""
    screen = Live(_view(overview, "", console), console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), _single_keys(), screen:
        screen.refresh()
        reading, begun_s = begun(source.read), time.monotonic()  # keys are answered while a service is slow
        while not _quit_within(every_s):
            waited_s, trouble = time.monotonic() - begun_s, ""
            if reading.done():
                try:
                    read = reading.result()
                    view = _view(read, "", console)
                    overview = read
                except UnknownRunError as error:
                    trouble = str(error)
                reading, begun_s = begun(source.read), time.monotonic()
            elif waited_s > _LATE_S:
                trouble = f"the service has not responded for {waited_s:.0f} s"
            else:
                continue
            screen.update(_view(overview, trouble, console) if trouble else view, refresh=True)


def _view(overview: RunOverview, trouble: str, console: Console) -> RenderableType:
    """Return ``frame`` for a terminal. Raise ``UnknownRunError`` for what no metrics service sends."""
    try:
        view = frame(overview, trouble, console.width)
        console.render_lines(view)  # rich finds wrong values only when it draws
    except Exception as error:
        raise UnknownRunError(
            f"run {shown(overview.run)} cannot be shown: what was read is not of this version ({described(error)})"
        ) from error
    return view


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Deliver keys without Enter."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        mode = termios.tcgetattr(sys.stdin)
        mode[6][termios.VINTR] = b"\0"  # Ctrl-C is a key too: an interrupt can get lost in a callback
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, mode)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quit_within(seconds: float) -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    if not readable:
        return False
    keys = os.read(sys.stdin.fileno(), 64)  # past Python's buffer, which select does not see
    return not keys or any(key in keys for key in b"qQ\x03")


def frame(overview: RunOverview, trouble: str = "", width: int = _NARROW) -> RenderableType:
    """Return the whole view as one renderable, for a terminal of ``width`` columns.

    ``trouble`` is the reason that the overview is out of date.

    Names and texts come from users and their policies: control characters are replaced, and none is read as markup.
    """
    overview = RunOverview(*(_printable(getattr(overview, each.name)) for each in fields(overview)))
    parts: list[RenderableType] = [Text(printable(trouble), style="bold red")] if trouble else []
    parts.append(_verdict(overview, "when it last responded" if trouble else "now"))
    parts += _open_step_failures(overview.failures, "the service's start" if overview.service else "the newest step")
    if overview.service:
        parts.append(_scorers(overview.service))
    if overview.steps:
        parts += [_steps(overview.steps[-_STEPS:], wide=width >= _NARROW), _last_step(overview.steps[-1])]
    if overview.streams:
        parts.append(_queues(overview))
    if overview.workers:
        parts.append(_workers(overview.workers))
    if overview.samples:
        parts.append(_samples(overview.samples[:_SAMPLES], wide=width >= _NARROW))
    return Group(*parts)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list | tuple) else value


def _verdict(overview: RunOverview, when: str) -> RenderableType:
    text = Text()
    if overview.ended:
        text.append(f"{overview.ended}\n", style="bold")
    if overview.open:
        away = overview.open["waits_for"] == REDIS_AWAY
        text.append(f"{when}: {overview.open['text']}\n", style="bold red" if away else "bold")
    if overview.verdict is None:
        none = "no step has closed" if overview.ended else "no step has closed yet"
        text.append(_rate(overview.service) if overview.service else none)
        return Panel(text, title=Text(overview.run), subtitle="q quits")
    text.append(f"the last steps together: {overview.verdict['recent_verdict']}", style="bold")
    text.append(f" · step {overview.verdict['step']}: {overview.verdict['verdict']}\n")
    text.append(overview.verdict["explanation"])
    return Panel(text, title=Text(overview.run), subtitle="q quits")


def _rate(service: Mapping[str, Any]) -> str:
    """Return how much a service scores, as a sentence."""
    whole = service["minutes"][-2:-1]
    rate = sum(minute["scored"] + minute["unscored"] for minute in whole)
    callers = len(service["callers"])
    noun = "caller" if callers == 1 else "callers"
    return f"a scoring service: {rate} samples in the last whole minute, for {callers} {noun} lately"


def _scorers(service: Mapping[str, Any]) -> Table:
    table = Table(
        "scorer", *map(_right, ("p50 s", "p95 s", "max s", "not scored")), title="scorers", expand=True, box=None
    )
    for each in service["scorers"]:
        failed = sum(count for outcome, count in each["outcomes"].items() if outcome != "scored")
        seconds = (_number(each[key], "{:.3f}") for key in ("p50_s", "p95_s", "max_s"))
        table.add_row(Text(each["scorer"]), *seconds, str(failed))
    return table


def _open_step_failures(failures: Mapping[str, Any], since: str) -> list[RenderableType]:
    if not failures.get("unscored"):
        return []
    share = failures["unscored"] / failures["samples"]
    lines = Text(f"since {since}: {failures['unscored']} of {failures['samples']} samples ({share:.0%}) ")
    lines.append("have no score", style="bold red")
    for each in failures["failures"]:
        lines.append(f"\n{each['scorer']}: {each['count']} × {each['reason'] or each['outcome']}")
    return [lines]


def _steps(steps: Sequence[Mapping[str, Any]], *, wide: bool) -> Table:
    """Return the table of steps; a narrow one leaves out staleness and the seconds that waited for rewards alone."""
    shown = [each for each in STEP_COLUMNS if each[0] in (_STEP_FIGURES if wide else _FEW_STEP_FIGURES)]
    table = Table(*(_right(heading) for heading, _, _ in shown), expand=True, box=None, padding=(0, 1, 0, 0))
    table.add_column("where the time went", no_wrap=True, min_width=_BAR)
    table.add_column("waited for", no_wrap=True, min_width=12)
    for step in steps:
        figures = (_number(step.get(key), form) for _, key, form in shown)
        table.add_row(*figures, _bar(step), Text(str(step.get("verdict", ""))))
    return table


_FEW_STEP_FIGURES = ("step", "reward", "step s", "no score")
_STEP_FIGURES = (*_FEW_STEP_FIGURES, "staleness", "exposed reward s")


def _bar(step: Mapping[str, Any]) -> Text:
    """Return the step's time in letters and colours: the trainer's own, then each cause of waiting."""
    whole_s = step.get("step_s") or step["closed"] - step["opened"]
    waits = {cause: float(step.get(f"wait/{cause}_s", 0.0)) for cause in _DRAWN if cause != "trainer"}
    parts = {"trainer": max(whole_s - sum(waits.values()), 0.0)} | waits
    bar, drawn, seconds = Text(), 0, 0.0
    for name, part_s in parts.items():
        seconds += part_s
        until = round(_BAR * seconds / whole_s) if whole_s > 0 else 0
        letter, colour = _DRAWN[name]
        bar.append(letter * (until - drawn), style=f"reverse {colour}")
        drawn = max(drawn, until)
    return bar


def _last_step(step: Mapping[str, Any]) -> RenderableType:
    legend = Columns(
        Text(letter, style=f"reverse {colour}").append(f" {name.replace('_', ' ')}", style="not reverse")
        for name, (letter, colour) in _DRAWN.items()
    )
    quantiles = map(_right, ("p50 s", "p95 s", "max s"))
    stages = Table("stage", *quantiles, title="stages, newest step", expand=True, box=None)
    for stage in STAGES:
        key = f"reward_pipeline/{stage}_s"
        if step.get(f"{key}/max"):
            stages.add_row(stage, *(_number(step.get(f"{key}/{name}"), "{:.3f}") for name in ("p50", "p95", "max")))
    outcomes = Table("outcome", _right("samples"), title="outcomes", box=None)
    for outcome in OUTCOMES:
        if count := step.get(f"reward_pipeline/outcome/{outcome}"):
            outcomes.add_row(outcome, f"{count:.0f}", style="" if outcome == "scored" else "red")
    side_by_side = Table.grid(expand=True, padding=(0, 2))
    side_by_side.add_row(stages, outcomes)
    reasons = Text("\n").join(Text(f"{scorer}: {text}", style="red") for scorer, text in failures_of(step))
    return Group(legend, side_by_side, reasons)


def _queues(overview: RunOverview) -> Table:
    """Return the table of streams; the oldest entry may be one that waits, or one that a process holds."""
    numbers = map(_right, ("waiting", "in progress", "oldest s"))
    table = Table("stream", *numbers, title="queues", expand=True, box=None)
    for name, depth in overview.streams.items():
        oldest_s = max(depth["oldest_undelivered_s"], depth["oldest_in_flight_s"])
        table.add_row(Text(name), str(depth["undelivered"]), str(depth["in_flight"]), f"{oldest_s:.1f}")
    return table


def _workers(workers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("worker", "state", "slots busy", "policy", title="workers", expand=True, box=None)
    for worker in workers:
        busy, slots = worker.get("busy", 0), worker.get("slots", 0)
        state = "starting" if not worker.get("ready", True) else "busy" if busy else "idle"
        policy = Text(worker.get("version") or "-")
        doing = Text(worker.get("problem") or worker.get("doing") or state)
        table.add_row(Text(worker["worker"]), doing, f"{busy} of {slots}" if slots else "-", policy)
    return table


def _samples(samples: Sequence[Mapping[str, Any]], *, wide: bool) -> Table:
    title = "slowest samples, newest step"
    worker = Column("scored by", overflow="fold")
    table = Table("sample", _right("seconds"), "longest stages", worker, title=title, expand=True, box=None)
    for sample in samples:
        longest = sorted(sample["stages_s"].items(), key=lambda stage: -stage[1])[: 3 if wide else 2]
        table.add_row(
            Text(f"{sample['group']}/{sample['index']}"),
            f"{sample['wall_s']:.2f}",
            Text(", ".join(f"{stage} {seconds:.2f}" for stage, seconds in longest)),
            Text(sample["scoring"].get("worker") or "-"),
        )
    return table


def _right(heading: str) -> Column:
    return Column(heading, justify="right")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
