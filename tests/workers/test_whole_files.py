"""Folders and files are there as a whole or not at all, whatever happens to their writer."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from plaudit_wire.errors import RefusedError
from plaudit_workers.files import recover_all, remove, remove_leftovers, whole_file, whole_folder

KILLED_WHILE_WRITING = """
import os, pathlib, signal, sys
from plaudit_workers import files
target = pathlib.Path(sys.argv[1])
with files.whole_folder(target) as temporary:
    (temporary / "a").write_text("new")
    os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED_BEFORE_THE_RENAME = """
import os, pathlib, signal, sys
from plaudit_workers import files
target = pathlib.Path(sys.argv[1])
sys.addaudithook(lambda event, details: event == "os.rename" and os.kill(os.getpid(), signal.SIGKILL))
with files.whole_folder(target) as temporary:
    (temporary / "a").write_text("new")
"""
KILLED_IN_A_REPLACEMENT = """
import os, pathlib, signal, sys
from plaudit_workers import files
target, left = pathlib.Path(sys.argv[1]), int(sys.argv[2])
def kill_before(event, details):
    global left
    if event in ("os.rename", "shutil.rmtree"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
with files.whole_folder(target) as temporary:
    (temporary / "content").write_text("new")
    sys.addaudithook(kill_before)
"""


def visible(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_folder_appears_with_all_its_files(tmp_path):
    with whole_folder(tmp_path / "deep" / "target") as temporary:
        (temporary / "a").write_text("1")
        assert not (tmp_path / "deep" / "target").exists()
    assert (tmp_path / "deep" / "target" / "a").read_text() == "1"
    assert os.listdir(tmp_path / "deep") == ["target"]


def test_a_folder_that_exists_is_replaced(tmp_path):
    for text in ("old", "new"):
        with whole_folder(tmp_path / "target") as temporary:
            (temporary / text).write_text(text)
    assert os.listdir(tmp_path / "target") == ["new"]
    assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("changes_before_the_kill", range(5))
def test_a_writer_that_is_killed_in_a_replacement_leaves_the_old_or_the_new_folder(tmp_path, changes_before_the_kill):
    target = tmp_path / "target"
    with whole_folder(target) as temporary:
        (temporary / "content").write_text("old")
    arguments = [str(target), str(changes_before_the_kill)]
    killed = subprocess.run([sys.executable, "-c", KILLED_IN_A_REPLACEMENT, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    recover_all(tmp_path)
    assert (target / "content").read_text() == ("old" if changes_before_the_kill < 2 else "new")
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("whole", [whole_folder, whole_file])
def test_an_error_leaves_no_partial_file_and_keeps_the_old_one(tmp_path, whole):
    (tmp_path / "target").write_text("old")
    with pytest.raises(ZeroDivisionError), whole(tmp_path / "target"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["target"]
    assert (tmp_path / "target").read_text() == "old"


@pytest.mark.parametrize("program", [KILLED_WHILE_WRITING, KILLED_BEFORE_THE_RENAME])
def test_a_killed_writer_leaves_no_half_folder(tmp_path, program):
    target = tmp_path / "target"
    killed = subprocess.run([sys.executable, "-c", program, str(target)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert visible(tmp_path) == []
    assert os.listdir(tmp_path) != []
    with whole_folder(target) as temporary:
        (temporary / "b").write_text("2")
    assert os.listdir(target) == ["b"]
    assert os.listdir(tmp_path) == ["target"]


def test_leftovers_are_swept(tmp_path):
    program = [sys.executable, "-c", KILLED_WHILE_WRITING, str(tmp_path / "target")]
    subprocess.run(program, check=False)
    (tmp_path / "mine").mkdir()
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["mine"]


def test_two_writers_of_one_name_do_not_meet(tmp_path):
    target = tmp_path / "target"
    with whole_folder(target) as older:
        (older / "content").write_text("older")
        with whole_folder(target) as newer:
            (newer / "content").write_text("newer")
        assert (target / "content").read_text() == "newer"
    assert (target / "content").read_text() == "older"
    assert os.listdir(tmp_path) == ["target"]


def test_a_writer_that_fails_leaves_the_unfinished_folder_of_another(tmp_path):
    target = tmp_path / "target"
    with whole_folder(target) as newer:
        (newer / "newer").write_text("whole")
        with pytest.raises(ZeroDivisionError), whole_folder(target):
            raise ZeroDivisionError
        remove_leftovers(tmp_path)
    assert (target / "newer").read_text() == "whole"
    assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("program", [KILLED_WHILE_WRITING, KILLED_BEFORE_THE_RENAME])
def test_only_the_leftovers_of_the_dead_are_swept(tmp_path, program):
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "target")], check=False)
    with whole_folder(tmp_path / "alive") as temporary:
        (temporary / "content").write_text("1")
        remove_leftovers(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [temporary.parent.name]
    assert os.listdir(tmp_path) == ["alive"]


def test_writers_that_replace_one_folder_at_once_leave_one_whole(tmp_path):
    target, together = tmp_path / "target", threading.Barrier(4)

    def write(number):
        for round_ in range(20):
            with whole_folder(target) as temporary:
                for name in ("a", "b"):
                    (temporary / name).write_text(f"{number} {round_}")
                together.wait(timeout=60)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert (target / "a").read_text() == (target / "b").read_text()
    assert os.listdir(tmp_path) == ["target"]


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def no_locks(request, monkeypatch):
    """Volumes without ``flock``: none can be mounted in a test."""
    calls = iter(range(50))

    def refuse(*_):
        assert next(calls, None) is not None, "it tries without end"
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_files_and_folders_are_written_and_replaced_on_a_volume_without_locks(tmp_path):
    for text in ("old", "new"):
        with whole_folder(tmp_path / "folder") as temporary:
            (temporary / "content").write_text(text)
        with whole_file(tmp_path / "file") as temporary:
            temporary.write_text(text)
    assert (tmp_path / "folder" / "content").read_text() == (tmp_path / "file").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_folder_is_left_over_when_it_is_an_hour_old(tmp_path):
    with whole_folder(tmp_path / "target") as temporary:
        (temporary / "content").write_text("1")
        remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["target"]
    (left := tmp_path / ".incomplete-dead").mkdir()
    (left / ".lock").touch()
    remove_leftovers(tmp_path)
    assert left.exists()
    os.utime(left / ".lock", (time.time() - 4000,) * 2)
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["target"]


def test_removing_takes_files_folders_and_nothing(tmp_path):
    (tmp_path / "full" / "deep").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name in ("full", "file", "absent"):
        remove(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_reported(tmp_path):
    with pytest.raises(RefusedError, match=r"no room for .*target"), whole_folder(tmp_path / "target"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert os.listdir(tmp_path) == []


def test_another_error_of_the_disk_is_not_called_full(tmp_path):
    with pytest.raises(PermissionError), whole_folder(tmp_path / "target"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
