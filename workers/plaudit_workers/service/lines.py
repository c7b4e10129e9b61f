"""Read samples and describe their scores: JSON lines or Parquet rows of the commands and of the service's clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec

from plaudit_job.data_row import extra_info_of
from plaudit_wire.errors import RefusedError
from plaudit_wire.plain import PlainDataError, plain, plain_json
from plaudit_wire.printable import shown
from plaudit_wire.records import Outcome, Sample, ScoringRecord
from plaudit_workers.data_files import BYTE_ORDER_MARK, batch_rows, whole_line

NumTokens = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class SampleInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold one response to score, with the columns of its data row (verl's names)."""

    response: str
    prompt: str | list[dict[str, Any]] = ""
    """Text, or chat messages."""
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}
    response_tokens: NumTokens = 0
    max_tokens: NumTokens = 0
    """The limit on the response's tokens; for length penalties."""
    finish_reason: Literal["stop", "length", "timeout"] = "stop"
    id: str = ""
    """Id of the sample, repeated in its score; empty: a scoring service generates one."""

    def sample(self, group: str, index: int) -> Sample:
        """Return the sample for the scorers, as number ``index`` of a group."""
        chat = not isinstance(self.prompt, str)
        messages: Any = self.prompt if chat else []
        return Sample(
            group=group,
            index=index,
            data_source=self.data_source,
            prompt="\n".join(str(message.get("content", "")) for message in messages) if chat else str(self.prompt),
            response=self.response,
            ground_truth=self.ground_truth,
            extra_info=self.extra_info,
            messages=messages,
            response_tokens=self.response_tokens,
            max_tokens=self.max_tokens,
            finish_reason=self.finish_reason,
        )


class ScorerOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold the result of one scorer."""

    outcome: Outcome
    value: float | None = None
    reason: str | None = None
    seconds: float = 0.0
    """Limits, retries and the call together."""
    extra: dict[str, float | str] = {}


class SampleOutput(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Hold the result of one sample; ``score`` is present exactly when ``outcome`` is ``scored``."""

    id: str = ""
    """The id of the input, where it has one."""
    score: float | None
    outcome: Outcome
    reason: str | None
    scorers: dict[str, ScorerOutput]
    version: str = ""
    """Version of the scoring that a service scored it with."""

    @classmethod
    def from_record(cls, record: ScoringRecord, id: str = "", **further: Any) -> Self:  # noqa: A002 (the field's name)
        """Convert the record of a pipeline; ``further`` are the other fields of the class."""
        scorers = {
            name: ScorerOutput(
                of.outcome, of.value, of.reason, round(of.limiter_s + of.retry_s + of.call_s, 6), dict(of.extra)
            )
            for name, of in record.scorers.items()
        }
        return cls(
            id=id,
            score=record.value,
            outcome=record.outcome,
            reason=record.reason,
            scorers=scorers,
            version=record.version,
            **further,
        )


RawSample = bytes | Mapping[str, Any]
"""One line, not decoded yet, or one row."""
Numbered = tuple[int, RawSample]
"""With the number of its line or row, which all ``responses`` of one share."""
EXPECTED = (
    "A line is a JSON object with response, and optionally prompt, data_source, ground_truth (or verl's reward_model), "
    "extra_info, response_tokens, max_tokens, finish_reason, id"
)


def read_samples(path: Path) -> Iterator[SampleInput]:
    """Yield the samples of a file of JSON lines or Parquet rows; skip empty lines."""
    for number, entry in file_entries(path):
        if not entry or not (isinstance(entry, Mapping) or entry.strip()):
            continue
        if isinstance(entry, Mapping):  # of verl's responses: a service scores each by itself
            entry = {name: value for name, value in entry.items() if name not in _OF_GROUPS}
        try:
            yield decode_entry(entry, SampleInput)
        except ValueError as error:
            raise RefusedError(f"{path}:{number}: {error}. {EXPECTED}") from error


Input = TypeVar("Input", bound=SampleInput)


def decode_entry(entry: RawSample, kind: type[Input]) -> Input:
    """Read the sample of a line or row; raise as ``sample_input``, also if the line is not a JSON object."""
    row = entry if isinstance(entry, Mapping) else plain_json(entry.removeprefix(BYTE_ORDER_MARK))
    if not isinstance(row, Mapping):
        raise PlainDataError(f"is {shown(row)}", "write one JSON object a line")
    return sample_input(row, kind)


_IGNORED = ("ability", "agent_name")
"""Columns of verl's data files that no scorer reads."""
_OF_GROUPS = ("group", "index")


def sample_input(row: Mapping[str, Any], kind: type[Input]) -> Input:
    """Convert a row: null means absent, verl's ``reward_model`` holds the ground truth, extra_info may be JSON text.

    Raise ``ValueError`` (msgspec's error is one) for a missing or unknown field, one of the wrong type, and a value
    that cannot travel (``plaudit_wire.plain``).
    """
    fields = {name: value for name, value in row.items() if value is not None and name not in _IGNORED}
    reward_model = fields.pop("reward_model", None)
    if isinstance(reward_model, Mapping):
        fields.setdefault("ground_truth", reward_model.get("ground_truth"))
    if "extra_info" in fields:
        fields["extra_info"] = extra_info_of(fields["extra_info"])
    fields = {name: plain(value, name) for name, value in fields.items()}
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("`$.")[2].rstrip("`")
        if name not in fields:
            raise
        raise ValueError(f"{name} is {shown(fields[name])}: {error}") from error


_PARQUET_MAGIC = b"PAR1"
_ROWS_AT_A_TIME = 1024
_COLUMNS = (*SampleInput.__struct_fields__, "reward_model", "group", "index")
"""Columns of a Parquet file that are read; others are ignored."""
_GENERATED = "responses"
"""verl's column for the responses of one prompt."""


def file_entries(path: Path, option: str = "") -> Iterator[Numbered]:
    """Yield the lines or rows of a file, from 1 on; Parquet is recognised by its content."""
    named = f"{option} {path}".strip()
    if path.exists() and not path.is_file() and not path.is_dir():  # it may give its content once, or never end
        remedy = "write the samples to one, or pipe them to 'plaudit score --input -'"
        raise RefusedError(f"{named} is no regular file: {remedy}")
    try:
        with path.open("rb") as file:
            begins = file.read(len(_PARQUET_MAGIC))
            if not begins and path.suffix == ".parquet":  # as a writer leaves it that was cut off
                raise RefusedError(f"{named} is empty, which no Parquet file is. Write it again")
            if begins != _PARQUET_MAGIC:
                file.seek(0)
                number = 0
                while line := whole_line(file, str(path)):
                    number += 1
                    yield from line_entries(line, number)
                return
        yield from _rows(path)
    except OSError as error:
        raise RefusedError(f"{named} cannot be read: {error.strerror or error}") from error


def line_entries(line: bytes, number: int) -> Iterator[Numbered]:
    """Yield a line of JSON, or a row for each of its ``responses``. ``number`` names the line's group."""
    if f'"{_GENERATED}"'.encode() not in line:
        yield number, line
        return
    try:
        row = plain_json(line)
    except ValueError:  # whoever decodes the line reports it
        row = None
    yield from _responses(row, "line", number) if isinstance(row, dict) else [(number, line)]


def _rows(path: Path) -> Iterator[Numbered]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as opened:
            names = opened.schema_arrow.names
            _refuse_without_responses(path, names)
            columns = [name for name in (*_COLUMNS, _GENERATED) if name in names]
            batches = opened.iter_batches(_ROWS_AT_A_TIME, columns=columns)
            for number, row in enumerate(batch_rows(path, batches), 1):
                yield from _responses(row, "row", number)
    except pyarrow.ArrowException as error:
        raise RefusedError(f"{path} is a damaged Parquet file: {error}") from error


def _responses(row: dict[str, Any], kind: str, number: int) -> Iterator[Numbered]:
    """Yield one row for each of verl's ``responses``, or the row itself."""
    responses = row.pop(_GENERATED, None)
    if responses is None or "response" in row:
        yield number, row
        return
    for response in responses if isinstance(responses, list) else [responses]:
        yield number, {"group": f"{kind}-{number}", **row, "response": response}


def _refuse_without_responses(path: Path, names: list[str]) -> None:
    if "ground_truth_json" in names:
        raise RefusedError(f"{path} has the stored samples of a run. Score them with: plaudit rescore {path} --job …")
    if "response" not in names and _GENERATED not in names:
        raise RefusedError(
            f"{path} has no column response or responses (it has {', '.join(names) or 'none'}). To try scorers on data "
            "without responses, use: plaudit try JOB"
        )
