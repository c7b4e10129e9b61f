"""Check the rows of a job's data before anything starts: as the trainer will read, render and choose them.

Rows are rendered where the tokenizer's files are on this machine. Of data with many rows a part is rendered, spread
over all; every row is read and checked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from plaudit_job.data_row import IMAGES_COLUMN
from plaudit_job.fields import is_hub_id
from plaudit_job.problem import Problem, is_within
from plaudit_job.spec.rewards import RewardSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.rollout import ImagesSpec, TrainDataSpec, ValidationDataSpec
from plaudit_job.tasks import read_tasks
from plaudit_wire.errors import ConfigurationError, RefusedError, described
from plaudit_workers.agents.processes import described_tools
from plaudit_workers.data_facts import DataFacts, FactsOfRows
from plaudit_workers.data_files import VERL, NumberedRow, RowError, RowForm, checked_rows
from plaudit_workers.images import ImageError, ImageProcessor, UnstoredImages, row_files
from plaudit_workers.launch.checks import hub_cache
from plaudit_workers.server_tasks import data_splits, with_server_tasks

if TYPE_CHECKING:
    from plaudit_workers.tokenizer import ChatTemplate
    from plaudit_workers.training.prompts import PromptRenderer, RenderedRow

_USER = {"role": "user", "content": "What is 2 + 2?"}
_OTHER = {"role": "user", "content": "Name a colour."}
_ALL_RENDERED = 10_000
_ALL_RENDERED_CHARACTERS = 8 << 20
"""Rows are rendered one and all until either is reached: some 2 million tokens take a core 6 seconds."""
_SERVER_ANSWERS_WITHIN_S = 10.0
_EACH_OF_MORE = 500
"""Of the rows beyond, one in so many is rendered."""


@dataclass
class DataReport:
    """Hold what is found out about a job's data."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    """What a reader should know of data without a problem."""
    facts: DataFacts | None = None
    """Of the training data; None if none is read yet, as the tasks of a server that the run starts."""


def check_data(
    job: RLJob, broken: Sequence[str] = (), *, renders: bool = True, away: Sequence[Problem] = ()
) -> DataReport:
    """Read the training and validation data of a job, and render it if the template can be loaded here.

    Args:
        broken: fields with problems; what depends on them is not checked.
        renders: False: only read, which is all that a run's start waits for, because its trainer renders at once.
        away: the agent's servers that cannot be reached, so prompts are rendered without its tools.
    """
    report = DataReport()
    if not job.spec.trains:
        return report
    renderer = None
    if renders:
        report.notes += [replace(problem, remedy=f"{problem.remedy}. {_UNDESCRIBED}") for problem in away]
    if renders and not any(is_within(name, ("spec.model", "spec.rollout.agent")) for name in broken):
        renderer = _checked_renderer(job, report, away)
    facts = FactsOfRows()
    with TemporaryDirectory(prefix="plaudit-tasks-") as folder:
        job = _with_server_tasks(job, Path(folder), report, away)
        _check_sections(job, report, renderer, facts)
    report.facts = facts.facts() if facts.num_rows else None
    return report


def _with_server_tasks(job: RLJob, folder: Path, report: DataReport, away: Sequence[Problem]) -> RLJob:
    """Return the job with the tasks of its environment's server, where that answers before the run."""
    name = next((f"spec.data.{name}.split" for name in data_splits(job)), "")
    if not name:
        return job
    if job.spec.rollout.agent.environment:
        report.notes.append(Problem(name, "a run starts the environment's server, which has the tasks", "Not read yet"))
        return job
    if away:
        report.notes.append(Problem(name, "the environment's server, which has the tasks, is not reached", "Not read"))
        return job
    try:
        return with_server_tasks(job, folder)
    except (ConfigurationError, RefusedError) as error:
        report.problems.append(Problem(name, *_halves(str(error))))
        return job


def _check_sections(job: RLJob, report: DataReport, renderer: PromptRenderer | None, facts: FactsOfRows) -> None:
    for name, (path, section) in data_sections(job).items():
        pass_ = _Pass(job, section, renderer, facts if section is job.spec.data.train else None)
        problem = pass_.problem(name, path)
        report.problems += [problem] if problem else pass_.rules.problems(name, path)
        report.notes += [] if report.problems else [*pass_.notes(name, path), *_shared_tests(name, path)]


def _shared_tests(name: str, path: str) -> Iterator[Problem]:
    """Yield a note on tasks that name what their tests need, and still test in the agent's machine."""
    if name.endswith(".tasks"):
        tasks = list(read_tasks(Path(path)))
        names = [each.name for each in tasks if each.config.artifacts and not each.tests_environment]
        if names:
            part = f"{len(names):,} of {len(tasks):,} tasks name artifacts"
            message = f"{path}: {part}, but their tests run in the agent's machine ({names[0]})"
            remedy = "With verifier.environment_mode = 'separate' in task.toml their tests see the artifacts alone"
            yield Problem(name, message, remedy)


def data_sections(job: RLJob) -> dict[str, tuple[str, TrainDataSpec]]:
    """Return, by the field that names it, each path of a job's data with the section that says what of it is used."""
    data = job.spec.data
    found = {f"spec.data.train.mixture[{number}].path": each.path for number, each in enumerate(data.train.mixture)}
    found = found or {f"spec.data.train.{_field(data.train)}": data.train.source}
    sections = {name: (path, data.train) for name, path in found.items() if path}
    if data.validation is not None:
        own = data.validation
        section = TrainDataSpec(path=own.source, max_prompt_length=data.train.max_prompt_length)
        if own.source:
            sections[f"spec.data.validation.{_field(own)}"] = (own.source, section)
    return sections


def _field(section: TrainDataSpec | ValidationDataSpec) -> str:
    return next((name for name in ("split", "tasks") if getattr(section, name)), "path")


def data_problem(name: str, path: str, form: RowForm = VERL, images: ImagesSpec | None = None) -> Problem | None:
    """Return the first problem of a file, a pattern or a folder of rows, or None."""
    try:
        for row in checked_rows(path, form):
            _check_images(row, images)
    except RowError as error:
        return problem_of_rows(name, error)
    return None


def problem_of_rows(name: str, error: RowError) -> Problem:
    """Return what a reader of rows refuses as the problem of the field that names them."""
    return Problem(name, f"{error.path}: {error.complaint}", error.remedy)


def shared_extra_info(path: str, form: RowForm) -> set[str]:
    """Return the keys of ``extra_info`` that every row of data without problems has."""
    shared: set[str] | None = None
    for row in checked_rows(path, form):
        keys = row.row.extra_info.keys()
        shared = set(keys) if shared is None else shared & keys
    return shared or set()


def _check_images(row: NumberedRow, images: ImagesSpec | None) -> None:
    if images is None:
        return
    try:
        row_files(row.row.prompt, row.images, row.path.parent, images.max_per_prompt)
    except ImageError as error:
        complaint = f"row {row.number}: column {IMAGES_COLUMN} {error.complaint}"
        raise RowError(row.path, complaint, error.remedy) from error


class _Pass:
    """Go once over the rows of one path: check all, render them or a part of them.

    Args:
        section: which rows the job uses.
        renderer: None: nothing is rendered.
        facts: collects what the rows are.
    """

    def __init__(
        self, job: RLJob, section: TrainDataSpec, renderer: PromptRenderer | None, facts: FactsOfRows | None
    ) -> None:
        self._job = job
        self._section = section
        self._renderer = renderer
        self._facts = facts
        self.rules = RuleChecks(job.spec.reward)
        self._rows = 0
        self._truths = 0
        self._characters = 0
        self._lengths: list[int] = []
        self._longest: RenderedRow | None = None
        self._selection: Any = None

    def problem(self, name: str, path: str) -> Problem | None:
        """Return the first problem of the rows, or None."""
        rows = self._read(path)
        try:
            if self._renderer is None:
                for _ in rows:
                    pass
                return None
            return self._render(name, path, rows)
        except RowError as error:
            return problem_of_rows(name, error)

    def _read(self, path: str) -> Iterator[NumberedRow]:
        """Yield the rows to render."""
        data = self._job.spec.data
        for row in checked_rows(path, RowForm.of_data(data)):
            _check_images(row, data.images)
            self.rules.add(row)
            if self._facts:
                self._facts.add(row)
            self._rows += 1
            self._truths += row.row.ground_truth is not None
            if self._rows <= _ALL_RENDERED and self._characters <= _ALL_RENDERED_CHARACTERS:
                self._characters += _num_characters(row.row.prompt)
                yield row
            elif self._rows % _EACH_OF_MORE == 0:
                yield row

    def _render(self, name: str, path: str, rows: Iterator[NumberedRow]) -> Problem | None:
        import numpy as np

        from plaudit_workers.training.prompts import Selection

        assert self._renderer is not None
        self._selection = Selection(self._section.max_prompt_length, self._section.pass_rate)
        for rendered in self._renderer.rendered(rows):
            self._lengths.append(rendered.length)
            self._selection.wants(rendered.numbered, rendered.length)
            if self._longest is None or rendered.length > self._longest.length:
                self._longest = rendered
        if self._selection.used:
            return None
        complaint, remedy = self._selection.refusal(np.asarray(self._lengths))
        return Problem(name, f"{path}: {complaint}", remedy, also=("spec.data.train.maxPromptLength",))

    def notes(self, name: str, path: str) -> Iterator[Problem]:
        """Yield how many rows are used, why others are not, their lengths, and that no ground truth is there."""
        if self._rows and not self._truths and any(each.kind == "python" for each in self._job.spec.reward.scorers):
            remedy = "Reward functions get None; if rows have one, spec.data.columns.groundTruth names its column"
            yield Problem(name, f"{path}: every ground truth is null", remedy)
        if self._renderer is None or self._longest is None:
            return
        import numpy as np

        from plaudit_workers.training.prompts import lengths_in_words

        selection, rendered = self._selection, len(self._lengths)
        part = "" if rendered == self._rows else f" (rendered: {rendered:,} of {self._rows:,})"
        message = f"{path}: {selection.in_words()}{part}"
        longest = self._longest.numbered
        remedy = f"Prompts have {lengths_in_words(np.asarray(self._lengths))}; the longest is row {longest.number}"
        yield Problem(name, message, f"{remedy} of {longest.path.name}{self._visits(rendered)}")

    def _visits(self, rendered: int) -> str:
        train = self._job.spec.data.train
        if self._section is not train or train.mixture or rendered < self._rows:
            return ""
        return f". {self._selection.visits(self._job.spec.algorithm)}"


def _num_characters(prompt: str | list[dict[str, Any]]) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(content) for message in prompt if isinstance(content := message.get("content"), str))


def _checked_renderer(job: RLJob, report: DataReport, away: Sequence[Problem]) -> PromptRenderer | None:
    """Return what renders the job's prompts if its files are here; add what is wrong with its template."""
    model, name = job.spec.model, _tokenizer_field(job)
    source = model.tokenizer or model.source
    has_transformers, missing = find_spec("transformers") is not None, None
    tools = _tools(job, report, away) if has_transformers else []
    if not has_transformers:
        missing = "transformers is not installed here"
    elif is_hub_id(source) and not hub_cache(source).is_dir():
        missing = f"the files of {source} are not on this machine"
    if missing:
        remedy = "The trainer does both when the run starts"
        report.notes.append(Problem(name, f"{missing}: prompts were not rendered, lengths not counted", remedy))
        return None
    if report.problems:
        return None
    from plaudit_workers.tokenizer import ChatTemplate
    from plaudit_workers.training.prompts import PromptRenderer

    try:
        template = ChatTemplate.of_model(model, tools, only_here=is_hub_id(source))
        images = _loaded_images(job, template)
    except RefusedError as error:
        field_name, _, rest = str(error).partition(" ")
        report.problems.append(Problem(f"spec.{field_name}", *_halves(rest)))
        return None
    problems, notes = _template_problems(job, template)
    report.problems += problems
    report.notes += notes
    return None if problems else PromptRenderer.of_job(job, template, images)


_UNDESCRIBED = "Lengths are counted without its tools: leave room for them in data.train.maxPromptLength"


def _without_tools(cause: str) -> Problem:
    return Problem("spec.rollout.agent", cause, _UNDESCRIBED)


def _halves(text: str) -> tuple[str, str]:
    message, _, remedy = text.partition(". ")
    return message, remedy or "Correct it"


def _tools(job: RLJob, report: DataReport, away: Sequence[Problem]) -> list[dict[str, Any]]:
    """Return the tools that prompts list; what cannot be loaded or described is a problem."""
    agent = job.spec.rollout.agent
    if away:
        return []
    if agent.kind == "environment" and agent.environment:
        report.notes.append(_without_tools("a run starts the environment's server, which describes its tools"))
        return []
    limit_s = _SERVER_ANSWERS_WITHIN_S if agent.kind == "environment" and agent.url else None
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
            return thread.submit(asyncio.run, _described_within(job, limit_s)).result()
    except Exception as error:  # of users' files and servers
        said = str(error).removeprefix("spec.rollout.agent: ") if isinstance(error, RefusedError) else described(error)
        if limit_s is not None:
            report.notes.append(_without_tools(f"{agent.url} does not describe its tools ({said})"))
            return []
        name = "spec.rollout.agent.tools" if agent.kind == "tools" else "spec.rollout.agent"
        report.problems.append(Problem(name, said, "See docs/agents.md"))
        return []


async def _described_within(job: RLJob, limit_s: float | None) -> list[dict[str, Any]]:
    async with asyncio.timeout(limit_s):
        return await described_tools(job, loads_all=True)


def _loaded_images(job: RLJob, template: ChatTemplate) -> ImageProcessor | None:
    """Load the processor of a job that reads images from files of this machine, and give its template."""
    model, settings = job.spec.model, job.spec.data.images
    if settings is None:
        return None
    images = ImageProcessor.of_model(model, settings, UnstoredImages(), only_here=is_hub_id(model.source))
    images.give_template(template, model)
    return images


def _template_problems(job: RLJob, template: ChatTemplate) -> tuple[list[Problem], list[Problem]]:
    """Return what is wrong with a template whatever the rows are, and what a user should know of it."""
    model, name = job.spec.model, _template_field(job)
    if template.tokenizer.chat_template is None:
        remedy = "Contents of messages are joined by line ends; set model.chatTemplate for another form"
        return [], [Problem(name, "the tokenizer has no chat template", remedy)]
    from jinja2 import TemplateSyntaxError

    try:
        text = template.render([_USER], generate=True)
    except TemplateSyntaxError as error:
        return [Problem(name, f"the chat template is no Jinja (line {error.lineno}: {error.message})", "Mend it")], []
    except Exception as error:  # of the template's own expressions
        complaint = f"the chat template refuses a message of the user ({described(error)})"
        return [Problem(name, complaint, "Mend it, or give what it needs in model.chatTemplateArguments")], []
    problems, bare = [], type(template)(template.tokenizer, [], model.chat_template_arguments)
    if text == template.render([_OTHER], generate=True):
        complaint = "the chat template ignores messages: two prompts become the same text"
        problems.append(Problem(name, complaint, "Write their contents: {{ message['content'] }}"))
    elif template.tools and text == bare.render([_USER], generate=True):
        complaint = "the chat template has no place for tools, so the model would never see them"
        problems.append(Problem(name, complaint, "Name a template that writes tools", also=("spec.rollout.agent",)))
    return problems, [*_notes(job, template, text)]


def _template_field(job: RLJob) -> str:
    return "spec.model.chatTemplate" if job.spec.model.chat_template else _tokenizer_field(job)


def _tokenizer_field(job: RLJob) -> str:
    return "spec.model.tokenizer" if job.spec.model.tokenizer else "spec.model.source"


def _notes(job: RLJob, template: ChatTemplate, text: str) -> Iterator[Problem]:
    if text == template.render([_USER], generate=False):
        complaint = "the chat template writes nothing for add_generation_prompt"
        yield Problem(_template_field(job), complaint, "The policy continues right after the last message")
    written = str(template.tokenizer.chat_template)
    for argument in job.spec.model.chat_template_arguments:
        if argument not in written:
            field = f"spec.model.chatTemplateArguments.{argument}"
            yield Problem(field, "is not read by the chat template", "Correct its name, or remove it")
    from plaudit_workers.rollout.agents.chat import ChatSuffix

    if remark := ChatSuffix(template).goes_on(job.spec.rollout.sampling.stops):
        complaint, _, remedy = remark.partition(". ")
        yield Problem(_template_field(job), complaint, remedy)


class RuleChecks:
    """Find the rows that the job's rules cannot score now, not at sample 10,000."""

    def __init__(self, reward: RewardSpec) -> None:
        self._scorers = {field: scorer for field, scorer in reward.by_field.items() if scorer.kind == "rule"}
        self._unknown: set[str] = set()
        self._first: dict[tuple[str, str], tuple[int, str]] = {}
        """Scorer's field and rule → number and problem of the first row whose ground truth that rule cannot use."""
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, row: NumberedRow) -> None:
        """Look at one row."""
        from plaudit_reward.rules.ground_truths import ground_truth_problem  # a job without data needs no rules
        from plaudit_reward.rules.scorer import rule_of

        for field_name, scorer in self._scorers.items():
            rule = scorer.rule or rule_of(row.row.data_source)
            if rule is None:
                self._unknown.add(row.row.data_source)
                continue
            arguments = scorer.rule_arguments if scorer.rule else scorer.rule_arguments.get(rule, {})
            if problem := ground_truth_problem(rule, arguments, row.row.ground_truth):
                self._counts[field_name, rule] += 1
                self._first.setdefault((field_name, rule), (row.number, problem))

    def problems(self, field: str, path: str) -> Iterator[Problem]:
        """Report sources without a rule, then rows by rule; each involves its scorer, which may itself be broken."""
        if self._unknown:
            scorer_field, name = next((each, it.name) for each, it in self._scorers.items() if it.rule is None)
            yield Problem(
                field,
                f"{path} has data_source {', '.join(map(repr, sorted(self._unknown)))}, for which scorer {name!r} has "
                "no rule",
                "Name a rule in the scorer (rule: gsm8k), or score it with a function (kind: python)",
                also=(scorer_field,),
            )
        for (scorer_field, rule), count in self._counts.items():
            number, problem = self._first[scorer_field, rule]
            name = self._scorers[scorer_field].name
            rows = "1 row has a ground truth" if count == 1 else f"{count:,} rows have ground truths"
            yield Problem(
                field,
                f"{path}: {rows} that rule {rule} of scorer {name!r} cannot use; the first is row {number}: {problem}",
                "Mend or remove these rows, or name another rule",
                also=(scorer_field,),
            )
