import os
import time
from pathlib import Path

import pytest

from plaudit_workers.timeline import STARTED, TIMELINE, read_timeline, stamp, started_s, timings


def test_a_process_stamps_its_stages_into_the_file_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "timeline.jsonl"
    monkeypatch.setenv(TIMELINE, str(file))
    monkeypatch.setenv("PLAUDIT_WORKER", "reward-0-ab")
    stamp("ready")
    stamp(STARTED, time_s=started_s())
    first, second = read_timeline(file)
    assert (first.process, first.stage, second.stage) == ("reward-0-ab", STARTED, "ready")
    assert first.time_s <= second.time_s <= time.time()
    assert second.cpu_s > first.cpu_s == 0


def test_nothing_is_stamped_outside_of_plaudit_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TIMELINE, raising=False)
    monkeypatch.chdir(tmp_path)
    stamp("ready")
    assert os.listdir(tmp_path) == []


def test_a_table_has_the_seconds_since_the_stamp_before_of_the_same_process(tmp_path: Path) -> None:
    file = tmp_path / "timeline.jsonl"
    stamp(STARTED, "plaudit run", file=file, time_s=100.0)
    stamp(STARTED, "reward-0", file=file, time_s=102.0)
    stamp("started Ray", "plaudit run", file=file, time_s=101.0)
    stamp("ready", "reward-0", file=file, time_s=104.5)
    with file.open("ab") as torn:
        torn.write(b'{"process": "rew')
    rows = [line.split(maxsplit=3) for line in timings(read_timeline(file))][1:]
    assert rows == [
        ["0.00", "plaudit", "run,", "started"],
        ["1.00", "1.00", "0.00", "plaudit run, started Ray"],
        ["2.00", "reward-0,", "started"],
        ["4.50", "2.50", "0.00", "reward-0, ready"],
    ]
