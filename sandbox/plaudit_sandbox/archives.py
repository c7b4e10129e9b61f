"""Carry files into a machine and out of it as tar archives, which every provider can stream."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Final

from plaudit_sandbox.machine import LARGEST_REWARD_BYTES
from plaudit_wire.errors import DataError, InfrastructureError

_LARGEST_LOGS_BYTES: Final = 64 << 20
"""What is read of ``/logs/verifier`` in search of the reward."""


def write_archive(to: IO[bytes], folders: Mapping[str, Path], empty: Iterable[str] = ()) -> None:
    """Write an archive for ``/``: folders of this host at absolute places, and empty folders.

    Everything belongs to root and can be read by everybody. Links stay links; pipes, sockets and devices are left out.
    Raises ``InfrastructureError``.
    """
    with tarfile.open(fileobj=to, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for place in empty:
            archive.addfile(_folder(place, 0o1777))
        for place, folder in folders.items():
            archive.addfile(_folder(place, 0o755))
            try:
                archive.add(folder, place.lstrip("/"), filter=_owned_by_root)
            except OSError as error:
                raise InfrastructureError(f"{folder} cannot be copied: {error}") from error


def write_content(to: IO[bytes], folder: Path) -> None:
    """Write an archive of a folder's content, by the rules of ``write_archive``. Raises ``InfrastructureError``."""
    try:
        with tarfile.open(fileobj=to, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(folder.iterdir()):
                archive.add(path, path.name, filter=_owned_by_root)
    except OSError as error:
        raise InfrastructureError(f"{folder} cannot be copied: {error}") from error


def _folder(place: str, mode: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(place.strip("/"))
    member.type, member.mode = tarfile.DIRTYPE, mode
    return member


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode |= stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
    if member.isdir() or member.mode & stat.S_IXUSR:
        member.mode |= stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
    return member


class RewardArchive:
    """``/logs/verifier`` as an archive that a provider read after the tests."""

    def __init__(self, stream: IO[bytes], names: Iterable[str]) -> None:
        """Read the files of these names."""
        self._problem = ""
        self._members: dict[str, str | None] = {}
        self._is_folder = False
        wanted = set(names)
        try:
            with tarfile.open(fileobj=_Bounded(stream), mode="r|") as archive:
                for number, member in enumerate(archive):
                    path = PurePosixPath(os.path.normpath(member.name))
                    self._is_folder |= not number and member.isdir()
                    if self._is_folder and len(path.parts) == 2 and path.name in wanted:
                        self._members[path.name] = _text(archive, member)
        except (tarfile.TarError, EOFError) as error:
            most = f"it may hold {_LARGEST_LOGS_BYTES >> 20} MiB"
            self._problem = f"/logs/verifier cannot be read: {error} ({most})"

    def text(self, name: str) -> str | None:
        """Return the text of a file; None if there is none.

        Raises ``DataError`` for what is no small file, and if there was no archive or too large a one.
        """
        if self._problem:
            raise DataError(self._problem)
        if not self._is_folder:
            raise DataError("/logs/verifier is no folder")
        text = self._members.get(name)
        if text is None and name in self._members:
            raise DataError(f"{name} is no file of at most {LARGEST_REWARD_BYTES >> 20} MiB")
        return text


def _text(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str | None:
    if not member.isreg() or member.size > LARGEST_REWARD_BYTES:
        return None
    content = archive.extractfile(member)
    assert content is not None
    return content.read().decode(errors="replace").strip()


class _Bounded(io.RawIOBase):
    """The first bytes of a stream."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._left = _LARGEST_LOGS_BYTES

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(min(size, self._left) if size >= 0 else self._left)
        self._left -= len(data)
        return data
