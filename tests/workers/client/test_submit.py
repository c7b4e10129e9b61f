"""``plaudit submit``: order, a kill in the middle, what is refused."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from plaudit_wire.redis import RedisAddress
from plaudit_workers.cli import main
from plaudit_workers.stream.transport import Transport

SLOW = {"name": "slow", "kind": "python", "python": {"path": "reward.py", "function": "slow"}, "isolation": "thread"}


def write_samples(path: Path, count: int) -> Path:
    lines = [json.dumps({"response": str(i), "ground_truth": str(i)}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.long
async def test_killed_it_goes_on_and_no_sample_is_scored_or_written_twice(start_service: Any, tmp_path: Path) -> None:
    samples, output = write_samples(tmp_path / "samples.jsonl", 39), tmp_path / "scores.jsonl"
    with samples.open("a") as file:
        file.write(json.dumps({"response": "held", "ground_truth": "39"}) + "\n")
    async with start_service(SLOW) as service:
        arguments = ["submit", str(samples), "-o", str(output), "--redis", service.server.url, "--run", service.run]
        environment = {**os.environ, "PLAUDIT_REDIS_PASSWORD": service.server.password}
        command = [sys.executable, "-m", "plaudit_workers.cli", *arguments]
        first = await asyncio.create_subprocess_exec(*command, env=environment)
        while not output.exists() or output.read_bytes().count(b"\n") < 5:
            await asyncio.sleep(0.01)
        first.kill()
        await first.wait()
        assert output.read_bytes().count(b"\n") < 40
        (tmp_path / "let-go").touch()
        with output.open("ab") as file:
            file.write(b'{"score": 0.')  # what a kill may leave of a line
        second = await asyncio.create_subprocess_exec(*command, env=environment)
        assert await second.wait() == 0
        values = [json.loads(line)["score"] for line in output.read_text().splitlines()]
        assert values == [float(i) for i in range(40)]
        transport = await Transport.open(RedisAddress(service.server.url, service.server.password), service.run)
        scored = Counter(e[b"group"] for _, e in await transport.commands.xrange(transport.names.events))
        assert len(scored) == 40
        assert set(scored.values()) == {1}
        assert await transport.commands.zcard(transport.names.sessions) == 0  # what was finished is not kept
        await transport.close()


@pytest.mark.long
async def test_it_waits_for_a_run_that_is_still_starting(start_service: Any, tmp_path: Path) -> None:
    samples, output = write_samples(tmp_path / "samples.jsonl", 3), tmp_path / "scores.jsonl"
    async with start_service(SLOW) as service:
        arguments = [str(samples), "-o", str(output), "--runs-folder", str(tmp_path), "--run", "later", "--wait", "60"]
        command = [sys.executable, "-m", "plaudit_workers.cli", "submit", *arguments]
        submitting = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        assert submitting.stderr is not None
        assert b"no scoring service with the name later" in await submitting.stderr.readline()  # it says what it awaits
        left = {"redis": {"url": service.server.url, "password": service.server.password}, "run": service.run}
        (tmp_path / "later").mkdir()
        (tmp_path / "service.json").write_text(json.dumps(left))
        (tmp_path / "service.json").rename(tmp_path / "later" / "service.json")
        await submitting.communicate()
        assert submitting.returncode == 0
    assert len(output.read_text().splitlines()) == 3


async def test_an_edited_input_is_not_given_the_old_scores(
    start_service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, output = tmp_path / "samples.jsonl", tmp_path / "scores.jsonl"
    rows = [{"response": str(i), "ground_truth": str(i), "id": f"mine-{i}"} for i in range(3)]
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "let-go").touch()
    async with start_service(SLOW) as service:
        monkeypatch.setenv("PLAUDIT_REDIS_PASSWORD", service.server.password)
        command = ["submit", str(samples), "-o", str(output), "--redis", service.server.url, "--run", service.run]
        assert await asyncio.to_thread(main, command) == 0
        assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == ["mine-0", "mine-1", "mine-2"]
        assert ": scored 3; mean score 1\n" in capsys.readouterr().err
        assert await asyncio.to_thread(main, command) == 0
        assert "already has the scores of all 3 samples" in capsys.readouterr().err
        before = output.read_text()
        samples.write_text(samples.read_text().replace('"response": "1"', '"response": "2"'))
        assert await asyncio.to_thread(main, command) == 2
        assert "line 2 is not the score of sample 2 of" in capsys.readouterr().err
        assert output.read_text() == before


@pytest.mark.long
async def test_it_follows_a_service_that_is_resumed_on_another_port(
    start_service: Any, tmp_path: Path, run_name: str
) -> None:
    samples, output, run = write_samples(tmp_path / "samples.jsonl", 4), tmp_path / "scores.jsonl", tmp_path / run_name
    run.mkdir()

    def announce(url: str, password: str) -> None:
        (tmp_path / "new").write_text(json.dumps({"redis": {"url": url, "password": password}, "run": run_name}))
        (tmp_path / "new").rename(run / "service.json")

    announce("redis://127.0.0.1:1/0", "gone")
    (tmp_path / "let-go").touch()
    arguments = [str(samples), "-o", str(output), "--runs-folder", str(tmp_path), "--wait", "60"]
    submitting = await asyncio.create_subprocess_exec(sys.executable, "-m", "plaudit_workers.cli", "submit", *arguments)
    async with start_service(SLOW) as service:
        await asyncio.sleep(1.0)
        assert submitting.returncode is None
        announce(service.server.url, service.server.password)
        assert await submitting.wait() == 0
    assert len(output.read_text().splitlines()) == 4


@pytest.mark.long
async def test_scores_of_two_versions_of_a_service_are_never_mixed(
    start_service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, output = write_samples(tmp_path / "samples.jsonl", 3), tmp_path / "scores.jsonl"
    (tmp_path / "let-go").touch()
    async with start_service(SLOW) as service:
        monkeypatch.setenv("PLAUDIT_REDIS_PASSWORD", service.server.password)
        command = ["submit", str(samples), "-o", str(output), "--redis", service.server.url, "--run", service.run]
        assert await asyncio.to_thread(main, command) == 0
        first = json.loads(output.read_text().splitlines()[0])
        assert first["version"]
        earlier = json.dumps({**first, "version": "earlier"}, separators=(",", ":")) + "\n"
        output.write_text(earlier)
        capsys.readouterr()
        assert await asyncio.to_thread(main, command) == 2
    refused = capsys.readouterr().err
    assert (
        "the service's scorers have changed: the samples before were scored by version earlier, sample 2 by" in refused
    )
    assert f"--output {output}" in refused
    assert output.read_text() == earlier


REDIS = ["--redis", "redis://127.0.0.1:1/0"]
REFUSED = [
    (["{folder}/absent.jsonl"], "absent.jsonl cannot be read"),
    (["{folder}/bad.jsonl"], "bad.jsonl:2: Object contains unknown field `answer`. A line is a JSON object with"),
    (["{folder}/good.jsonl", "--runs-folder", "{folder}"], "has no scoring service"),
    (["{folder}/good.jsonl", "--runs-folder", "{folder}", "--run", "x"], "no scoring service with the name x"),
    (["{folder}/good.jsonl", "--redis", "redis://127.0.0.1:1/0", "--run", "x"], "cannot be reached"),
    (["{folder}/good.jsonl", "--redis", "redis://127.0.0.1:1/abc", "--run", "x"], "the URL of Redis cannot be read"),
    (
        ["{folder}/good.jsonl", "--redis", "redis://127.0.0.1:1/0", "-o", "{folder}/long.jsonl"],
        "long.jsonl: line 1 is not the score of sample 1 of",
    ),
    (["{folder}/pipe"], "pipe is no regular file: write the samples to one"),
    (["{folder}/good.jsonl", "-o", "{folder}/good.jsonl"], "good.jsonl is the input"),
    (["{folder}/good.jsonl", "-o", "{folder}/linked.jsonl"], "linked.jsonl is the input"),
    (["{folder}/good.jsonl", "-o", "{folder}/pipe", *REDIS], "pipe cannot be written: File or stream is not seekable"),
    (["{folder}/good.jsonl", "-o", "{folder}", *REDIS], "cannot be written: Is a directory"),
    (["{folder}/good.jsonl", "-o", "{folder}/notes", *REDIS], "notes: line 1 is not the score of sample 1. Delete it"),
    (["{folder}/good.jsonl", "-o", "{folder}/taken", *REDIS], "taken belongs to a command that is under way"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_unusable_arguments_are_refused_with_their_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    write_samples(tmp_path / "good.jsonl", 3)
    write_samples(tmp_path / "long.jsonl", 9)
    (tmp_path / "bad.jsonl").write_text('{"response": "1"}\n{"answer": "1"}\n')
    (tmp_path / "linked.jsonl").hardlink_to(tmp_path / "good.jsonl")
    (tmp_path / "notes").write_text('{"id": "mine"}')
    os.mkfifo(tmp_path / "pipe")
    taken = (tmp_path / "taken").open("w")
    fcntl.flock(taken, fcntl.LOCK_EX)
    assert main(["submit", *(argument.format(folder=tmp_path) for argument in arguments)]) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "notes").read_text() == '{"id": "mine"}'
    assert len((tmp_path / "good.jsonl").read_text().splitlines()) == 3
    taken.close()


@pytest.mark.long
async def test_lines_with_verl_s_responses_are_scored_one_by_one(start_service: Any, tmp_path: Path) -> None:
    samples, output = tmp_path / "samples.jsonl", tmp_path / "scores.jsonl"
    row = {"reward_model": {"ground_truth": "4"}, "responses": ["4", "5"]}
    samples.write_text(json.dumps(row) + "\n")
    async with start_service() as service:
        arguments = ["submit", str(samples), "-o", str(output), "--redis", service.server.url, "--run", service.run]
        environment = {**os.environ, "PLAUDIT_REDIS_PASSWORD": service.server.password}
        command = [sys.executable, "-m", "plaudit_workers.cli", *arguments]
        running = await asyncio.create_subprocess_exec(*command, env=environment)
        assert await running.wait() == 0
    assert [json.loads(line)["score"] for line in output.read_text().splitlines()] == [1.0, 0.0]


@pytest.mark.parametrize("content", ["[1]", '{"run": "r", "redis": {"url": "http://elsewhere/"}}', '{"run": 5}'])
def test_a_file_that_names_no_service_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "service.json").write_text(content)
    samples = write_samples(tmp_path / "samples.jsonl", 1)
    assert main(["submit", str(samples), "--runs-folder", str(tmp_path)]) == 2
    assert f"{tmp_path}/r/service.json holds no address of a service" in capsys.readouterr().err
    assert main(["submit", str(samples), "--redis", "http://elsewhere/"]) == 2
    assert "write redis://host:port/0" in capsys.readouterr().err
