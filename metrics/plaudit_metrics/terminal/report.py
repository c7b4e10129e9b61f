"""``plaudit report RUN``: write the live page as one HTML file, with the data of a run's folder inside.

The file is self-contained: styles, scripts and chart library are inside, and its content security policy forbids the
browser to fetch anything. It also works for a run that continues or was cut short: it contains the closed steps, and of
the stored samples as many as one file can hold.

Its data is compressed in parts, of which the browser unpacks those that it shows: a run of thousands of steps opens as
fast as one of ten. Of a step the overview has what its charts draw, the step's own part every figure; of older steps it
has what its view shows, since twenty scorers have 800 figures a step.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from plaudit_metrics.service.answers import (
    RECENT_STEPS,
    sample_details,
    step_detail,
    step_summary,
    step_timeline,
    verdict_detail,
)
from plaudit_metrics.service.page import FOLDER as PAGE
from plaudit_metrics.service.page import library
from plaudit_metrics.sources.audits import AuditHistory, sample_audits
from plaudit_metrics.sources.sample_schema import FOLDER, Row, surviving_files
from plaudit_metrics.sources.samples import detail, listed, read_step_samples
from plaudit_metrics.sources.search import few_samples, samples_of_group
from plaudit_metrics.sources.steps import FILE_NAME, ClosedStep, StepSamples, read_ending, read_steps
from plaudit_metrics.statistics.audits import Disagreement
from plaudit_metrics.statistics.steps import slowest_samples
from plaudit_wire.records import StepRecord

MOST_STEPS = 5000
"""The newest steps that a report contains."""
_STEPS_OF_A_PART = 50
_DIGITS = 4
"""Of a figure, or as many as a whole number has: no chart and no table shows more, and others cannot be compressed."""
_WITH_EVERY_FIGURE = 500
_ABRIDGED = re.compile(
    r"reward_pipeline/scorer/.+/((wait|work|throttled)_s/.+|(call|limiter|retry)_s/(p99|max|mean)|(limiter|retry)_s/p50"
    r"|behind_s|extra/.+)|reward_pipeline/(tool|sandbox)/.+_s/(p99|max|mean)"
)
"""Figures of older steps that are left out: no view shows them but the table of all."""
_CHARTED = re.compile(
    r"step|step_s|incarnation|opened|closed|num_samples|verdict|trainer_wait_s|exposed_reward_s|reward/(mean|std)"
    r"|wait/\w+_s|val/.+/reward|drift/.+/value(_low|_high)?|reward_pipeline/(masked_share|sandbox/cpu_hours|staleness/.+|outcome/.+|scorer/.+/value/mean)"
)
"""The keys of a step that the overview reads."""
_WITH_SAMPLES = 30
"""The newest steps whose slowest samples are in the file."""
_WITH_TIMELINE = 5
_SLOWEST = 20
_DRAWN = 60
_DISAGREEMENTS = 20
"""Of each auditor."""
_STORED_STEPS = 10
"""The newest steps of which the file has stored samples."""
_CHARACTERS = 4000
"""Of each text."""
_IMPORT = re.compile(r"^import (?P<names>{.*?}) from \"\./(?P<file>[a-z]+\.js)\";\n", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {scripts}; base-uri 'none'"


def report(run_folder: Path, run: str) -> str:
    """Return the report of a run as HTML; raise ``OSError`` if a file of the folder cannot be read.

    Read are ``steps.jsonl`` and, if they exist, ``ledger.json`` and stored samples.
    """
    records = read_steps(run_folder / FILE_NAME)
    steps = [ClosedStep(_rounded(record)) for record in records[-MOST_STEPS:]]
    about = {"run": run, "made": time.time(), "steps": len(records), "ended": read_ending(run_folder)}
    overview = [{key: value for key, value in step_summary(step).items() if _CHARTED.fullmatch(key)} for step in steps]
    parts: list[dict[str, Any]] = [{"steps": {"run": run, "steps": overview}, "ledger": _ledger(run_folder)}]
    if steps:
        parts[0]["verdict"] = {"run": run} | verdict_detail([step.record for step in steps[-RECENT_STEPS:]])
    parts += _parts_of_steps(run_folder, steps)
    auditors = AuditHistory(run_folder).reports(_DISAGREEMENTS)
    parts.append({"audits": {"run": run, "auditors": auditors}})
    apart = [each for auditor in auditors for each in auditor.disagreements]
    parts.append(report_samples(run_folder, apart))
    return _html(
        {"report": about, "parts": {path: part for part, answers in enumerate(parts) for path in answers}}, parts
    )


def _rounded(record: StepRecord) -> StepRecord:
    """Return the step with figures of so many digits as are shown."""
    figures = {key: _shortened(value) for key, value in record.statistics.items()}
    return msgspec.structs.replace(record, statistics=figures, waits=[])


def _shortened(value: float) -> float:
    return float(round(value)) if abs(value) >= 10**_DIGITS else float(f"{value:.{_DIGITS}g}")


def _detailed(step: ClosedStep, *, whole: bool) -> dict[str, Any]:
    """Return all about a step, or all but the figures that only the table of all shows."""
    everything = step_detail(step)
    if whole or not any(map(_ABRIDGED.fullmatch, everything)):
        return everything
    return {key: value for key, value in everything.items() if not _ABRIDGED.fullmatch(key)} | {"abridged": True}


def _parts_of_steps(run_folder: Path, steps: Sequence[ClosedStep]) -> Iterator[dict[str, Any]]:
    """Return the API's responses about the steps, some steps a part; and each timeline as a part of its own."""
    for first in range(0, len(steps), _STEPS_OF_A_PART):
        some = steps[first : first + _STEPS_OF_A_PART]
        whole = len(steps) - first <= _WITH_EVERY_FIGURE
        yield {f"steps/{step.record.step}": _detailed(step, whole=whole) for step in some}
    for age, step in enumerate(reversed(steps[-_WITH_SAMPLES:])):
        stored = _stored(run_folder, step.record)
        if stored is None:
            continue
        path, groups = f"steps/{step.record.step}", {group.group: group for group in stored.groups}
        known = ClosedStep(step.record, slowest=slowest_samples(stored.samples, _SLOWEST), groups=groups)
        yield {f"{path}/samples": {"samples": sample_details(known, _SLOWEST)}}
        if age < _WITH_TIMELINE:
            yield {f"{path}/trace": step_timeline(known, stored.samples, stored.groups, _DRAWN)}


def _stored(run_folder: Path, record: StepRecord) -> StepSamples | None:
    try:
        return read_step_samples(run_folder, record.step, record.incarnation, slowest=_DRAWN)
    except FileNotFoundError:
        return None


def _ledger(run_folder: Path) -> Any:
    try:
        return json.loads((run_folder / "ledger.json").read_bytes())
    except FileNotFoundError:
        return None


def report_samples(run_folder: Path, apart: Iterable[Disagreement]) -> dict[str, Any]:
    """Return the API's responses about some samples of the newest ten steps; an empty mapping where none are stored.

    Of each step these are the first 16, and the first four that have no score; and those on which reward and auditors
    disagree, of any step. Raises ``UnreadableFileError`` for a damaged file.
    """
    files = surviving_files(run_folder / FOLDER)
    found = {_key(row): row for step in sorted(files, reverse=True)[:_STORED_STEPS] for row in few_samples(files[step])}
    for each in apart:
        if each.step in files and (each.step, each.group, each.index) not in found:
            found |= {_key(row): row for row in samples_of_group(files[each.step], each.group)}
    if not found:
        return {}
    rows = sorted(found.values(), key=lambda row: -row["step"])
    page = {"samples": [listed(row) for row in rows], "first_step": min(files), "last_step": max(files)}
    details = {
        f"samples/{step}/{quote(group, safe='')}/{index}": detail(
            row, _CHARACTERS, sample_audits(run_folder, files[step], group, index)
        )
        for (step, group, index), row in found.items()
    }
    return {"samples": page, **details}


def _key(row: Row) -> tuple[int, str, int]:
    return row["step"], row["group"], row["index"]


def _html(answers: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the page with the files that it would load inlined; ``answers`` says which path is in which part."""
    page = (PAGE / "index.html").read_text()
    styles = library("uplot.css").read_text() + (PAGE / "style.css").read_text()
    icon = base64.b64encode((PAGE / "icon.svg").read_bytes()).decode()
    scripts = [library("uplot.js").read_text(), _joined("main.js")]
    policy = _POLICY.format(scripts=" ".join(map(_hash, scripts)))
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">\n<style>{styles}</style>\n'
    )
    body = (
        f'<script type="application/json" id="answers">{_data(answers)}</script>\n'
        f"{''.join(_packed(number, part) for number, part in enumerate(parts))}"
        f'<script>{scripts[0]}</script>\n<script type="module">{scripts[1]}</script>\n'
    )
    page = re.sub(r"<link [^>]*>\n|<script [^>]*></script>\n|<noscript>.*?</noscript>\n", "", page)
    return page.replace("<title>", head + "<title>").replace("</body>", body + "</body>")


def _joined(entry: str) -> str:
    """Join a module and its imports into one script: each in its own scope, after those it imports."""
    *imported, last = _in_order(entry, [])
    scopes = (f'modules["{name}"] = (() => {{\n{_source(name)}\n{_exports(name)}}})();\n' for name in imported)
    return f"const modules = {{}};\n{''.join(scopes)}{_source(last)}"


def _source(name: str) -> str:
    inside = _IMPORT.sub(r'const \g<names> = modules["\g<file>"];\n', (PAGE / name).read_text())
    return inside.replace("\nexport ", "\n")


def _exports(name: str) -> str:
    return f"return {{ {', '.join(_EXPORT.findall((PAGE / name).read_text()))} }};\n"


def _in_order(name: str, done: list[str]) -> Iterable[str]:
    for imported in _IMPORT.finditer((PAGE / name).read_text()):
        if imported["file"] not in done:
            yield from _in_order(imported["file"], done)
    if name not in done:
        done.append(name)
        yield name


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _packed(number: int, answers: Mapping[str, Any]) -> str:
    packed = gzip.compress(msgspec.json.encode(answers), compresslevel=6, mtime=0)
    return f'<template id="part-{number}">{base64.b64encode(packed).decode()}</template>\n'


def _data(answers: Mapping[str, Any]) -> str:
    """Encode as JSON that cannot end its HTML element, whatever a sample's text contains."""
    return msgspec.json.encode(answers).decode().replace("<", "\\u003c")
