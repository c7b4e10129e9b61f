"""Read a job file, report every problem with its line, and write a job back as YAML.

Pydantic stops at the first error inside a section. So each pass removes the broken fields from a copy, and the next
pass validates the rest. Rules about several fields then run on what is left; a rule that involves a broken field is
skipped, because it would report values that nobody wrote.

A job is written with every default spelled out, nothing empty and no nulls; reading it gives the same job.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import ConstructorError, RoundTripConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.scanner import RoundTripScanner, ScannerError

from plaudit_job.fields import (
    Location,
    field_at,
    field_name,
    meant_field,
    null_problem,
    problem_of,
    resolve_paths,
    section_of,
)
from plaudit_job.problem import JobError, Problem, did_you_mean, is_within, nearest
from plaudit_job.rules.job import rule_problems
from plaudit_job.spec.reward_service import document_model, validated_job
from plaudit_job.spec.rljob import TRAINING_SECTIONS, RLJob
from plaudit_job.spec.section import Section, choices, written_fields
from plaudit_wire.plain import MOST_LEVELS, PlainDataError, plain
from plaudit_wire.printable import shown

_NOT_IN_YAML = re.compile(r"[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""Characters that JSON may hold as they are, and YAML only escaped, or in another sense."""
_YAML_1_1 = VersionedResolver(version="1.1")
_TEXT = "tag:yaml.org,2002:str"
_MOST_BYTES = 1 << 20
_MOST_UNITS = 4 << 20
"""Size of a job as ``plain`` counts it: an alias (``*name``) counts as often as it is used."""
_ROUNDS = 20
"""Most passes; each finds every error that one pass of pydantic can see."""


def load_job(path: Path | str) -> RLJob:
    """Read the job of a file and make every path absolute; a RewardService is read as a job that only scores.

    Raise ``JobError`` with every problem of the file; the files that it names are not opened.
    """
    path = Path(path)
    document = Document(_text(path), path)
    _job(document, path)
    return validated_job(resolve_paths(document.data, path.resolve().parent))


def examine_job(path: Path | str) -> Examination:
    """Read the job of a file, paths absolute, with every problem that the file alone shows.

    Raise ``JobError`` only if the file cannot be read, or is not a YAML mapping.
    """
    path = Path(path)
    document = Document(_text(path), path)
    return examine(resolve_paths(document.data, path.resolve().parent))


def read_job(path: Path | str) -> RLJob:
    """Read the job of a file with its paths as written, for Kubernetes; raise as ``load_job`` does."""
    return _job(Document(_text(Path(path)), path), path)


def parse_job(written: Mapping[str, Any]) -> RLJob:
    """Validate plain data with the names of the YAML form; raise ``JobError`` with every problem, without lines."""
    return _sound(examine(written))


def locate(problems: Sequence[Problem], path: Path | str) -> list[Problem]:
    """Add the line of each problem's field in the job file."""
    return _located(problems, Document(_text(Path(path)), path))


def _job(document: Document, path: Path | str) -> RLJob:
    examination = examine(document.data)
    return _sound(replace(examination, problems=_located(examination.problems, document)), path)


def _sound(examination: Examination, path: Path | str = "") -> RLJob:
    if examination.job is None or examination.problems:
        raise JobError(examination.problems, path)
    return examination.job


def _located(problems: Sequence[Problem], document: Document) -> list[Problem]:
    return [replace(problem, line=document.line(problem.location)) for problem in problems]


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise JobError([Problem("", f"has more than {_MOST_BYTES >> 20} MiB", "Give the path of a job file")], path)
        return content.decode("utf-8")
    except FileNotFoundError as error:
        beside = (str(file) for file in path.parent.glob("*.y*ml"))
        remedy = did_you_mean(nearest(str(path), beside, likeness=0.8)) or "Give the path of a job file"
        raise JobError([Problem("", "no such file", remedy)], path) from error
    except UnicodeDecodeError as error:
        raise JobError([Problem("", "not UTF-8 text", "Give the path of a YAML file")], path) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise JobError([Problem("", f"cannot read it: {reason}", "Give a file that you can read")], path) from error


@dataclass(frozen=True)
class Examination:
    """Hold the result of validating a job's data."""

    job: RLJob | None
    """The job; where there are problems, a job without the broken fields, for further checks. None: too broken."""
    problems: list[Problem]
    broken: tuple[str, ...] = ()
    """Written names of the fields that were removed from ``job``."""

    def concerning(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems of a further check that involve no broken field."""
        return [problem for problem in problems if not any(self._touches_broken(field) for field in problem.fields)]

    def _touches_broken(self, field: str) -> bool:
        return is_within(field, self.broken) or any(is_within(part, (field,)) for part in self.broken)


def examine(written: Mapping[str, Any]) -> Examination:
    """Validate fields first, then the rules about several fields."""
    data = copy.deepcopy(dict(written))
    root = document_model(data)
    problems = list(_take_out_nulls(data, root, ()))
    broken = [problem.field for problem in problems]
    for _ in range(_ROUNDS):
        try:
            job = validated_job(data)
        except ValidationError as error:
            located = [(detail, _location(detail, data)) for detail in error.errors(include_url=False)]
            problems += [problem for problem in _described(located, root) if not is_within(problem.field, broken)]
            broken += [_take_out(data, detail, location, root) for detail, location in located]
        else:
            examination = Examination(job, problems, tuple(broken))
            return replace(examination, problems=problems + examination.concerning(rule_problems(job.spec)))
    return Examination(None, problems, tuple(broken))


def _described(located: Sequence[tuple[ErrorDetails, Location]], root: type[BaseModel]) -> list[Problem]:
    """Return one problem for each field; pydantic reports one error for each type of a union."""
    by_location: dict[Location, list[ErrorDetails]] = {}
    for detail, location in located:
        by_location.setdefault(location, []).append(detail)
    # What is missing only because its name is mistyped is no problem of its own.
    unknown = [location for location, details in by_location.items() if details[0]["type"] == "extra_forbidden"]
    mistyped = {meant_field(root, location) for location in unknown}
    return [
        problem_of(details, root, location)
        for location, details in by_location.items()
        if location not in mistyped or details[0]["type"] != "missing"
    ]


def _location(detail: ErrorDetails, data: object) -> Location:
    """Return the location as written; pydantic adds the types of a union, or ``[key]`` for a key."""
    location: list[str | int] = []
    node = data
    for part in detail["loc"]:
        written = _holds(node, part)
        if written or (detail["type"] == "missing" and isinstance(node, dict)):
            location.append(part)
        if not written:
            break
        node = _inside(node, part)
    return tuple(location)


def _holds(node: object, part: str | int) -> bool:
    if isinstance(node, list):
        return isinstance(part, int) and part < len(node)
    return isinstance(node, dict) and part in node


def _take_out(data: dict[str, Any], detail: ErrorDetails, location: Location, root: type[BaseModel]) -> str:
    """Remove the broken part from ``data``, or add a stand-in for a missing one; return its written name.

    A broken entry removes its whole list, because the indices of the other entries must stay.
    """
    way = list(location)
    while isinstance(way[-1], int):
        way.pop()
    parent: Any = data
    for part in way[:-1]:
        parent = _inside(parent, part)
    if detail["type"] == "missing":
        parent[way[-1]] = _stand_in(field_at(root, tuple(way)))
    elif isinstance(parent, dict):
        parent.pop(way[-1], None)
    return field_name(way)


def _inside(node: Any, part: str | int) -> Any:
    """Return a part of plain data; an empty mapping where an earlier error removed it."""
    if isinstance(node, list):
        return node[int(part)]
    return node.get(part, {}) if isinstance(node, dict) else {}


def _stand_in(field: FieldInfo | None) -> Any:
    """Return a valid value for a required field, so that the other fields can be validated; it is never shown."""
    if field is None or get_origin(field.annotation) is dict:
        return {}
    if get_origin(field.annotation) is list:
        return [{}]
    if values := choices(field):
        return values[0]
    scalars: dict[Any, Any] = {str: "x", int: 1, float: 1.0, bool: False}
    return scalars.get(field.annotation, {})


def _take_out_nulls(data: dict[str, Any], section: type[BaseModel], way: Location) -> Iterator[Problem]:
    """Remove and report null fields: the API server rejects null for numbers, so a job file rejects it everywhere."""
    fields = written_fields(section)
    for key in [key for key in data if key in fields]:
        value, here = data[key], (*way, key)
        inner = section_of(fields[key].annotation)
        if value is None:
            del data[key]
            yield null_problem(here)
        elif inner and isinstance(value, dict):
            yield from _take_out_nulls(value, inner, here)
        elif inner and isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _take_out_nulls(item, inner, (*here, index))


class Document:
    """Hold one YAML document. Raise ``JobError`` if it is not one mapping; ``path`` is for the messages."""

    def __init__(self, text: str, path: Path | str = "") -> None:
        self._tree = _parse(text, path)
        try:
            self.data: dict[str, Any] = plain(self._tree, most_units=_MOST_UNITS)
        except PlainDataError as error:
            problem = Problem(error.where, error.complaint, f"{error.remedy[0].upper()}{error.remedy[1:]}")
            raise JobError(_located([problem], self), path) from None

    def line(self, location: Location) -> int | None:
        """Return the line of a part (from 1), or of the nearest enclosing part; None for the root."""
        node: object = self._tree
        line: int | None = None
        for key in location:
            if isinstance(node, CommentedMap) and key in node:
                with contextlib.suppress(KeyError):  # merged keys (<<) have no line
                    line = int(node.lc.key(key)[0]) + 1
                node = node[key]
            elif isinstance(node, CommentedSeq) and isinstance(key, int) and key < len(node):
                line = node.lc.item(key)[0] + 1
                node = node[key]
            else:
                break
        return line


def _parse(text: str, path: Path | str) -> CommentedMap:
    try:
        tree = _reader().load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise JobError([_syntax(message, mark.line + 1 if mark else None)], path) from error
    except (ReaderError, YAMLError, ValueError) as error:
        raise JobError([_syntax(str(error).partition("\n")[0], None)], path) from error
    except RecursionError as error:
        raise JobError([_syntax("nested too deeply", None)], path) from error
    if not isinstance(tree, CommentedMap):
        kind = "a list" if isinstance(tree, CommentedSeq) else "a single value"
        found = "is empty" if tree is None else f"contains {kind} instead of a mapping"
        raise JobError([Problem("", f"the file {found}", "Start it with apiVersion: and kind: RLJob")], path)
    return tree


def _reader() -> YAML:
    yaml = YAML(typ="rt")
    yaml.Scanner = _Scanner
    yaml.Constructor = _Constructor
    return yaml


class _Scanner(RoundTripScanner):
    """Refuse deep brackets at once: the time that ruamel.yaml needs grows with the square of their depth."""

    def fetch_flow_collection_start(self, *arguments: Any, **named: Any) -> None:
        """Begin a list or mapping in brackets."""
        if self.flow_level >= MOST_LEVELS:
            raise ScannerError(None, None, f"nested more than {MOST_LEVELS} levels deep", self.reader.get_mark())
        super().fetch_flow_collection_start(*arguments, **named)


class _Constructor(RoundTripConstructor):
    """Name the scalar that looks like a number or a date, and is none; refuse a mapping or a list as a key."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct a value."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError, ArithmeticError) as error:  # of a tag that the text does not fit
            message = f"{shown(node.value)} cannot be read ({error})"
            raise ConstructorError(None, None, message, node.start_mark) from None

    def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
        """Return True for a key that the mapping does not have yet."""
        if not isinstance(key_node, ScalarNode):
            raise ConstructorError(None, None, "a mapping or a list stands where a key should", key_node.start_mark)
        return bool(super().check_mapping_key(node, key_node, mapping, key, value))


def _syntax(message: str, line: int | None) -> Problem:
    return Problem("", f"not valid YAML: {message}", "Fix the syntax (indentation, quotes, brackets)", line)


def dump_job(job: RLJob) -> str:
    """Return the job as YAML text."""
    yaml = YAML()
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.width = 120
    stream = io.StringIO()
    yaml.dump(job_data(job), stream)
    return stream.getvalue()


def dump_json(data: Mapping[str, Any]) -> str:
    """Return the job as JSON, which is YAML 1.2 too: it is written a hundred times as fast as YAML."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def job_data(job: RLJob) -> dict[str, Any]:
    """Return the job as plain data in YAML's names."""
    data = section_data(job)
    if not job.spec.trains:
        for section in TRAINING_SECTIONS:
            data["spec"].pop(section, None)
    return data


def section_data(section: Section) -> dict[str, Any]:
    """Return every field of a section but those that are absent, or empty by default."""
    data = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        written = _plain(value)
        if value is None:
            continue
        if written in ("", [], {}):
            default = field.default_factory() if field.default_factory else field.default  # type: ignore[call-arg]
            if value == default:
                continue
        data[field.alias or name] = written
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return section_data(value)
    return [_plain(item) for item in value] if isinstance(value, list) else value


class _Representer(RoundTripRepresenter):
    """Write values so that readers of YAML 1.1 and 1.2 agree on them.

    To the older version 1e-06 is text, and the texts ``NO`` and ``1:30`` are a boolean and a number.
    """

    def represent_str(self, data: str) -> ScalarNode:
        plain = _YAML_1_1.resolve(ScalarNode, data, (True, False)) == _TEXT
        return self.represent_scalar(_TEXT, data, style=None if plain else "'")

    def represent_float(self, value: float) -> ScalarNode:
        digits = repr(value)
        if "e" in digits and "." not in digits:
            digits = digits.replace("e", ".0e")
        return self.represent_scalar("tag:yaml.org,2002:float", digits)


_Representer.add_representer(str, _Representer.represent_str)
_Representer.add_representer(float, _Representer.represent_float)
