"""Dead letters: looked at, put back once, dropped; and the command that does it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builders import make_body, make_prompt, scored
from plaudit_wire.redis import RedisAddress
from plaudit_workers.cli import EXIT_REFUSED, main
from plaudit_workers.commands.runs import DeadLetters, Letter
from plaudit_workers.launch.transport import write_redis_address
from plaudit_workers.stream.calls import retry_dead
from plaudit_workers.stream.consumer import commit, dead_letter, publish, unpublished
from plaudit_workers.stream.transport import Transport

REASON = "3 workers were lost with it in work"


@pytest.fixture
async def buried(run: Any, transport: Transport) -> tuple[DeadLetters, Letter]:
    """A group of two samples, the first of which is a dead letter."""
    for delivery in (await run.published(n=2))[:1]:
        assert await dead_letter(transport, delivery, REASON)
        run.samples.finished(delivery)
    letters = DeadLetters(transport)
    [letter] = await letters.list()
    return letters, letter


async def finish(run: Any, transport: Transport) -> None:
    for delivery in [*run.samples._leases.in_work.values(), *await run.samples.take(8)]:
        await commit(transport, delivery, scored(1.0))
        run.samples.finished(delivery)


async def test_a_dead_letter_names_its_entry(buried: tuple[DeadLetters, Letter], run: Any) -> None:
    letters, letter = buried
    assert (letter.stream, letter.role, letter.group, letter.index) == ("samples", "reward", "t-0-1.0", 0)
    assert (letter.reason, letter.deliveries, letter.consumer) == (REASON, 1, "reward-0")
    assert 0 <= letter.age_s < 100
    assert await letters.payload(letter) == make_body(make_prompt(), 0).sample


async def test_a_retried_sample_is_scored_and_its_group_trained(
    buried: tuple[DeadLetters, Letter], run: Any, transport: Transport
) -> None:
    letters, letter = buried
    assert await letters.retry(letter) == "retried"
    assert await letters.retry(letter) == "unknown"
    assert await letters.list() == []
    assert (await run.trainer.counters())["poison"] == 0
    await finish(run, transport)
    [group] = await run.trainer.take_ready(8, 0.0)
    assert [sample.scoring.outcome for sample in group.samples] == ["scored", "scored"]
    assert await run.trainer.close(group.id, "trained")
    assert await transport.commands.xlen(transport.names.samples) == 0


async def test_a_call_that_arrives_twice_puts_the_sample_back_once(
    buried: tuple[DeadLetters, Letter], transport: Transport
) -> None:
    _, letter = buried
    again = retry_dead(letter.group, letter.id)
    answers = [await transport.scripts.run(again) for _ in range(3)]
    assert answers == ["retried"] * 3
    assert await transport.commands.xlen(transport.names.samples) == 2
    assert await transport.commands.hget(transport.names.group(letter.group), "open") == b"2"


async def test_a_group_that_has_ended_takes_nothing_back(
    buried: tuple[DeadLetters, Letter], run: Any, transport: Transport
) -> None:
    letters, letter = buried
    await finish(run, transport)  # the second sample: with it the group is complete
    before = await transport.commands.hgetall(transport.names.group(letter.group))
    assert await letters.retry(letter) == "ended"
    assert await transport.commands.hgetall(transport.names.group(letter.group)) == before
    [group] = await run.trainer.take_ready(8, 0.0)
    await run.trainer.close(group.id, "dropped", "too_few_scored")
    assert await letters.retry(letter) == "ended"
    assert await letters.drop(letter)
    assert not await letters.drop(letter)


async def test_a_retried_prompt_generates_its_unpublished_samples(run: Any, transport: Transport) -> None:
    prompt = await run.admitted(n=3)
    await publish(transport, prompt, 1, make_body(prompt.payload, 1))
    await dead_letter(transport, prompt, REASON)
    run.prompts.finished(prompt)
    letters = DeadLetters(transport)
    [letter] = await letters.list()
    assert await letters.retry(letter) == "retried"
    [again] = await run.prompts.take(1)
    assert (await unpublished(transport, again.payload), again.deliveries) == ([0, 2], 1)
    assert (prompt.new, again.new) == (True, False)


@pytest.fixture
def command(
    address: RedisAddress, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[Any]]]:
    """``plaudit dead`` on the run, as it would be after ``plaudit run``: exit code and lines."""
    folder = tmp_path / run_name
    folder.mkdir()
    write_redis_address(folder, address)

    def run(action: str, *names: str) -> tuple[int, list[Any]]:
        code = main(["dead", action, run_name, *names, "--runs-folder", str(tmp_path)])
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


async def test_the_command_lists_shows_retries_and_drops(
    buried: tuple[DeadLetters, Letter], command: Callable[..., tuple[int, list[Any]]], address: RedisAddress
) -> None:
    letter = buried[1].id
    code, [listed] = await asyncio.to_thread(command, "list")
    assert (code, listed["id"], listed["reason"], listed["role"]) == (0, letter, REASON, "reward")
    code, [shown] = await asyncio.to_thread(command, "show", letter)
    assert (code, shown["payload"]["response"]) == (0, "12")
    assert await asyncio.to_thread(command, "retry", "all") == (0, [{"id": letter, "retried": True}])
    code, [again] = await asyncio.to_thread(command, "retry", letter)
    assert (code, again["retried"]) == (EXIT_REFUSED, False)
    assert "no such letter" in again["problem"]
    assert await asyncio.to_thread(command, "list") == (0, [])


def test_a_missing_dead_letter_is_reported(
    address: RedisAddress, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAUDIT_REDIS_PASSWORD", address.password)
    for arguments, words in (
        (["list", "gone", "--runs-folder", str(tmp_path)], "Is gone a run in that folder (--runs-folder)?"),
        (["list", "gone", "--redis", address.url], "there is no run gone at"),
        (["list", "gone", "--redis", "redis://127.0.0.1:1"], "is run gone running?"),
        (["drop", "gone"], "needs ids of letters"),
    ):
        assert main(["dead", *arguments]) == EXIT_REFUSED
        assert words in capsys.readouterr().err
