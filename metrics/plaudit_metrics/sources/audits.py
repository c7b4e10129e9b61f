"""Define the files of audits: second opinions on some groups, beside the stored samples that they are about.

``audits/step-000012-i1.jsonl`` has one line for each audited group of ``samples/step-000012-i1.parquet``. Reward
workers append (``service.auditor``). A file counts as long as its file of samples does, so that audits of steps that a
resume rolled back are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from plaudit_metrics.sources.sample_schema import FOLDER as SAMPLES
from plaudit_metrics.sources.sample_schema import surviving_files
from plaudit_metrics.sources.steps import append_line
from plaudit_metrics.statistics.audits import (
    WAITING,
    AuditedGroup,
    AuditorReport,
    Rescored,
    auditor_reports,
    step_figures,
)
from plaudit_wire.records import ScorerRecord, is_drawn

FOLDER = "audits"
"""Folder of the files, in the run's folder."""
T = TypeVar("T")


def is_audited(group: str, step: int, share: float, every_steps: int) -> bool:
    """Return True if an auditor with that share scores the group; by its id, so that every process draws the same."""
    return step % every_steps == 0 and is_drawn(group, share)


def audits_file(run_folder: Path, samples: Path) -> Path:
    """Return the path of the audits of a file of samples."""
    return run_folder / FOLDER / f"{samples.stem}.jsonl"


def append_audit(path: Path, found: AuditedGroup | Rescored) -> None:
    """Append the audits of a group, or the values of one watched scorer; raise ``OSError`` if that is impossible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, msgspec.json.encode(found))


def read_audits(paths: Iterable[Path]) -> list[AuditedGroup]:
    """Read audited groups in the order of the files; of two lines for the same group and auditor the first counts.

    A missing file holds none. A line that a kill has cut is skipped.
    """
    found: dict[str, AuditedGroup] = {}
    for path in paths:
        for group in _lines(path, AuditedGroup):
            earlier = found.get(group.group)
            found[group.group] = group if earlier is None else _joined(earlier, group)
    return list(found.values())


def drift_file(run_folder: Path) -> Path:
    """Return the path of the values of watched scorers: one line each time that one was asked again."""
    return run_folder / FOLDER / "drift.jsonl"


def read_drift(path: Path) -> list[Rescored]:
    """Read all values of watched scorers, in order; of a scorer and step the first line counts."""
    found: dict[tuple[str, int], Rescored] = {}
    for again in _lines(path, Rescored):
        found.setdefault((again.scorer, again.step), again)
    return list(found.values())


def sample_audits(run_folder: Path, samples: Path, group: str, index: int) -> dict[str, ScorerRecord]:
    """Return the auditors' results of one sample of a file of samples; none if its group has not been audited."""
    groups = (each for each in read_audits([audits_file(run_folder, samples)]) if each.group == group)
    return next((each.audits for of in groups for each in of.samples if each.index == index), {})


def run_audits(run_folder: Path) -> list[AuditedGroup]:
    """Read the audited groups of a run by step, without those of steps that a resume rolled back."""
    return AuditHistory(run_folder).read()


class AuditHistory:
    """Read the audits of a run again and again: only files that have grown are read anew."""

    def __init__(self, run_folder: Path, last_steps: int | None = None) -> None:
        """Read of so many newest steps with stored samples; None: of all."""
        self._folder = run_folder
        self._last_steps = last_steps
        self._read: dict[Path, tuple[int, list[AuditedGroup]]] = {}

    def read(self) -> list[AuditedGroup]:
        """Return the audited groups by step."""
        paths = [audits_file(self._folder, path) for path in self._files().values()]
        self._read = {path: found for path in paths if (found := self._of_file(path)) is not None}
        return [group for _, groups in self._read.values() for group in groups]

    def figures(self) -> dict[str, float]:
        """Return the figures after the newest step by their keys; empty without audits.

        How many groups still wait is left out: the trainer knows what it has drawn.
        """
        groups = self.read()
        names = sorted({name for group in groups for name in group.auditors})
        newest = max((group.step for group in groups), default=0)
        found = step_figures(groups, names, {}, newest)
        return {key: value for key, value in found.items() if not key.endswith(WAITING)}

    def reports(self, most: int) -> list[AuditorReport]:
        """Return what each auditor says of these steps, with so many of its widest disagreements."""
        return auditor_reports(self.read(), self._files(), most)

    def _files(self) -> dict[int, Path]:
        """Return the files of samples of these steps, by step."""
        files = surviving_files(self._folder / SAMPLES)
        return files if self._last_steps is None else dict(list(files.items())[-self._last_steps :])

    def _of_file(self, path: Path) -> tuple[int, list[AuditedGroup]] | None:
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return None
        known = self._read.get(path)
        return known if known is not None and known[0] == size else (size, read_audits([path]))


def _lines(path: Path, kind: type[T]) -> Iterator[T]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError:
            continue


def _joined(first: AuditedGroup, second: AuditedGroup) -> AuditedGroup:
    more = {sample.index: sample.audits for sample in second.samples}
    samples = [
        msgspec.structs.replace(sample, audits=more.get(sample.index, {}) | sample.audits) for sample in first.samples
    ]
    return msgspec.structs.replace(first, samples=samples)
