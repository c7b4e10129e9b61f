"""``plaudit samples RUN``: print stored samples of a run, with their texts, scores and reasons.

Select stored samples of a run: the first that fulfil conditions, or those with the lowest scores.

``plaudit runs list|delete``: list the runs whose keys an external Redis holds, or delete the keys of finished ones.

A job's own Redis ends with its run. An external one keeps the counters and streams of every run until they are deleted
here, each by its id or all that have been silent for some days (from a CronJob, say). Prints JSON: one object a run and
line. Exit code 2 where a run could not be deleted.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from rich.console import Console
from rich.text import Text

from plaudit_metrics.sources.samples import MOST_CHARACTERS, TextBudget, UnreadableFileError, completion_messages
from plaudit_metrics.sources.search import FAILED, SampleFile, SampleQuery
from plaudit_wire.errors import RefusedError
from plaudit_wire.names import Names
from plaudit_wire.records import LIVE_WITHIN_S
from plaudit_wire.redis import OUTAGE
from plaudit_workers.commands.rescore_rows import sample_files, samples_path
from plaudit_workers.process import EXIT_DONE, EXIT_REFUSED, redis_from

Row = Mapping[str, Any]

"""A stored sample by the columns of docs/stored-samples.md."""


def first_samples(files: Sequence[Path], query: SampleQuery, most: int) -> list[Row]:
    """Return the first samples that fulfil the conditions, in the order of the files.

    Raises:
        UnreadableFileError: a file does not hold stored samples.
    """
    chosen: list[Row] = []
    for path in files:
        with SampleFile(path) as file:
            chosen += map(file.read, file.find(query)[: most - len(chosen)].tolist())
        if len(chosen) == most:
            break
    return chosen


def lowest_samples(files: Sequence[Path], query: SampleQuery, most: int) -> list[Row]:
    """Return the samples with the lowest scores of all that fulfil the conditions, the lowest first.

    Raises:
        UnreadableFileError: a file does not hold stored samples.
    """
    least = -math.inf if query.lowest is None else query.lowest  # leaves out samples without a score
    query = replace(query, lowest=least, order="lowest")
    lowest: list[tuple[float, int, int]] = []
    for number, path in enumerate(files):
        with SampleFile(path, ["score"]) as file:
            found = [(file.read(row)["score"], number, row) for row in file.find(query)[:most].tolist()]
        lowest = heapq.nsmallest(most, [*lowest, *found])
    return [_row(files[number], row) for _, number, row in lowest]


def _row(path: Path, row: int) -> Row:
    with SampleFile(path) as file:
        return file.read(row)


def scorer_values(row: Row) -> dict[str, str]:
    """Return, by scorer, its value, or its outcome and reason: ``{"mine": "data_error: KeyError 'answer'"}``."""
    names = [column.split("/")[1] for column in row if column.startswith("scorer/") and column.endswith("/outcome")]
    return {name: _value(row, name) for name in names if row[f"scorer/{name}/outcome"] is not None}


def _value(row: Row, scorer: str) -> str:
    value, outcome = row[f"scorer/{scorer}/value"], row[f"scorer/{scorer}/outcome"]
    reason = row.get(f"scorer/{scorer}/reason")
    prefix = f"scorer/{scorer}/extra/"
    extras = [
        f"{column.removeprefix(prefix)} {extra:g}"
        if isinstance(extra, float)
        else f"{column.removeprefix(prefix)} {extra}"
        for column, extra in row.items()
        if column.startswith(prefix) and extra is not None
    ]
    result = str(outcome) if value is None else f"{value:g}"
    return ", ".join([f"{result}: {reason}" if reason else result, *extras])


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


_SCANNED_AT_ONCE = 1000

_TIMEOUT_S = 30.0

_DAY_S = 86_400.0


def runs(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.action == "delete" and bool(arguments.runs) == bool(arguments.silent_for):
        raise RefusedError("plaudit runs delete needs the ids of runs (plaudit runs list), or --silent-for DAYS")
    return asyncio.run(_runs(arguments))


async def _runs(arguments: argparse.Namespace) -> int:
    address = redis_from(os.environ, arguments.redis)
    client = address.client(timeout_s=_TIMEOUT_S, retries=3)
    try:
        if arguments.action == "list":
            found = await _keys_of_runs(client)
            for run in sorted(found):
                _print({"run": run, "keys": found[run], "last_heartbeat_s": await _silent_s(client, run)})
            return EXIT_DONE
        chosen = arguments.runs or await _silent_runs(client, arguments.silent_for * _DAY_S)
        fine = [await _delete(client, run) for run in chosen]
        return EXIT_DONE if all(fine) else EXIT_REFUSED
    except (AuthenticationError, NoPermissionError) as error:
        raise RefusedError(
            f"Redis at {address.url} refuses: {error}. Give its password in PLAUDIT_REDIS_PASSWORD"
        ) from error
    except ResponseError as error:
        raise RefusedError(f"Redis at {address.url} refuses: {error}") from error
    except OUTAGE as error:
        unreachable = f"Redis at {address.url} cannot be reached: {error}. Is it running?"
        raise RefusedError(await address.tls_problem(error) or unreachable) from error
    finally:
        await client.aclose(close_connection_pool=True)


async def _keys_of_runs(client: Redis) -> Counter[str]:
    found: Counter[str] = Counter()
    async for key in client.scan_iter("plaudit:{*}:*", count=_SCANNED_AT_ONCE):
        found[key.decode().partition("{")[2].partition("}")[0]] += 1
    return found


async def _silent_runs(client: Redis, silent_s: float) -> list[str]:
    """Return the runs of which no process reported for so long; what never reported may not be a run of Plaudit."""
    silences = {run: await _silent_s(client, run) for run in sorted(await _keys_of_runs(client))}
    return [run for run, silence in silences.items() if silence is not None and silence >= silent_s]


async def _silent_s(client: Redis, run: str) -> float | None:
    """Return the seconds since a process of the run last reported; None if none ever did."""
    workers = Names(run).workers
    if await client.type(workers) != b"zset":  # missing, or written by something else under a run's name
        return None
    newest: Any = await client.zrevrange(workers, 0, 0, withscores=True)
    seconds, microseconds = await client.time()
    return round(seconds + microseconds / 1e6 - newest[0][1], 1) if newest else None


async def _delete(client: Redis, run: str) -> bool:
    silent_s = await _silent_s(client, run)
    if silent_s is not None and silent_s < LIVE_WITHIN_S:
        problem = f"a process of it reported {silent_s:.0f} s ago. Stop the run first"
        return _print({"run": run, "deleted": 0, "problem": problem}, fine=False)
    deleted, some = 0, list[bytes]()
    async for key in client.scan_iter(f"{Names(run).prefix}*", count=_SCANNED_AT_ONCE):
        some.append(key)
        if len(some) >= _SCANNED_AT_ONCE:
            deleted += await client.unlink(*some)
            some.clear()
    if some:
        deleted += await client.unlink(*some)
    if not deleted:
        return _print({"run": run, "deleted": 0, "problem": "no such run; see plaudit runs list"}, fine=False)
    return _print({"run": run, "deleted": deleted})


def _print(content: dict[str, object], *, fine: bool = True) -> bool:
    print(msgspec.json.encode(content).decode())
    return fine
