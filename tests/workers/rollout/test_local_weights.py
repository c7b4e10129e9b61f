"""A rollout's copy of the weights: brought forward by deltas, made anew when they do not lead to a version."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from delta_series import DeltaSeries
from plaudit_wire.messages import PolicyVersion
from plaudit_workers.rollout.engine import WeightsUnreadableError
from plaudit_workers.rollout.weights import LocalWeights
from plaudit_workers.weights.published import weights_digest


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The machine's temporary folder."""
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def local(temporary):
    local = LocalWeights()
    yield local
    local.discard()
    assert os.listdir(temporary) == []


@pytest.fixture
def series(tmp_path):
    return DeltaSeries(tmp_path / "weights")


def published(series, count, whole=()):
    return [series.publish(PolicyVersion(1, number), whole=number in whole) for number in range(count)]


def loaded(local, announcement):
    """The folder that the engine would load, which holds exactly the announced files."""
    folder = local.whole(Path(announcement.path), announcement.digest)
    assert weights_digest(folder) == announcement.digest
    return folder


def test_whole_versions_are_loaded_from_where_they_lie_and_deltas_from_the_copy(local, series, temporary):
    for number in range(5):
        announcement = series.publish(PolicyVersion(1, number))
        assert (loaded(local, announcement) == Path(announcement.path)) is (number == 0)
    assert len(os.listdir(temporary)) == 1


def test_a_copy_is_changed_in_place_without_the_whole_versions(local, series):
    announcements = published(series, 5, whole=(3,))
    loaded(local, announcements[1])
    for number in (0, 3):
        for path in Path(announcements[number].path).glob("*.safetensors"):
            path.unlink()
    copy = loaded(local, announcements[2])
    assert loaded(local, announcements[3]) == copy
    assert loaded(local, announcements[4]) == copy


def test_versions_may_be_skipped_and_loaded_late_or_again(local, series):
    announcements = published(series, 7, whole=(4,))
    for number in (1, 3, 3, 6, 2, 5):
        loaded(local, announcements[number])


def test_index_configuration_and_probe_lie_beside_the_copy(local, series):
    first = published(series, 1)[0]
    (Path(first.path) / "config.json").write_text("{}")
    second = series.publish(PolicyVersion(1, 1))
    (Path(second.path) / "probe.json").write_text("[2]")
    folder = loaded(local, second)
    names = {path.name for path in folder.iterdir() if "safetensors" not in path.name and path.name[0] != "."}
    assert names == {"config.json", "probe.json"}
    assert (folder / "model.safetensors.index.json").exists()


def damaged(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a value": lambda folder: damaged(next(folder.glob("*.delta"))),
    "torn": lambda folder: next(folder.glob("*.delta")).write_bytes(b"\x10\0\0\0\0\0\0\0{"),
    "a file missing": lambda folder: next(folder.glob("*.delta")).unlink(),
    "the record": lambda folder: (folder / "delta.json").write_text("{}"),
    "the whole folder": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_chain_with_a_damaged_link_is_refused_and_the_next_whole_version_loads(local, series, damage):
    announcements = published(series, 4)
    loaded(local, announcements[1])
    damage(Path(announcements[2].path))
    with pytest.raises(WeightsUnreadableError):
        loaded(local, announcements[3])
    whole = series.publish(PolicyVersion(1, 4), whole=True)
    assert loaded(local, whole) == Path(whole.path)
    loaded(local, series.publish(PolicyVersion(1, 5)))


def test_a_damaged_copy_is_made_anew_from_the_whole_version(local, series):
    announcements = published(series, 3)
    damaged(next(loaded(local, announcements[1]).glob("*.safetensors")))
    loaded(local, announcements[2])


def test_files_of_another_version_than_announced_are_refused(local, series):
    announcements = published(series, 3)
    for announcement in announcements:
        with pytest.raises(WeightsUnreadableError, match="digest"):
            local.whole(Path(announcement.path), "0" * 64)


def test_without_room_for_a_copy_deltas_are_refused_and_whole_versions_load(local, series, monkeypatch):
    announcements = published(series, 3, whole=(2,))
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(WeightsUnreadableError):
        loaded(local, announcements[1])
    loaded(local, announcements[2])


KILLED = """
import os, signal, sys, tempfile
from pathlib import Path
from plaudit_workers.rollout.weights import LocalWeights

tempfile.tempdir = sys.argv[1]
local = LocalWeights()
local.whole(Path(sys.argv[2]), sys.argv[3])
opened = []

def look(event, arguments):
    if event == "open" and str(arguments[0]).startswith(sys.argv[1]) and arguments[2] & os.O_RDWR:
        opened.append(arguments[0])
        if len(opened) == 2:  # the first file may have been changed by now
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(look)
local.whole(Path(sys.argv[4]), sys.argv[5])
"""


def test_what_a_killed_rollout_leaves_is_deleted_by_the_next_one(local, series, temporary):
    announcements = published(series, 3)
    arguments = [each for announcement in announcements[1:] for each in (announcement.path, announcement.digest)]
    died = subprocess.run([sys.executable, "-c", KILLED, str(temporary), *arguments], check=False, capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    (left,) = temporary.iterdir()
    loaded(local, announcements[2])
    assert left not in temporary.iterdir()
    assert len(os.listdir(temporary)) == 1
