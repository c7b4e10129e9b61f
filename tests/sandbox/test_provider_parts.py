"""What the providers decide without a machine: which changes count, which logs are believed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from namespaces import HAS_NAMESPACES
from plaudit_sandbox.archives import RewardArchive, write_archive
from plaudit_sandbox.machine import REWARD_FILES
from plaudit_sandbox.privileges import NOBODY
from plaudit_sandbox.verification import changed_programs, compiled_folders
from plaudit_wire.errors import DataError

FOLDERS = {"/usr", "/usr/bin", "/usr/lib", "/usr/lib/python3.11", "/usr/lib/a-folder"}
PATH = "/opt/conda/bin:/usr/local/bin:/usr/bin:/bin:/app/node_modules/.bin"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (["/usr", "/usr/bin", "/usr/bin/cat"], ["/usr/bin/cat"]),
        (["/bin"], ["/bin"]),
        (["/usr/lib/python3", "/app/lib/python3/json.py"], ["/usr/lib/python3"]),
        (["/etc/apt/apt.conf.d/hook", "/etc/ssl/certs/mine.pem", "/etc/nginx/x"], ["/etc/apt/apt.conf.d/hook"]),
        (["/conftest.py", "/answer.txt", "/app/conftest.py"], ["/conftest.py"]),
        (["/node_modules", "/node_modules/a.js", "/nodes"], ["/node_modules", "/node_modules/a.js"]),
        (["/app/node_modules/.bin/cat", "/app/bin/cat"], ["/app/node_modules/.bin/cat"]),
        (["/root/.py/bin/python3.11", "/root/.py/x"], ["/root/.py/bin/python3.11"]),
        (["/root/.py/lib/os.py", "/root/tool", "/root/other"], ["/root/.py/lib/os.py", "/root/tool"]),
        (["/usr/lib/python3.11", "/usr/lib/python3.11/__pycache__", "/usr/lib/python3.11/__pycache__/json.pyc"], []),
        (["/usr/lib", "/usr/lib/a-folder"], []),
        (["/etc", "/etc/hosts", "/etc/ld.so.preload"], ["/etc/ld.so.preload"]),
        (["/etc/python3.11/sitecustomize.py"], ["/etc/python3.11/sitecustomize.py"]),
        (["/opt/conda/lib/python3/site.py", "/opt/data/x"], ["/opt/conda/lib/python3/site.py"]),
        (["/opt/conda/pyvenv.cfg", "/opt/conda/etc/x"], ["/opt/conda/pyvenv.cfg"]),
        (["/app/node_modules/.bin/tool", "/app/usr/bin/x", "/home/a", "/usrlocal/x", "/tests", "/logs"], []),
    ],
)
def test_only_changes_of_programs_count(changes: list[str], found: list[str]) -> None:
    behind_links = ["/root/.py/bin/python3.11", "/root/tool", "/app/.venv/bin/own", ""]
    assert changed_programs(changes, PATH, "/app", FOLDERS.__contains__, behind_links) == found


def test_compiled_python_among_programs_alone_is_removed() -> None:
    changes = [
        "/usr/lib/python3.11/json/__pycache__",
        "/usr/lib/python3.11/json/__pycache__/a.pyc",
        "/usr/lib/python3.11/json/__pycache__x/a.pyc",
        "/opt/conda/lib/x/__pycache__/b.pyc",
        "/app/__pycache__/c.pyc",
        "/root/.py/lib/__pycache__/d.pyc",
    ]
    assert compiled_folders(changes, PATH, "/app", ["/root/.py/bin/python3"]) == [
        "/opt/conda/lib/x/__pycache__",
        "/root/.py/lib/__pycache__",
        "/usr/lib/python3.11/json/__pycache__",
    ]


def archive(*members: tuple[str, bytes | str | None]) -> io.BytesIO:
    """Return an archive of files (bytes), links (text) and folders (None)."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as to:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.type = {bytes: tarfile.REGTYPE, str: tarfile.SYMTYPE}.get(type(content), tarfile.DIRTYPE)
            if isinstance(content, str):
                member.linkname = content
            member.size = len(content) if isinstance(content, bytes) else 0
            to.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    made.seek(0)
    return made


def test_a_reward_is_read_from_the_folder_itself_alone() -> None:
    found = RewardArchive(
        archive(
            ("verifier", None),
            ("verifier/sub", None),
            ("verifier/sub/reward.json", b"1"),
            ("verifier/reward.txt", b" 1\n"),
        ),
        REWARD_FILES,
    )
    assert (found.text("reward.txt"), found.text("reward.json")) == ("1", None)


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (archive(("verifier", "/app"), ("verifier/reward.txt", b"1")), "/logs/verifier is no folder"),
        (archive(("verifier", None), ("verifier/reward.txt", "/etc/passwd")), "no file of at most 1 MiB"),
        (archive(("verifier", None), ("verifier/reward.txt", bytes(2 << 20))), "no file of at most 1 MiB"),
        (
            archive(("verifier", None), ("verifier/x", bytes(70 << 20)), ("verifier/reward.txt", b"1")),
            "it may hold 64 MiB",
        ),
        (io.BytesIO(b""), "cannot be read"),
        (io.BytesIO(b"x" * 5000), "cannot be read"),
    ],
)
def test_logs_that_are_none_are_an_error(stream: io.BytesIO, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        RewardArchive(stream, REWARD_FILES).text("reward.txt")


def test_what_is_carried_in_is_readable_and_root_s(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "link").symlink_to("/etc/passwd")
    made = io.BytesIO()
    write_archive(made, {"/app/in": tmp_path}, empty=["/logs"])
    made.seek(0)
    with tarfile.open(fileobj=made) as written:
        members = {member.name: member for member in written}
    assert (members["app/in/secret"].mode & 0o777, members["app/in/secret"].uid) == (0o644, 0)
    assert members["app/in/link"].linkname == "/etc/passwd"
    assert members["logs"].isdir()


REMOVES = """
import os, pathlib, sys
from plaudit_sandbox.machine import remove
os.setuid(int(sys.argv[1]))
remove(pathlib.Path("machine"))
"""


def test_a_user_who_may_make_no_namespaces_removes_folders_that_it_may_not_read(tmp_path: Path) -> None:
    (unshare := tmp_path / "bin" / "unshare").parent.mkdir()
    unshare.write_text("#!/bin/sh\nexit 1\n")
    unshare.chmod(0o755)
    (outside := tmp_path / "outside").mkdir(mode=0o700)
    (closed := tmp_path / "all" / "machine" / "files" / "closed").mkdir(parents=True)
    (closed / "file").touch()
    (closed / "link").symlink_to(outside)
    user = os.geteuid() or NOBODY
    if not os.geteuid():
        for path in (outside, tmp_path / "all", *(tmp_path / "all").rglob("*")):
            os.chown(path, user, user, follow_symlinks=False)
    closed.chmod(0)
    environment = {**os.environ, "PATH": f"{unshare.parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", REMOVES, str(user)]
    subprocess.run(command, check=True, cwd=tmp_path / "all", env=environment)
    assert not [*(tmp_path / "all").iterdir()]
    assert outside.stat().st_mode & 0o777 == 0o700


LISTS = """
import os, pathlib, sys
from plaudit_sandbox.archives import deceiving_links, entries_below
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
print(*deceiving_links(entries_below(pathlib.Path("machine"), "unshare", "--user", "--map-root-user")))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not HAS_NAMESPACES, reason="only root makes files of another user")
def test_a_folder_that_its_owner_may_only_enter_hides_no_link(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (closed := tmp_path / "machine" / "app" / "d").mkdir(parents=True)
    (closed / "e").symlink_to("/tests/test.sh")
    (closed.parent / "answer").symlink_to("d/e")
    for path in (tmp_path / "machine", *(tmp_path / "machine").rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    closed.chmod(0o111)
    command = [sys.executable, "-c", LISTS, str(NOBODY)]
    done = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
    assert sorted(done.stdout.split()) == ["app/answer", "app/d/e"]
