"""The lines that ``plaudit run`` prints between two closed steps."""

import io

import msgspec

from plaudit_wire.records import Failure, WorkerRecord
from plaudit_workers.launch.live import LiveMessages, NewestSnapshot, RunConsole

EXPECTED = [("trainer", "trainer-0"), ("rollout", "rollout-0"), ("model-helpful", "model-helpful-0")]


def test_processes_that_are_loading_are_named_after_three_seconds_and_when_there_are_fewer() -> None:
    messages = LiveMessages(EXPECTED)
    rollout = WorkerRecord("rollout-0-ab12", "rollout", ready=False)
    assert messages.waiting([], 1.0) == []
    assert messages.waiting([], 3.2) == ["waiting for rollout-0, trainer-0 to load (3 s) …"]
    assert messages.waiting([rollout], 4.0) == []
    trainer = WorkerRecord("trainer-0-cd34", "trainer")
    assert messages.waiting([rollout, trainer], 9.0) == ["waiting for rollout-0 to load (9 s) …"]
    assert messages.waiting([rollout, trainer], 20.0) == []
    assert messages.waiting([rollout, trainer], 40.0) == ["waiting for rollout-0 to load (40 s) …"]
    ready = WorkerRecord("rollout-0-ab12", "rollout")
    assert messages.waiting([ready, trainer], 80.0) == []
    assert messages.waiting([], 120.0) == []  # it lives, and its heartbeat is late


def test_the_first_reason_of_each_kind_is_printed_once() -> None:
    messages = LiveMessages(EXPECTED)
    first = Failure("mine", "data_error", "KeyError: 'answer' (reward.py:2 in compute_score)", 3)
    assert messages.failures([first]) == ["no score from mine: 3 × KeyError: 'answer' (reward.py:2 in compute_score)"]
    later = Failure("mine", "data_error", first.reason, 64)
    assert messages.failures([later]) == []
    slow = Failure("mine", "timeout", "no result within 2 s", 1)
    assert messages.failures([later, slow]) == ["no score from mine: 1 × no result within 2 s"]


def test_a_reason_cannot_control_the_terminal() -> None:
    (line,) = LiveMessages(EXPECTED).failures([Failure("mine", "data_error", "\x1b]0;owned\x07 \x9b2J", 1)])
    assert line == "no score from mine: 1 × �]0;owned� �2J"


def test_a_problem_is_printed_when_it_is_new() -> None:
    messages = LiveMessages(EXPECTED)
    paused = WorkerRecord(
        "trainer-0-cd34", "trainer", problem="step 10 not trained: 56 % without a score, again in 60 s"
    )
    assert messages.problems([paused]) == [f"trainer-0: {paused.problem}"]
    assert messages.problems([paused]) == []
    assert messages.problems([WorkerRecord("trainer-0-cd34", "trainer")]) == []
    assert messages.problems([paused]) == [f"trainer-0: {paused.problem}"]


def test_a_notice_is_printed_once_even_after_the_trainer_was_started_anew() -> None:
    messages = LiveMessages(EXPECTED)
    first, anew = (WorkerRecord(name, "trainer", notices=["12 rows\x1b[2J"]) for name in ("trainer-0-a", "trainer-0-b"))
    assert [messages.notices([each]) for each in (first, first, anew)] == [["12 rows�[2J"], [], []]


def test_an_old_snapshot_is_not_taken_for_the_present() -> None:
    messages = LiveMessages([("trainer", "trainer-0")])
    problem = "step 10 not trained"

    def snapshot(time: float, *workers: WorkerRecord) -> NewestSnapshot:
        looks = [{"time": time}] if time else []
        return msgspec.convert({"looks": looks, "workers": msgspec.to_builtins(workers)}, NewestSnapshot)

    paused = WorkerRecord("trainer-0-cd34", "trainer", problem=problem)
    assert messages.news(snapshot(0.0, paused), 1.0) == []
    assert messages.news(snapshot(5.0, paused), 2.0) == [f"trainer-0: {problem}"]
    assert messages.news(None, 3.0) == []
    assert messages.news(snapshot(5.0), 4.0) == []
    assert messages.news(snapshot(6.0, paused), 5.0) == []  # it lasts, and was printed


def test_no_line_of_a_run_can_control_the_terminal() -> None:
    console = RunConsole(file=(written := io.StringIO()), force_terminal=True, color_system="standard", highlight=False)
    console.out("     2  validation reward: \x1b]0;owned\x07source 1.000", style="bold")
    assert written.getvalue() == "\x1b[1m     2  validation reward: �]0;owned�source 1.000\x1b[0m\n"
