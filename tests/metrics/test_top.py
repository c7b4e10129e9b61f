"""``plaudit top`` shows what a service or a run's folder tells: one frame without a terminal, a live screen on one."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from plaudit_metrics.terminal import overview as overview_module
from plaudit_metrics.terminal.commands import top_arguments
from plaudit_metrics.terminal.overview import MetricsService, RunFolder, RunOverview
from plaudit_metrics.terminal.top import frame, top


def parsed(*texts: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    top_arguments(parser)
    return parser.parse_args(texts)


def test_a_service_is_asked_for_everything(observed_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert top(parsed("--url", observed_run.metrics)) == 0
    shown = capsys.readouterr().out
    for part in (
        "observed",
        "waited for",
        "sample_queue",
        "scored",
        "queues",
        "prompts",
        "slowest samples",
        "reward-0",
    ):
        assert part in shown


def test_a_folder_tells_the_same_of_its_steps_and_samples(observed_run: Any) -> None:
    asked, read = MetricsService(observed_run.metrics).read(), RunFolder(observed_run.folder).read()
    assert [step["step"] for step in read.steps] == [step["step"] for step in asked.steps]
    assert (read.verdict or {})["verdict"] == (asked.verdict or {})["verdict"]
    assert [(s["group"], s["index"]) for s in read.samples] == [(s["group"], s["index"]) for s in asked.samples]
    assert (asked.streams.keys() > set(), read.streams) == (True, {})


def test_a_run_that_closed_no_step_yet_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert RunFolder(tmp_path).read() == RunOverview(tmp_path.name)
    assert top(parsed(str(tmp_path))) == 0
    assert "no step has closed yet" in capsys.readouterr().out


def test_failures_of_the_open_step_and_of_the_newest_are_shown_with_their_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failure = {"scorer": "mine", "outcome": "data_error", "reason": "KeyError: 'a' (reward.py:2 in f)", "count": 36}
    step = {
        "step": 9, "opened": 0.0, "closed": 9.0, "verdict": "reward", "reward_pipeline/masked_share": 0.25,
        "reward_pipeline/scorer/slow/reasons": "12 × took longer than 5 s",
    }  # fmt: skip
    overview = RunOverview("r", None, [step], failures={"samples": 64, "unscored": 36, "failures": [failure]})
    Console(width=120).print(frame(overview))
    shown = capsys.readouterr().out
    assert "36 of 64 samples (56%) have no score" in shown
    assert "mine: 36 × KeyError: 'a' (reward.py:2 in f)" in shown
    assert "slow: 12 × took longer than 5 s" in shown


def test_names_and_texts_are_neither_markup_nor_escape_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "[/x][bold]\x1b]0;owned\x07\x1b[2J\x9b31m"
    verdict = {"recent_verdict": evil, "step": 1, "verdict": evil, "explanation": evil}
    step = {"step": 1, "opened": 0.0, "closed": 1.0, "verdict": evil, "reward_pipeline/scorer/[/x]/reasons": evil}
    sample = {"group": evil, "index": 0, "wall_s": 1.0, "stages_s": {evil: 1.0}, "scoring": {"worker": evil}}
    depth = {"undelivered": 1, "in_flight": 1, "oldest_undelivered_s": 0.0, "oldest_in_flight_s": 0.0}
    failure = {"scorer": evil, "outcome": "data_error", "reason": evil, "count": 1}
    failures = {"samples": 1, "unscored": 1, "failures": [failure]}
    overview = RunOverview(
        evil, verdict, [step], [sample], {evil: depth}, [{"worker": evil, "version": evil}], failures
    )
    Console(width=300).print(frame(overview, trouble=evil))
    Console(width=300).print(frame(RunOverview(evil)))
    shown = capsys.readouterr().out
    assert "[/x][bold]" in shown
    assert [each for each in shown if not each.isprintable() and each != "\n"] == []


def test_80_columns_without_colours_can_be_read(observed_run: Any) -> None:
    console = Console(width=80, no_color=True, record=True)
    console.print(frame(MetricsService(observed_run.metrics).read(), width=80))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    (head,) = (number for number, line in enumerate(lines) if "where the time went" in line)
    assert lines[head].split() == [
        "step",
        "reward",
        "step",
        "s",
        "no",
        "score",
        *["where", "the", "time", "went", "waited", "for"],
    ]
    rows = lines[head + 1 : head + 1 + observed_run.num_steps]
    for row in rows:
        assert re.search(r"^ *\d+ .* [TGoqLSgrPR]{28,30} +[a-z-]+", row), row
    legend = next(line for line in lines if "T trainer" in line)
    assert "G generation" in legend
    assert any("S score" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "no run 'nobody'"),
        (["--url", "http://127.0.0.1:1"], "does not respond"),
        (["--url", "ftp://here"], "give the address of a metrics service"),
        ([], "give a run"),
    ],
)
def test_a_run_that_cannot_be_shown_is_reported(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert top(parsed(*arguments)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("key", [b"q", b"jkq", b"\x03"], ids=["q", "other keys and q", "Ctrl-C"])
def test_on_a_terminal_it_continues_until_it_is_ended(observed_run: Any, key: bytes) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "plaudit_workers.cli", "top", str(observed_run.folder), "--every", "0.2"]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "50"}
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
        preexec_fn=_own_tty,
    )
    os.close(theirs)
    try:
        assert "waited for" in read_until(ours, "waited for")
        os.write(ours, key)
        assert exit_code(process, ours) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


STEP = {"step": 1, "opened": 0.0, "closed": 1.0, "verdict": "x"}
LOOKS = {"open": {"waits_for": "x", "text": "t"}, "looks": [], "workers": [], "service": None, "ended": None}
ANSWERS = {"steps": {"run": "r", "steps": []}, "queues": LOOKS, "failures": {}}


class Service:
    """Whatever answers at a URL: ``answer`` by the last part of the path, or bytes that are sent as they are."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = ANSWERS
        self.sent = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            path = connection.recv(65536).split(b" ")[1].decode()
            body = json.dumps(self.answers[re.split(r"[/?]", path)[3]]).encode()
            head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
            connection.sendall(self.sent or head + body)
            while self.sent.endswith(b" "):  # byte by byte, each in time
                connection.sendall(b" ")
                time.sleep(0.02)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": []},
        {"steps": None},
        {"queues": {}},
        {"queues": {**LOOKS, "ended": 7}},
        {"queues": {**LOOKS, "workers": 5}},
        {"queues": {**LOOKS, "workers": [{"worker": "w", "slots": "[/x]"}]}},
        {"steps": {"run": "r", "steps": [{**STEP, "step_s": "x"}]}},
        {"steps": {"run": "r", "steps": [{**STEP, "step_s": 1 << 2000}]}},
        {"failures": {"unscored": 5, "samples": 0}},
    ],
)
def test_what_no_metrics_service_sends_is_reported_in_a_line(
    service: Service, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    service.answers = {**ANSWERS, "verdict": {}, **changes}
    service.answers["steps"] = changes.get("steps", ANSWERS["steps"])
    assert top(parsed("--url", service.url)) == 2
    assert re.fullmatch(r".*(of this version|does not respond).*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"hello\r\n", "does not respond"),
        (b"HTTP/1.1 200 OK\r\n\r\n{", "does not respond"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, "does not respond: maximum recursion depth"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000, "its answer has more than 0 MiB"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n ", "its answer has not come within 0.5 s"),
        (b"HTTP/1.1 200 OK\r\na: ", "has not responded within 1 s"),
    ],
)
def test_what_is_no_answer_is_reported_in_its_time(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sent: bytes, words: str
) -> None:
    monkeypatch.setattr(overview_module, "_WITHIN_S", 0.5)
    monkeypatch.setattr(overview_module, "_WHOLE_WITHIN_S", 1.0)
    monkeypatch.setattr(overview_module, "_MOST_BYTES", 1000 if "0 MiB" in words else 1 << 20)
    service.sent = sent
    assert top(parsed("--url", service.url)) == 2
    assert words in capsys.readouterr().err


def test_an_interval_that_is_no_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for interval in ("nan", "inf", "-1", "1e9"):
        with pytest.raises(SystemExit):
            parsed("r", "--every", interval)
    assert "'1e9' is no number of seconds up to 86400" in capsys.readouterr().err


def test_a_log_that_names_no_address_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    lines = ["[" * 100_000, '{"message": "serving"}', '{"message": "serving", "address": 5}', "no JSON"]
    (tmp_path / "logs" / "metrics-0.log").write_text("\n".join(lines))
    assert top(parsed(str(tmp_path))) == 0
    assert "no step has closed yet" in capsys.readouterr().out


@pytest.mark.long
def test_a_service_that_gets_stuck_or_goes_leaves_the_last_view_and_the_keys(service: Service) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "plaudit_workers.cli", "top", "--url", service.url, "--every", "0.2"]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=_own_tty
    )
    os.close(theirs)
    try:
        assert "no step has closed" in read_until(ours, "no step has closed")
        service.answers = dict.fromkeys(ANSWERS, 5)
        assert "of this version" in read_until(ours, "of this version")
        service.sent = b"HTTP/1.1 200 OK\r\na: "
        assert "has not responded for" in read_until(ours, "has not responded for")
        os.write(ours, b"\x03")
        assert exit_code(process, ours) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _own_tty() -> None:
    """The terminal's Ctrl-C reaches the processes of the session that it controls."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def exit_code(process: subprocess.Popen[bytes], terminal: int) -> int | None:
    """Reads on until it has ended, for a terminal that nobody reads holds up whoever draws on it."""
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            with suppress(OSError):  # its other end is closed
                os.read(terminal, 65536)
    return process.poll()


def read_until(terminal: int, text: str) -> str:
    shown, deadline = "", time.monotonic() + 30
    while text not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


@pytest.mark.parametrize("width", [80, 100])
def test_every_line_of_a_frame_fits_a_narrow_terminal_and_can_be_read_without_colour(width: int) -> None:
    figures = {
        "reward/mean": 0.4321, "step_s": 45.2, "wait/generation_s": 15.0, "wait/score_s": 8.0,
        "reward_pipeline/masked_share": 0.0312, "reward_pipeline/score_s/max": 1.0,
    }  # fmt: skip
    steps = [{"step": n, "opened": 0.0, "closed": 45.2, "verdict": "reward-queue", **figures} for n in (12345, 12346)]
    verdict = {"recent_verdict": "generation", "step": 12346, "verdict": "reward-queue", "explanation": "word " * 40}
    sample = {
        "group": "t-123456-1.0",
        "index": 11,
        "wall_s": 41.23,
        "scoring": {"worker": "reward-demo-experiment-7f6b9c-xk2lp"},
    }
    sample |= {"stages_s": {"generation": 20.1, "sample_queue": 12.2, "limiter": 6.1}}
    depth = {"undelivered": 0, "in_flight": 64, "oldest_undelivered_s": 0.0, "oldest_in_flight_s": 47.2}
    worker = {"worker": "rollout-demo-7f6b9c-xk2lp", "slots": 64, "busy": 32, "version": "1.12345"}
    opened = {"waits_for": "scorer", "text": "step 12347, open for 45 s: 64 calls of slow in flight, the oldest 47 s"}
    overview = RunOverview("demo", verdict, steps, [sample], {"samples": depth}, [worker], open=opened)
    console = Console(width=width, color_system=None, record=True)
    console.print(frame(overview, width=width))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line]
    for part in (
        r"12345 +0\.432 +45\.20 +3\.1% T+G+S+ +reward-queue",
        r"t-123456-1\.0/11 +41\.23",
        "32 of 64",
        "samples +0 +64 +47.2",
    ):
        assert [line for line in lines if re.search(part, line)], part


def test_a_service_is_shown_with_its_scorers_and_the_end_of_a_run_with_its_reason() -> None:
    scorer = {"scorer": "judge", "p50_s": 1.2, "p95_s": 2.2, "max_s": 3.0, "outcomes": {"scored": 10, "timeout": 2}}
    minutes = [{"scored": 4, "unscored": 1}, {"scored": 0, "unscored": 0}]
    console = Console(width=100, color_system=None, record=True)
    console.print(frame(RunOverview("svc", service={"minutes": minutes, "callers": ["a", "b"], "scorers": [scorer]})))
    console.print(frame(RunOverview("gone", ended="the run failed (3): no such model")))
    shown = console.export_text()
    assert "a scoring service: 5 samples in the last whole minute, for 2 callers lately" in shown
    assert re.search(r"judge +1\.200 +2\.200 +3\.000 +2", shown)
    assert "the run failed (3): no such model" in shown


def test_while_the_service_is_gone_nothing_old_is_called_new(capsys: pytest.CaptureFixture[str]) -> None:
    opened = {"waits_for": "scorer", "text": "step 12, open for 45 s: 64 calls of slow in flight"}
    Console(width=100).print(frame(RunOverview("r", open=opened), trouble="the service does not respond"))
    shown = capsys.readouterr().out
    assert shown.index("the service does not respond") < shown.index("when it last responded: step 12, open for 45 s")
    assert "now:" not in shown
