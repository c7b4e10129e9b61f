"""Spilled records stay inside their folder, whatever Redis holds."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import pytest

from plaudit_wire.messages import RecordError
from plaudit_workers.stream.volume import Spilled, SpillFolder, VolumeError

RECORD = b"r" * 300_000


def reference(path: str, record: bytes = RECORD) -> bytes:
    digest = hashlib.blake2b(record, digest_size=16).hexdigest()
    return b"\x00" + msgspec.msgpack.encode(Spilled(path, len(record), digest))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "spill"
    folder.mkdir(parents=True)
    return folder


async def test_a_stored_record_is_read_again_until_its_group_is_forgotten(folder: Path) -> None:
    volume = SpillFolder(folder, kept_s=0.0)
    stored = await volume.store("t-0-1.0", "prompt", RECORD)
    assert await volume.load(stored) == RECORD
    await volume.forget("t-0-1.0")
    assert list(folder.iterdir()) == []
    with pytest.raises(VolumeError, match=r"cannot read t-0-1\.0/prompt-"):
        await volume.load(stored)


async def test_the_trainer_deletes_leftovers_of_ended_groups_and_keeps_open_ones(folder: Path) -> None:
    volume = SpillFolder(folder, kept_s=0.0)
    for group in ("t-0-1.0", "t-1-1.0"):
        await volume.store(group, "prompt", RECORD)
    await volume.prepare(["t-1-1.0"])
    assert [left.name for left in folder.iterdir()] == ["t-1-1.0"]


async def test_nothing_is_written_below_a_mount_point_without_its_volume(tmp_path: Path) -> None:
    volume = SpillFolder(tmp_path / "unmounted" / "spill")
    with pytest.raises(VolumeError, match="cannot write"):
        await volume.store("t-0-1.0", "prompt", RECORD)
    await volume.prepare([])
    assert await volume.load(await volume.store("t-0-1.0", "prompt", RECORD)) == RECORD


async def test_an_id_that_a_client_chose_is_one_name_of_the_file_system(folder: Path) -> None:
    volume = SpillFolder(folder)
    for group in ("s:mine:../../etc", "s:mine:a/b", "..", "s:mine:" + "ä" * 300):
        stored = await volume.store(group, "sample-0", RECORD)
        assert await volume.load(stored) == RECORD
    assert sorted(path.parent.parent for path in folder.rglob("sample-0-*")) == [folder] * 4


@pytest.mark.parametrize(
    "path", ["/etc/hostname", "../secret", "group/../../secret", "group/deep/secret", "..", ".hidden/x", "group/", ""]
)
async def test_a_forged_path_is_refused(folder: Path, path: str) -> None:
    (folder.parent / "secret").write_bytes(RECORD)
    with pytest.raises(RecordError, match="is not the path of a spilled record"):
        await SpillFolder(folder).load(reference(path))


async def test_links_devices_and_other_sizes_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(RECORD)
    group = folder / "group"
    group.mkdir()
    (group / "link").symlink_to(tmp_path / "secret")
    (folder / "linked").symlink_to(tmp_path)
    os.mkfifo(group / "pipe")
    (group / "long").write_bytes(RECORD + b"r")
    for path, reason in (
        ("group/link", "through a link"),
        ("linked/secret", "through a link"),
        ("group/pipe", "not a regular file"),
        ("group/long", "300001 bytes; 300000 were written"),
    ):
        with pytest.raises(RecordError, match=reason):
            await SpillFolder(folder).load(reference(path))


@pytest.mark.parametrize("group", ["..", "../../other", "/", "linked"])
async def test_forgetting_a_group_deletes_nothing_outside_the_folder(folder: Path, tmp_path: Path, group: str) -> None:
    kept = folder.parent / "checkpoints"
    kept.mkdir()
    (kept / "policy.pt").write_text("weights")
    (folder / "linked").symlink_to(kept)
    await SpillFolder(folder, kept_s=0.0).forget(group)
    assert (kept / "policy.pt").exists()


async def test_a_damaged_reference_is_a_record_error(folder: Path) -> None:
    with pytest.raises(RecordError, match="damaged reference"):
        await SpillFolder(folder).load(b"\x00\xff")
