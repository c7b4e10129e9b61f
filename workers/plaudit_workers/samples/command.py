"""``plaudit samples RUN``: print stored samples of a run, with their texts, scores and reasons."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from plaudit_metrics.sources.samples.conversation import completion_messages
from plaudit_metrics.sources.samples.files import UnreadableFileError
from plaudit_metrics.sources.samples.query import FAILED, SampleQuery
from plaudit_metrics.sources.samples.texts import MOST_CHARACTERS, TextBudget
from plaudit_wire.errors import RefusedError
from plaudit_workers.process import EXIT_DONE
from plaudit_workers.rescore.rows import sample_files, samples_path
from plaudit_workers.samples.selection import Row, first_samples, lowest_samples, scorer_values

_TEXT_CHARACTERS = 1000
_STEP = re.compile(r"step-(\d+)-")


def samples(arguments: argparse.Namespace) -> int:
    """Run the command."""
    files = sample_files(samples_path(arguments.run, arguments.runs_folder))
    if arguments.step is not None:
        files = _of_step(files, arguments.step)
    query = SampleQuery(
        outcome=FAILED if arguments.failed else arguments.outcome,
        lowest=arguments.lowest_score,
        highest=arguments.highest_score,
        data_source=arguments.data_source,
        group=arguments.group,
        prompt_id=arguments.prompt,
    )
    select = lowest_samples if arguments.lowest else first_samples
    try:
        chosen = select(files, query, arguments.most)
    except UnreadableFileError as error:
        raise RefusedError(f"{error}. Give a run's id, or its samples folder") from error
    if arguments.json:
        for row in chosen:
            print(msgspec.json.encode(row).decode())
        return EXIT_DONE
    console = Console()
    if not chosen:
        console.out(_none(query, arguments.lowest), highlight=False)
    for row in chosen:
        for line in sample_lines(row, arguments.full):
            console.print(line, soft_wrap=True, highlight=False)
    return EXIT_DONE


def _none(query: SampleQuery, lowest: bool) -> str:
    if query == SampleQuery(outcome=FAILED):
        return "every stored sample has a score"
    if lowest:
        return "no stored sample has a score: plaudit samples RUN --failed prints the reasons"
    return "no stored sample fulfils these conditions"


def _of_step(files: list[Path], step: int) -> list[Path]:
    by_step = {int(found[1]): file for file in files if (found := _STEP.match(file.name))}
    if step not in by_step:
        stored = f"steps {min(by_step)} to {max(by_step)} are" if by_step else "no step is"
        raise RefusedError(f"--step {step}: no samples of that step are stored ({stored})")
    return [by_step[step]]


def sample_lines(row: Row, full: bool) -> Iterator[Text]:
    """Yield the lines that show a sample; control characters of its texts are printed as escapes."""
    score = "no score" if row["score"] is None else f"score {row['score']:g}"
    head = f"step {row['step']} · group {row['group']} sample {row['index']} · {row['data_source']} · {score}"
    yield Text(_printable(head), style="bold red" if row["score"] is None else "bold")
    if row["score"] is None:
        yield _line("reason", f"{row['outcome'] or row['end']}: {row['reason'] or row['end_reason'] or ''}", full)
    for name, value in scorer_values(row).items():
        yield _line(name, value, full)
    yield _line("prompt", row["prompt"] or "", full)
    if row.get("completion_json"):
        yield from _conversation(row, full)
    else:
        yield _line("response", row["response"] if row["response"] is not None else "(not generated)", full)
    yield _line("ground truth", _decoded(row["ground_truth_json"]), full)
    yield Text()


def _conversation(row: Row, full: bool) -> Iterator[Text]:
    """Yield the messages after the prompt, with the tool calls of each turn."""
    for message in completion_messages(row, TextBudget(MOST_CHARACTERS)):
        notes = [] if message.generate_s is None else [f"{message.generate_s:.3g} s"]
        notes += [] if message.reward is None else [f"reward {message.reward:g}"]
        role = " ".join([message.role, message.name]).strip()
        yield _line(f"{role} ({', '.join(notes)})" if notes else role, message.content.text, full)
        for call in message.calls:
            took = "" if call.call_s is None else f", {call.call_s:.3g} s"
            yield _line(f"  calls {call.tool} ({call.outcome or 'no record'}{took})", call.arguments.text, full)


def _line(name: str, text: str, full: bool) -> Text:
    shown = text if full or len(text) <= _TEXT_CHARACTERS else f"{text[:_TEXT_CHARACTERS]}… (--full)"
    return Text.assemble((f"  {_printable(name)}: ", "dim"), _printable(shown))


def _decoded(json: str | None) -> str:
    value = msgspec.json.decode(json) if json else None
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _printable(text: str) -> str:
    """Return the text with its lines indented, and escapes in place of other control characters."""
    shown = "".join(
        sign if sign.isprintable() or sign == "\n" else sign.encode("unicode_escape").decode() for sign in text
    )
    return shown.replace("\n", "\n    ")
