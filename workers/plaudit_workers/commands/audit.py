"""``plaudit audit RUN``: tell from a run's stored samples what the reward taught beside the task.

Text, JSON or one HTML page with the same content: what rose and what did not, which scorer decides, whether length,
repetition or a missing score pays, which known exploits (the probes of ``plaudit probe``) occur in real responses, and
the samples that a person should read first.
"""

from __future__ import annotations

import argparse
import heapq
import html
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet

from plaudit_metrics.sources.audits import audits_file, read_audits
from plaudit_metrics.statistics import integrity
from plaudit_metrics.statistics.audits import AuditorReport, auditor_reports, quarters
from plaudit_metrics.statistics.integrity import Array, Estimate, GroupShares
from plaudit_reward.probes import exploits_in
from plaudit_wire.errors import RefusedError
from plaudit_wire.printable import print_text, printable
from plaudit_workers.commands.audited import (
    auditor_findings,
    auditor_page,
    auditor_rows,
    disagreement_line,
    interval,
    interval_or_dash,
)
from plaudit_workers.commands.samples import sample_files, samples_path
from plaudit_workers.process import EXIT_DONE

_COLUMNS = {
    **dict.fromkeys(("group", "split", "data_source", "prompt_id", "response", "outcome"), pyarrow.string()),
    **dict.fromkeys(("step", "index"), pyarrow.int64()),
    **dict.fromkeys(("score", "response_tokens"), pyarrow.float64()),
}
_MOST_CHARACTERS = 4000
_SHOWN_CHARACTERS = 100
_RELATION_MATTERS = 0.3
_REPETITION_MATTERS = 0.5
_DOMINATES = 0.9


class Window(msgspec.Struct, frozen=True):
    """Means over some steps."""

    first_step: int
    last_step: int
    samples: int
    score: float | None
    response_tokens: float
    repetition: float
    format: float
    """Mean share of a response's lines that are formatted."""
    repeated_across_prompts: float
    """Share of responses whose words are nearly those of a response to another prompt."""
    without_score: float


class Suspicious(msgspec.Struct, frozen=True):
    """A sample to read."""

    step: int
    group: str
    index: int
    score: float | None
    reasons: list[str]
    response: str


class Audit(msgspec.Struct, frozen=True):
    """Everything that the command reports."""

    run: str
    samples: int
    early: Window
    late: Window
    variance_shares: dict[str, float]
    length: Estimate | None
    """Correlation of reward and tokens within groups, over the late steps."""
    length_slope: Estimate | None
    """Reward for 100 tokens more."""
    repetition: Estimate | None
    format: Estimate | None
    """Correlation of reward and the share of formatted lines."""
    groups: GroupShares
    masked_longest: float | None
    masked_others: float | None
    exploits: dict[str, int]
    """Known exploits → late responses that hold them."""
    exploits_early: dict[str, int]
    findings: list[str]
    suspicious: list[Suspicious]
    auditors: list[AuditorReport]


class _Samples:
    """The samples of some steps as columns."""

    def __init__(self, columns: Mapping[str, list[Any]]) -> None:
        self.step = np.array(columns["step"], dtype=np.int64)
        self.name = list(zip(columns["group"], columns["index"], strict=True))
        self.group = integrity.group_numbers(columns["group"])
        self.prompt = [prompt or group for prompt, group in zip(columns["prompt_id"], columns["group"], strict=True)]
        self.response = [text or "" for text in columns["response"]]
        self.score = np.array([np.nan if score is None else score for score in columns["score"]], dtype=np.float64)
        self.tokens = np.array([tokens or 0 for tokens in columns["response_tokens"]], dtype=np.float64)
        texts = [text[:_MOST_CHARACTERS] for text in self.response]
        self.repetition = np.array([integrity.repetition(text) for text in texts])
        self.format = np.array([integrity.format_share(text) for text in texts])
        self.repeated = integrity.repeated_across(texts, self.prompt)
        self.exploits = [exploits_in(text) for text in texts]
        self.scorers = {
            name: np.array([np.nan if value is None else value for value in values], dtype=np.float64)
            for name, values in columns.items()
            if name.startswith("scorer/")
        }

    @property
    def has_score(self) -> Any:
        """Return True for each sample that has a score."""
        return ~np.isnan(self.score)

    def scored(self, values: Array) -> tuple[Array, Array, Any]:
        """Return the values and scores of the samples that have both, with their groups numbered from 0."""
        kept = self.has_score & ~np.isnan(values)
        _, groups = np.unique(self.group[kept], return_inverse=True)
        return values[kept], self.score[kept], groups


def audit(arguments: argparse.Namespace) -> int:
    """Run the command."""
    path = samples_path(arguments.run, arguments.runs_folder)
    files = sample_files(path)
    columns = _read(files)
    early, late = _windows(columns)
    audits = read_audits(audits_file(file.parent.parent, file) for file in files)
    auditors = auditor_reports(audits, columns["step"], arguments.most)
    found = _audit(str(arguments.run.name or arguments.run), early, late, auditors, arguments.most)
    if arguments.output:
        try:
            arguments.output.write_text(_page(found, _responses(columns, found)), encoding="utf-8")
        except OSError as error:
            raise RefusedError(f"--output {arguments.output} cannot be written: {error.strerror}") from error
        print_text(f"wrote {arguments.output}")
    elif arguments.json:
        print(msgspec.json.encode(found).decode())
    else:
        print_text("\n".join(_lines(found, _responses(columns, found))))
    return EXIT_DONE


def _responses(columns: Mapping[str, list[Any]], found: Audit) -> dict[tuple[str, int], str]:
    """Return the texts on which reward and auditors disagree, by group and index."""
    wanted = {(each.group, each.index) for auditor in found.auditors for each in auditor.disagreements}
    rows = zip(columns["group"], columns["index"], columns["response"], strict=True)
    return {(group, index): (text or "")[:_MOST_CHARACTERS] for group, index, text in rows if (group, index) in wanted}


def _read(files: Sequence[Path]) -> dict[str, list[Any]]:
    """Return the columns of all training samples; the scorers' values where a file has them."""
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    num_rows = 0
    for path in files:
        try:
            names = pyarrow.parquet.read_schema(path).names
            values = [
                name
                for name in names
                if name.startswith("scorer/") and name.count("/") == 2 and name.endswith("/value")
            ]
            if missing := [name for name in _COLUMNS if name not in names]:
                raise ValueError(f"it has no column {missing[0]}")
            schema = pyarrow.schema({**_COLUMNS, **dict.fromkeys(values, pyarrow.float64())})
            table = pyarrow.parquet.read_table(path, columns=schema.names, filters=[("split", "==", "train")])
            table = table.select(schema.names).cast(schema)
            table.validate(full=True)
            if table["step"].null_count or table["group"].null_count:
                raise ValueError("a sample has no step or no group")
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise RefusedError(f"{path} is damaged or holds no stored samples: {error}") from error
        for name in values:
            columns.setdefault(name, [None] * num_rows)
        for name, column in columns.items():
            column += table[name].to_pylist() if name in table.column_names else [None] * table.num_rows
        num_rows += table.num_rows
    if not num_rows:
        raise RefusedError("the run has stored no training samples: there is nothing to audit")
    return columns


def _windows(columns: Mapping[str, list[Any]]) -> tuple[_Samples, _Samples]:
    """Return the samples of the first and of the last quarter of the steps; of one step both are the same."""

    def of(first: int, last: int) -> _Samples:
        kept = [number for number, step in enumerate(columns["step"]) if first <= step <= last]
        return _Samples({name: [column[number] for number in kept] for name, column in columns.items()})

    early, late = quarters(columns["step"])
    return of(*early), of(*late)


def _audit(run: str, early: _Samples, late: _Samples, auditors: list[AuditorReport], most: int) -> Audit:
    masked = integrity.masked_by_length(late.tokens, late.has_score)
    scorers = {
        name.split("/")[1]: np.nan_to_num(values) for name, values in late.scorers.items() if not np.isnan(values).all()
    }
    kept = late.has_score
    _, groups = np.unique(late.group[kept], return_inverse=True)
    figures = Audit(
        run=run,
        samples=len(early.score) + len(late.score),
        early=_window(early),
        late=_window(late),
        variance_shares=integrity.variance_shares(
            {name: values[kept] for name, values in scorers.items()}, late.score[kept], groups
        ),
        length=integrity.correlation(*late.scored(late.tokens)),
        length_slope=integrity.slope(*late.scored(late.tokens / 100)),
        repetition=integrity.correlation(*late.scored(late.repetition)),
        format=integrity.correlation(*late.scored(late.format)),
        groups=integrity.group_shares(late.score[kept], groups),
        masked_longest=masked and masked[0],
        masked_others=masked and masked[1],
        exploits=_counts(late),
        exploits_early=_counts(early),
        findings=[],
        suspicious=_suspicious(late, most),
        auditors=auditors,
    )
    return msgspec.structs.replace(figures, findings=list(_findings(figures)))


def _window(samples: _Samples) -> Window:
    scored = samples.score[samples.has_score]
    return Window(
        first_step=int(samples.step.min()),
        last_step=int(samples.step.max()),
        samples=len(samples.score),
        score=float(scored.mean()) if len(scored) else None,
        response_tokens=float(samples.tokens.mean()),
        repetition=float(samples.repetition.mean()),
        format=float(samples.format.mean()),
        repeated_across_prompts=float(samples.repeated.mean()),
        without_score=float((~samples.has_score).mean()),
    )


def _counts(samples: _Samples) -> dict[str, int]:
    return dict(Counter(name for found in samples.exploits for name in found))


def _findings(of: Audit) -> Iterator[str]:
    """Yield a sentence for each figure that a person should look at."""
    early, late = of.early, of.late
    yield from auditor_findings(of.auditors)
    if early.score is not None and late.score is not None and late.last_step > early.last_step:
        yield f"the mean score went from {early.score:.3g} to {late.score:.3g}"
    if late.response_tokens > 1.5 * max(early.response_tokens, 1):
        yield f"responses grew from {early.response_tokens:.0f} to {late.response_tokens:.0f} tokens"
    if of.length and of.length.is_positive and of.length.value > _RELATION_MATTERS and of.length_slope:
        yield (
            f"longer responses earn more: {of.length_slope.value:+.3g} for 100 tokens "
            f"(correlation {interval(of.length)}, within groups)"
        )
    for which, relation in (("responses that repeat themselves", of.repetition), ("formatted responses", of.format)):
        if relation and relation.is_positive and relation.value > _RELATION_MATTERS:
            yield f"{which} earn more: correlation {interval(relation)}"
    if late.repeated_across_prompts > max(0.1, 2 * early.repeated_across_prompts):
        yield f"{late.repeated_across_prompts:.0%} of the responses have the words of a response to another prompt"
    shares = of.variance_shares
    if len(shares) > 1 and (first := next(iter(shares))) and shares[first] > _DOMINATES:
        yield f"scorer {first} decides alone: {shares[first]:.0%} of the reward's variance within groups"
    if of.masked_longest and of.masked_longest > max(0.05, 2 * (of.masked_others or 0.0)):
        yield (
            f"long responses escape a score: {of.masked_longest:.0%} of the longest quarter have none, "
            f"{of.masked_others:.0%} of the others"
        )
    if of.groups.dead + of.groups.saturated > 0.5:
        yield (
            f"most groups teach nothing: {of.groups.saturated:.0%} have the highest score throughout, "
            f"{of.groups.dead:.0%} one lower score"
        )
    for name, count in of.exploits.items():
        if count > 2 * of.exploits_early.get(name, 0):
            yield f"{count} late responses hold a known exploit: {name} ({of.exploits_early.get(name, 0)} early)"


def _suspicious(samples: _Samples, most: int) -> list[Suspicious]:
    """Return the samples to read first: those with the most reasons, then with the highest score."""
    ranked: list[tuple[int, float, int, list[str]]] = []
    longest = np.quantile(samples.tokens, 0.99) if len(samples.tokens) else 0.0
    best = np.nanmax(samples.score) if samples.has_score.any() else 0.0
    for number, score in enumerate(samples.score):
        reasons = [f"known exploit: {name}" for name in samples.exploits[number]]
        if samples.repetition[number] > _REPETITION_MATTERS:
            reasons.append(f"{samples.repetition[number]:.0%} of it is repeated")
        if samples.repeated[number]:
            reasons.append("the words of a response to another prompt")
        if samples.tokens[number] > max(longest, 1.5 * samples.tokens.mean()):
            reasons.append("among the longest")
        if reasons and not np.isnan(score) and score >= best:
            reasons.append("the highest score")
        if reasons:
            ranked.append((len(reasons), float(np.nan_to_num(score)), number, reasons))
    return [
        Suspicious(
            int(samples.step[number]),
            *samples.name[number],
            None if np.isnan(samples.score[number]) else float(samples.score[number]),
            reasons,
            samples.response[number][:_MOST_CHARACTERS],
        )
        for _, _, number, reasons in heapq.nlargest(most, ranked)
    ]


def _rows(of: Audit) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the table: figure, early, late."""
    early, late = of.early, of.late
    yield "steps", f"{early.first_step}-{early.last_step}", f"{late.first_step}-{late.last_step}"
    yield "samples", f"{early.samples:,}", f"{late.samples:,}"
    yield "mean score", _number(early.score), _number(late.score)
    yield "response tokens", f"{early.response_tokens:.0f}", f"{late.response_tokens:.0f}"
    yield "repeated runs of 4 words", f"{early.repetition:.1%}", f"{late.repetition:.1%}"
    yield "formatted lines", f"{early.format:.1%}", f"{late.format:.1%}"
    yield (
        "words of another prompt's response",
        f"{early.repeated_across_prompts:.1%}",
        f"{late.repeated_across_prompts:.1%}",
    )
    yield "without a score", f"{early.without_score:.1%}", f"{late.without_score:.1%}"
    for name in sorted({*of.exploits, *of.exploits_early}):
        yield f"known exploit: {name}", str(of.exploits_early.get(name, 0)), str(of.exploits.get(name, 0))
    yield "score and length, within groups", "", interval_or_dash(of.length)
    yield "score and repetition, within groups", "", interval_or_dash(of.repetition)
    yield "score and format, within groups", "", interval_or_dash(of.format)
    yield "groups of the highest score / of one lower", "", f"{of.groups.saturated:.0%} / {of.groups.dead:.0%}"
    for name, share in of.variance_shares.items():
        yield f"variance by scorer {name}", "", f"{share:.0%}"
    yield from auditor_rows(of.auditors)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _lines(of: Audit, responses: Mapping[tuple[str, int], str]) -> Iterator[str]:
    rows = list(_rows(of))
    width, of_early = (max(len(row[column]) for row in rows) for column in (0, 1))
    yield f"{'':{width}}  {'early':>{of_early}}  late"
    for name, early, late in rows:
        yield f"{name:{width}}  {early:>{of_early}}  {late}"
    yield ""
    yield from of.findings or ["nothing stands out"]
    if of.suspicious:
        yield ""
        yield "read these first"
    for each in of.suspicious:
        yield f"step {each.step} {each.group} [{each.index}]  {_number(each.score)}  {'; '.join(each.reasons)}"
        yield _shown(each.response)
    for auditor in of.auditors:
        if auditor.disagreements:
            yield ""
            yield f"reward and auditor {auditor.name} disagree most"
        for apart in auditor.disagreements:
            yield disagreement_line(apart, auditor.name)
            yield _shown(responses.get((apart.group, apart.index), ""))


def _shown(response: str) -> str:
    return f"    {printable(' '.join(response.split()))[:_SHOWN_CHARACTERS]}"


_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8884 }
td + td { font-variant-numeric: tabular-nums }
pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 16rem; overflow-y: auto }
summary { cursor: pointer; padding: .3rem 0 }
figure { margin: 1rem 0 }
svg text { font-size: 12px; fill: currentColor }
polyline { fill: none; stroke-width: 2 }
.line0 { stroke: #2a78d6 } .line1 { stroke: #eb6834; stroke-dasharray: 6 3 }
.band0 { fill: #2a78d633 } .band1 { fill: #eb683433 }
svg .name0 { fill: #2a78d6 } svg .name1 { fill: #eb6834 }
@media (max-width: 40rem) { svg text { font-size: 20px } }
"""


def _page(of: Audit, responses: Mapping[tuple[str, int], str]) -> str:
    """Return a page without scripts; every text of a sample is escaped."""

    def text(value: str) -> str:
        return html.escape(printable(value, keep="\n\t"))

    rows = "".join(
        f"<tr><th scope='row'>{text(name)}</th><td>{text(early)}</td><td>{text(late)}</td></tr>"
        for name, early, late in _rows(of)
    )
    findings = "".join(f"<li>{text(finding)}</li>" for finding in of.findings) or "<li>nothing stands out</li>"
    read = "".join(
        f"<details><summary>step {each.step}, {text(each.group)} [{each.index}], score {_number(each.score)}: "
        f"{text('; '.join(each.reasons))}</summary><pre>{text(each.response)}</pre></details>"
        for each in of.suspicious
    )
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Audit of {text(of.run)}</title><style>{_STYLE}</style><body><h1>Audit of {text(of.run)}</h1>"
        f"<h2>What stands out</h2><ul>{findings}</ul>"
        f"<h2>Figures</h2><table><thead><tr><td></td><th>early steps</th><th>late steps</th></tr></thead>{rows}</table>"
        f"{auditor_page(of.auditors, {name: text(response) for name, response in responses.items()})}"
        f"<h2>Read these first</h2>{read or '<p>No sample stands out.</p>'}</body></html>\n"
    )
