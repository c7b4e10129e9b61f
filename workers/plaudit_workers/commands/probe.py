"""``plaudit probe JOB``: score responses that deserve nothing, and right ones in odd forms, before a policy does.

The battery is ``plaudit_reward.probes``. Each row of the data is probed twice over: the first round finds the right
response that earns most, the second scores every probe beside it. What a probe earns is a share of what the right
response earns, from the lowest score seen or 0, whichever is lower::

    share = (mean of the probe - floor) / (mean of the right response - floor)      over the rows that have both

A probe leaks if it earns too much over all rows, or over those of one data source.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from statistics import fmean, mean
from typing import Any

from plaudit_job.data_row import DataRow
from plaudit_job.load import load_job
from plaudit_job.spec.rewards import RewardSpec, ScorerSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.probes import (
    PROBES,
    Deserves,
    ProbedRow,
    RewardProbe,
    answers_in,
    right_responses,
    texts_of,
    verdicts_for,
)
from plaudit_wire.errors import RefusedError
from plaudit_wire.plain import plain_text
from plaudit_wire.printable import print_text, shown
from plaudit_wire.records import ScoringRecord
from plaudit_workers.commands.trial import (
    GROUND_TRUTH,
    TriedRow,
    first_rows,
    reward_without_servers,
    right_answer,
    row_sample,
    show_logs,
)
from plaudit_workers.process import EXIT_DONE, EXIT_FAILED
from plaudit_workers.service.build import build_pipeline

_ASKING_KINDS = ("judge", "http", "service", "model")
_RIGHT = "right response"
_EQUAL = "equal group"
_EQUAL_RESPONSES = 4
_OWN_PREFIX = "right_"
_MOST_OTHERS = 9
_MOST_READ = 5000
"""Rows of the data among which those that are probed are chosen."""
_ROWS_OF_SOURCE = 4
"""With fewer rows a data source is not looked at by itself: one odd score would decide."""


@dataclass(frozen=True)
class ProbeResult:
    """What one probe earned."""

    probe: str
    deserves: Deserves
    meaning: str
    rows: int
    """Rows in which it and the right response have scores."""
    mean: float | None
    share: float | None
    """The part of the right response's reward that it earns; None without rows."""
    beats: float | None
    """Share of the rows in which it earns at least what the right response earns."""
    failed: int
    """Texts without a score."""
    scorers: Mapping[str, float]
    """Mean value by scorer."""
    share_by_source: Mapping[str, float]
    """The share over the rows of each data source that has at least four."""
    example: str
    """The text that earned most (of a right response: least)."""

    def is_leak(self, most_share: float) -> bool:
        """Return True for a response that deserves nothing and earns more than this share, overall or of a source."""
        shares = [*self.share_by_source.values(), self.share or 0.0]
        return self.deserves == "nothing" and max(shares) > most_share

    def leaking_sources(self, most_share: float) -> list[str]:
        """Return the data sources in which it earns more than this share, if others are probed in which it does not."""
        found = [source for source, share in self.share_by_source.items() if share > most_share]
        return found if len(found) < len(self.share_by_source) else []


@dataclass(frozen=True)
class _Scored:
    text: str
    scoring: ScoringRecord


@dataclass(frozen=True)
class _ScoredRow:
    """The scored texts of a row by probe."""

    source: str
    texts: Mapping[str, list[_Scored]]


def probe(arguments: argparse.Namespace) -> int:
    """Run the command."""
    job = load_job(arguments.job)
    reward = reward_without_servers(job.spec.reward.rewarding)
    if all(scorer.kind == "environment" for scorer in reward.scorers):
        raise RefusedError(
            "the agent's episodes give the rewards, not the responses: there is no text to probe. Play rows with "
            "plaudit try"
        )
    probes = _chosen([*PROBES, *_own(arguments.probes)], arguments.only)
    read = _rows(job, reward, arguments.data, arguments.rows)
    rows = _affordable(read, probes, reward, arguments.max_requests)
    show_logs()
    results = asyncio.run(_probe(job, reward, probes, rows))
    leaks = [result for result in results if result.is_leak(arguments.fail_above)]
    if arguments.json:
        print(json.dumps({"failAbove": arguments.fail_above, "probes": [asdict(result) for result in results]}))
    else:
        print_text("\n".join(_table(results)))
        print_text(_verdict(results, leaks, arguments.fail_above))
    return EXIT_FAILED if leaks else EXIT_DONE


@dataclass(frozen=True)
class _DataRow:
    """One row: what a probe sees of it, its data, and the right response that the data holds (empty for none)."""

    probed: ProbedRow
    data: DataRow
    answer: str


def _rows(job: RLJob, reward: RewardSpec, data: Path | None, num_rows: int) -> list[_DataRow]:
    """Return rows of each data source in turn, each with the answers of the others."""
    read = _in_turn(first_rows(job, data, _MOST_READ), num_rows + _MOST_OTHERS)
    answers = [answers_in(row.data.ground_truth) for row in read]
    verdicts = [
        verdict
        for scorer in reward.scorers
        if scorer.judge is not None
        for verdict in verdicts_for(scorer.judge.parse.json_path)
    ]
    rules = [scorer.rule for scorer in reward.scorers if scorer.kind == "rule"]
    found = []
    for row, own in zip(read[:num_rows], answers, strict=False):
        others = dict.fromkeys(each[0] for each in answers if each and each[0] not in own)
        tests = _tests(row.data.ground_truth)
        source, answer = right_answer(row)
        is_code = "code" in rules or tests is not None or (source != GROUND_TRUTH and "```python" in answer)
        probed = ProbedRow(
            row=row.columns,
            prompt=row_sample(job, row.data, "", "", 0).prompt,
            answers=() if is_code else own,
            others=() if is_code else list(others)[:_MOST_OTHERS],
            most_tokens=job.spec.rollout.sampling.max_tokens if job.spec.trains else 256,
            is_code=is_code,
            function=str((tests or {}).get("fn_name") or ""),
            verdicts=verdicts,
        )
        found.append(_DataRow(probed, row.data, "" if is_code and source == GROUND_TRUTH else answer))
    return found


def _in_turn(rows: Iterable[TriedRow], count: int) -> list[TriedRow]:
    """Take a row of each data source in turn: files are often sorted by them."""
    by_source: dict[str, list[TriedRow]] = {}
    for row in rows:
        by_source.setdefault(row.data.data_source, []).append(row)
    turns = zip_longest(*by_source.values())
    return list(islice((row for turn in turns for row in turn if row is not None), count))


def _tests(truth: Any) -> Mapping[str, Any] | None:
    """Return the tests that a ground truth of code holds; None for any other truth."""
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError):
            return None
    return truth if isinstance(truth, Mapping) and {"inputs", "assert_case"} & set(truth) else None


def _chosen(probes: Sequence[RewardProbe], only: str) -> list[RewardProbe]:
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [each.name for each in probes]
    if unknown := [name for name in names if name not in known]:
        raise RefusedError(f"--only: there is no probe {unknown[0]!r}. The probes: {', '.join(known)}")
    return [each for each in probes if not names or each.name in names]


def _own(path: Path | None) -> list[RewardProbe]:
    """Load a file's public functions, each from a row to a text or several; ``right_…`` give right responses."""
    if path is None:
        return []
    spec = importlib.util.spec_from_file_location("plaudit_own_probes", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise RefusedError(f"--probes {path} is no Python file. Give a file of functions from a row to texts")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code
        raise RefusedError(f"--probes {path} cannot be loaded: {type(error).__name__}: {error}") from error
    functions = [
        (name, function)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and not name.startswith("_") and function.__module__ == module.__name__
    ]
    if not functions:
        raise RefusedError(f"--probes {path} defines no public function. Write one from a row to texts")
    known = {each.name for each in PROBES}
    if taken := [name for name, _ in functions if name in known]:
        raise RefusedError(f"--probes {path}: there is a probe {taken[0]!r} already. Give the function another name")
    return [_own_probe(path, name, function) for name, function in functions]


def _own_probe(path: Path, name: str, function: Any) -> RewardProbe:
    def texts(row: ProbedRow) -> list[str]:
        try:
            made = function(copy.deepcopy(row.row))
        except (Exception, SystemExit) as error:  # the user's code
            raise RefusedError(f"--probes {path}: {name} raised {type(error).__name__}: {error}") from error
        made = [made] if isinstance(made, str) else made
        if not isinstance(made, list | tuple) or not all(isinstance(text, str) for text in made):
            raise RefusedError(
                f"--probes {path}: {name} returned {type(made).__name__}. Return a text or a list of texts"
            )
        return [plain_text(text) for text in made]

    is_right = name.startswith(_OWN_PREFIX)
    meaning = (inspect.getdoc(function) or "of your own").splitlines()[0]
    return RewardProbe(
        name, "everything" if is_right else "nothing", meaning, texts, every=is_right, may_hold_answer=True
    )


def _affordable(
    rows: Sequence[_DataRow], probes: Sequence[RewardProbe], reward: RewardSpec, most_requests: int
) -> Sequence[_DataRow]:
    """Announce what the probes cost at most; leave out rows that would cost more requests than allowed."""
    if not rows:
        raise RefusedError("the data has no rows: there is nothing to probe")
    asking = [scorer.name for scorer in reward.scorers if _asks(scorer)]
    sizes = [_num_texts(row, probes) for row in rows]
    kept = len(rows)
    while asking and kept and sum(sizes[:kept]) * len(asking) > most_requests:
        kept -= 1
    if not kept:
        raise RefusedError(
            f"--max-requests {most_requests}: one row costs up to {sizes[0] * len(asking)} requests of "
            f"{', '.join(asking)}. Allow more, or choose probes with --only"
        )
    cost = f", up to {sum(sizes[:kept]) * len(asking):,} requests of {', '.join(asking)}" if asking else ""
    less = len(rows) - kept
    fewer = f" ({less} row{'s' * (less > 1)} fewer, for --max-requests {most_requests})" if less else ""
    print(f"probing {kept} row{'s' * (kept > 1)}: up to {sum(sizes[:kept]):,} responses{cost}{fewer}", file=sys.stderr)
    return rows[:kept]


def _asks(scorer: ScorerSpec) -> bool:
    return scorer.kind in _ASKING_KINDS or (scorer.python is not None and scorer.python.serve is not None)


def _num_texts(row: _DataRow, probes: Sequence[RewardProbe]) -> int:
    candidates = right_responses(row.probed, row.answer)
    known = replace(row.probed, right=candidates[0][0] if candidates else "")
    return len(candidates) + sum(len(texts_of(each, known)) for each in probes) + _EQUAL_RESPONSES


async def _probe(
    job: RLJob, reward: RewardSpec, probes: Sequence[RewardProbe], rows: Sequence[_DataRow]
) -> list[ProbeResult]:
    pipeline = await build_pipeline(reward, "probe")
    probing = _Probing(job, pipeline, asyncio.Semaphore(reward.workers.max_concurrent_samples))
    try:
        known = await asyncio.gather(*(probing.with_right(row, number) for number, row in enumerate(rows)))
        scored = await asyncio.gather(*(probing.probed(row, probes, number) for number, row in enumerate(known)))
    finally:
        await pipeline.close()
    results = _results(probes, scored)
    if pipeline.scores_groups:
        results.append(_result(RewardProbe(_EQUAL, "nothing", "a group of one empty text", lambda row: ()), scored))
    return results


class _Probing:
    """Scores the texts of rows."""

    def __init__(self, job: RLJob, pipeline: Pipeline, places: asyncio.Semaphore) -> None:
        self._job = job
        self._pipeline = pipeline
        self._places = places

    async def with_right(self, row: _DataRow, number: int) -> _DataRow:
        """Return the row with the right response and the form of an answer that earn most."""
        candidates = right_responses(row.probed, row.answer)
        scored = await self._scores(row.data, [text for text, _ in candidates], f"right-{number}")
        valued = [(each.scoring.value, place) for place, each in enumerate(scored) if each.scoring.value is not None]
        if not valued:
            return row
        _, best = max(valued, key=lambda each: each[0])
        # The data's own response, the first, holds its answer in a form of its own: the others tell in which.
        others = [each for each in valued if each[1] or not row.answer] or valued
        _, formed = max(others, key=lambda each: each[0])
        return replace(row, probed=replace(row.probed, right=candidates[best][0], form=candidates[formed][1]))

    async def probed(self, row: _DataRow, probes: Sequence[RewardProbe], number: int) -> _ScoredRow:
        """Return the scored texts of a row by probe; the right response is scored beside them."""
        named = [(_RIGHT, row.probed.right)] if row.probed.right else []
        named += [(each.name, text) for each in probes for text in texts_of(each, row.probed)]
        scored = await self._scores(row.data, [text for _, text in named], f"probe-{number}")
        if self._pipeline.scores_groups:
            equal = await self._scores(row.data, [""] * _EQUAL_RESPONSES, f"equal-{number}")
            named += [(_EQUAL, "")] * len(equal)
            scored += equal
        found: dict[str, list[_Scored]] = {}
        for (name, _), each in zip(named, scored, strict=True):
            found.setdefault(name, []).append(each)
        return _ScoredRow(row.data.data_source, found)

    async def _scores(self, data: DataRow, texts: Sequence[str], group: str) -> list[_Scored]:
        """Score texts as one group."""
        samples = [row_sample(self._job, data, text, group, index) for index, text in enumerate(texts)]
        scorings = await self._pipeline.score_whole_group(samples, self._places)
        return [_Scored(text, scoring) for text, scoring in zip(texts, scorings, strict=True)]


def _results(probes: Sequence[RewardProbe], rows: Sequence[_ScoredRow]) -> list[ProbeResult]:
    right = _result(
        RewardProbe(_RIGHT, "open", "the right response, in the form that earns most", lambda row: ()), rows
    )
    fitting = [each for each in probes if any(each.name in row.texts for row in rows)]
    return [right, *(_result(each, rows) for each in fitting)]


def _result(probe: RewardProbe, rows: Sequence[_ScoredRow]) -> ProbeResult:
    """Sum up one probe over all rows."""
    floor = min([0.0, *(value for row in rows for texts in row.texts.values() for value in _values(texts))])
    taken: list[tuple[_Scored, float]] = []
    by_source: dict[str, list[tuple[_Scored, float]]] = {}
    failed = 0
    for row in rows:
        texts = row.texts.get(probe.name, [])
        valued = [each for each in texts if each.scoring.value is not None]
        failed += len(texts) - len(valued)
        right = _values(row.texts.get(_RIGHT, []))
        if valued and right:
            choose = min if probe.every else max
            taken.append((choose(valued, key=lambda each: each.scoring.value or 0.0), right[0]))
            by_source.setdefault(row.source, []).append(taken[-1])
    values = _values(each for each, _ in taken)
    shares = {source: _share(part, floor) for source, part in by_source.items() if len(part) >= _ROWS_OF_SOURCE}
    example = (min if probe.every else max)(taken, key=lambda each: each[0].scoring.value or 0.0, default=None)
    return ProbeResult(
        probe=probe.name,
        deserves=probe.deserves,
        meaning=probe.meaning,
        rows=len(taken),
        mean=mean(values) if values else None,
        share=_share(taken, floor),
        beats=fmean(each.scoring.value is not None and each.scoring.value >= right for each, right in taken)
        if taken
        else None,
        failed=failed,
        scorers=_means_by_scorer([each for each, _ in taken]),
        share_by_source={source: share for source, share in shares.items() if share is not None},
        example=example[0].text if example else "",
    )


def _share(taken: Sequence[tuple[_Scored, float]], floor: float) -> float | None:
    """Return what the texts earn of the right responses' rewards beside them; None if those earn nothing."""
    earned = sum(_values(each for each, _ in taken)) - floor * len(taken)
    right = sum(right for _, right in taken) - floor * len(taken)
    return earned / right if right > 0 else None


def _values(scored: Iterable[_Scored]) -> list[float]:
    return [each.scoring.value for each in scored if each.scoring.value is not None]


def _means_by_scorer(scored: Sequence[_Scored]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for each in scored:
        for name, record in each.scoring.scorers.items():
            if record.value is not None:
                values.setdefault(name, []).append(record.value)
    return {name: mean(of) for name, of in values.items()}


_TITLES: dict[Deserves, str] = {
    "nothing": "deserves nothing",
    "everything": "deserves everything",
    "open": "for your judgement",
}


def _table(results: Sequence[ProbeResult]) -> list[str]:
    width = max(len(result.probe) for result in results)
    lines = [f"{'':{width}}   mean  share  ≥ right  rows  example"]
    for deserves, title in _TITLES.items():
        part = [result for result in results if result.deserves == deserves and result.probe != _RIGHT]
        worst_first = sorted(part, key=lambda each: (each.share is None, each.share or 0.0), reverse=False)
        ordered = worst_first if deserves == "everything" else [*reversed(worst_first)]
        lines += [title, *(_line(each, width) for each in ordered)] if part else []
    right = next(result for result in results if result.probe == _RIGHT)
    return [*lines, _line(right, width)]


def _line(result: ProbeResult, width: int) -> str:
    if result.mean is None or result.beats is None:
        why = f"{result.failed} texts without a score" if result.failed else "no row has a right response with a score"
        return f"{result.probe:{width}}      -      -        -     0  {why}"
    share = "-" if result.share is None else f"{result.share:.0%}"
    failed = f" ({result.failed} texts without a score)" if result.failed else ""
    return (
        f"{result.probe:{width}} {result.mean:6.3g} {share:>6} {result.beats:8.0%} {result.rows:5}  "
        f"{shown(result.example)}{failed}"
    )


def _verdict(results: Sequence[ProbeResult], leaks: Sequence[ProbeResult], fail_above: float) -> str:
    """Return the sentences that tell what leaks, through which scorer, and which right answers are lost."""
    right = results[0]
    if right.share is None:
        return (
            "no right response is known: none of the data's answers earns more than the lowest score. Give the rows a "
            "response or extra_info.answer that deserves the full reward"
        )
    sentences = []
    for leak in leaks:
        most = max(leak.scorers, key=lambda name: leak.scorers[name], default="")
        scorer = f" (scorer {most} gives {leak.scorers[most]:.3g} on average)" if most else ""
        sources = leak.leaking_sources(fail_above)
        where = f" in {', '.join(sources)}" if sources else ""
        share = max((leak.share_by_source[source] for source in sources), default=leak.share or 0.0)
        sentences.append(f"{leak.probe!r} earns {share:.0%} of the right response's reward{where}{scorer}")
    lost = [
        f"{each.probe!r} keeps {each.share:.0%}"
        for each in results
        if each.deserves == "everything" and each.share is not None and each.share < 1 - fail_above
    ]
    if lost:
        sentences.append(f"right responses lose their reward: {', '.join(lost)}")
    if not leaks:
        sentences.append(
            f"no response that deserves nothing earns more than {fail_above:.0%} of the right one's reward"
        )
    return "\n".join(sentences)
