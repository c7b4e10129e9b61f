"""Carry files into a machine and out of it as tar archives, which every provider can stream."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, cast

from plaudit_wire.errors import DataError, InfrastructureError

LARGEST_REWARD_BYTES: Final = 1 << 20
_LARGEST_LOGS_BYTES: Final = 64 << 20
"""What is read of ``/logs/verifier`` in search of the reward."""
PAGE_BYTES: Final = 4096
"""The least size at which each file and folder of a machine is counted."""
MOST_ENTRIES: Final = 500_000
FOLDER: Final = "d"
LINK: Final = "l"
PIPE: Final = "p"
_OF_THE_KERNEL: Final = ("dev", "proc", "sys")
_OF_TESTS: Final = ("proc", "tests")
_MOST_LINKS: Final = 40
"""Linux follows no more on the way to a file."""
_MOST_STEPS: Final = 5_000_000
"""To follow all links of a machine, which takes seconds. The longest links that 500,000 can be would take days."""
_MOST_NAMES_BYTES: Final = 128 << 20
_TOO_MANY_NAMES = f"the names of the machine's files are more than {_MOST_NAMES_BYTES >> 20} MiB"
_MOST_WAITING: Final = 1000
_LONGEST_PATH: Final = 4000
"""Linux opens paths of up to 4,095 bytes; a folder of ours comes before it."""


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
        with tarfile.open(fileobj=to, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(folder.iterdir()):
                archive.add(path, path.name, filter=_owned_by_root)
    except OSError as error:
        raise InfrastructureError(f"{folder} cannot be copied: {error}") from error


def _folder(place: str, mode: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(place.strip("/"))
    member.type, member.mode = tarfile.DIRTYPE, mode
    return member


def _is_ordinary(member: tarfile.TarInfo) -> bool:
    return member.isreg() or member.isdir() or member.issym() or member.islnk()


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if not _is_ordinary(member):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    _let_everybody_read(member)
    return member


def _let_everybody_read(member: tarfile.TarInfo) -> None:
    member.mode |= stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
    if member.isdir() or member.mode & stat.S_IXUSR:
        member.mode |= stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH


class FilesTooLargeError(Exception):
    """The files of a machine are more than a copy may hold."""


def copy_files(
    source: IO[bytes],
    to: IO[bytes],
    folders: Iterable[str],
    most_bytes: int,
    *,
    below: str = "",
    are_artifacts: bool = False,
    waiting: list[tuple[str, str]] | None = None,
) -> int:
    """Copy what an archive holds below some folders to another archive: files, folders and links, nothing else.

    Links come last, when all entries are known by which they are judged: those that ``deceiving_links`` finds stay out.
    A further name of something that stays out does as well. Returns the bytes that this takes; each entry counts a page
    at least. Raises ``FilesTooLargeError`` above ``most_bytes`` and for a path that no program can open,
    ``InfrastructureError`` for what is no archive.

    Args:
        below: Where the folder lies that the archive is of.
        are_artifacts: Copy those symbolic links alone that lead to something of their folder, and let everybody read
            the files.
        waiting: Gets path and target of the first copied links of which ``may_wait_at`` is true.
    """
    wanted = [PurePosixPath(folder) for folder in folders]
    room = _Room(source, most_bytes)
    entries = {str(above): FOLDER for folder in wanted for above in folder.parents}
    links: dict[str, tarfile.TarInfo] = {}
    left_out: set[str] = set()
    with (
        _read(cast(IO[bytes], room)) as members,
        # Both GNU's and BusyBox's tar read its long names, whatever bytes these hold.
        tarfile.open(fileobj=to, mode="w|", format=tarfile.GNU_FORMAT, errors="surrogateescape") as written,
    ):
        for member, content in members:
            room.take(member)
            member.name = str(PurePosixPath(below, member.name))
            if member.islnk():
                member.linkname = str(PurePosixPath(below, member.linkname))
                if (link := links.get(member.linkname)) is not None:  # a further name of a symbolic link
                    member.type, member.linkname = tarfile.SYMTYPE, link.linkname
            if not _is_ordinary(member):
                left_out.add(member.name)
            elif _is_within(member, wanted) and not (member.islnk() and member.linkname in left_out):
                _make_ordinary(member, are_artifacts)
                if member.issym() or member.isdir():
                    room.note(member)
                    entries[member.name] = FOLDER if member.isdir() else LINK + member.linkname
                if member.issym():
                    links[member.name] = member
                else:
                    written.addfile(member, content)
                    cast(Any, written).members = []  # it keeps all entries that it has seen
        deceiving = () if are_artifacts else set(deceiving_links(entries))
        for link in links.values():
            if _stays(link, wanted) if are_artifacts else link.name not in deceiving:
                written.addfile(link)
                if waiting is not None and len(waiting) < _MOST_WAITING and may_wait_at(link.name, link.linkname):
                    waiting.append((link.name, link.linkname))
    return room.taken


def unpack(source: IO[bytes], folder: Path) -> None:
    """Write the files of an archive of ``copy_files`` below a folder of this host; raise ``InfrastructureError``."""
    try:
        with tarfile.open(fileobj=source, mode="r|", errors="surrogateescape") as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise InfrastructureError(f"the files of a machine cannot be copied: {error}") from error


def may_wait_at(path: str, target: str) -> bool:
    """Tell whether a reader of a symbolic link may wait or read for ever: a device or a process's file can be behind.

    So can it behind the root, and behind steps up that follow steps down, which may begin at another link's end. A link
    to ``/dev/null`` is harmless. Each link is judged alone, by where it lies and what it says.
    """
    goal = PurePosixPath(os.path.normpath(PurePosixPath("/", path).parent / target))
    names = PurePosixPath(target).parts
    returns = any(later == ".." and earlier not in ("..", "/") for earlier, later in pairwise(names))
    place = goal.parts[1:2]
    return returns or not place or (place[0] in _OF_THE_KERNEL and str(goal) != "/dev/null")


def entries_below(folder: Path, *as_owner: str) -> dict[str, str]:
    """Return what a folder of this host holds, by path: the letter of its kind, and a link's target after it.

    No link is followed. Raises ``FilesTooLargeError`` for more names than can be held, and ``InfrastructureError``.

    Args:
        as_owner: The command with which its owner reads what its rights forbid.
    """
    listing = [*as_owner, "find", ".", "-mindepth", "1", "-printf", r"%P\0%y%l\0"]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(listing, cwd=folder, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        listed = process.stdout.read(_MOST_NAMES_BYTES + 1)
        process.stdout.close()
        if len(listed) > _MOST_NAMES_BYTES:
            raise FilesTooLargeError(_TOO_MANY_NAMES)
        if process.wait():
            errors.seek(0)
            raise InfrastructureError(f"{folder} cannot be listed: {errors.read(300).decode(errors='replace')}")
    words = iter(os.fsdecode(listed).split("\0")[:-1])
    return dict(zip(words, words, strict=True))


def deceiving_links(entries: Mapping[str, str]) -> list[str]:
    """Return the links of a machine that lead to its tests or to a process's files, straight or by other links.

    Both exist while tests run alone. A test that looks for a text in the agent's file would find it: in the script of
    the tests themselves, or in its own command line.

    Args:
        entries: What the agent left, as ``entries_below`` returns it.
    """
    steps = iter(range(_MOST_STEPS))
    return [path for path, kind in entries.items() if kind[0] == LINK and _leads_to_tests(path, entries, steps)]


def _leads_to_tests(path: str, entries: Mapping[str, str], steps: Iterator[int]) -> bool:
    """Follow a path as the kernel does. Steps up from folders that are not the agent's may lead from anywhere.

    What takes too many steps, or becomes longer than any file's path, is no agent's honest work.
    """
    left, place, num_links, has_strayed = path.split("/")[::-1], "", 0, False
    while left and num_links <= _MOST_LINKS:
        if next(steps, None) is None or len(place) > _LONGEST_PATH:
            return True
        name = left.pop()
        if name == "..":
            has_strayed |= bool(place) and entries.get(place) != FOLDER
            place = place.rpartition("/")[0]
        elif name not in ("", "."):
            above, place = place, f"{place}/{name}" if place else name
            if place in (*_OF_TESTS, "dev/fd") or (has_strayed and name in _OF_TESTS):
                return True
            if (kind := entries.get(place, "")).startswith(LINK):
                num_links += 1
                place = "" if kind.startswith(f"{LINK}/") else above
                left += kind[1:].split("/")[::-1]
    return False


def waited_at(source: IO[bytes]) -> Iterator[str]:
    """Yield the path of each named pipe, device and link of an archive at which a reader may wait for ever.

    Raises ``InfrastructureError`` for what is no archive.
    """
    with _read(source) as members:
        for member, _ in members:
            if member.isdev() or (member.issym() and may_wait_at(member.name, member.linkname)):
                yield str(PurePosixPath("/", member.name))


def _stays(link: tarfile.TarInfo, folders: Iterable[PurePosixPath]) -> bool:
    """Tell whether a symbolic link leads to something of its own folder.

    Steps up may only come first: there they leave real folders. So each link that is met on the way down stays as well.
    """
    path, target = PurePosixPath(link.name), PurePosixPath(link.linkname)
    num_up = next((number for number, part in enumerate(target.parts) if part != ".."), len(target.parts))
    above = path.parents[num_up] if num_up < len(path.parents) else PurePosixPath()
    is_relative = not target.is_absolute() and ".." not in target.parts[num_up:]
    return is_relative and any(path.is_relative_to(each) and above.is_relative_to(each) for each in folders)


def _is_within(member: tarfile.TarInfo, folders: Iterable[PurePosixPath]) -> bool:
    """Tell whether an entry lies in one of some folders, and what it is a further name of as well."""
    paths = [PurePosixPath(name) for name in (member.name, *[member.linkname] * member.islnk())]
    return not any(".." in path.parts or not any(map(path.is_relative_to, folders)) for path in paths)


def _make_ordinary(member: tarfile.TarInfo, is_everybody_s: bool) -> None:
    """Make an entry one of an ordinary user's."""
    member.mode &= 0o1777
    if is_everybody_s:
        _let_everybody_read(member)
    if member.isdir():
        member.mode |= stat.S_IRWXU  # so that what it holds can be written
    member.uid = member.gid = 0
    member.uname = member.gname = ""


@contextlib.contextmanager
def _read(source: IO[bytes]) -> Iterator[Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]]:
    """Yield the entries of an archive, and the content of those that are files; raise ``InfrastructureError``."""

    def entries(archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
        for member in archive:
            yield member, archive.extractfile(member) if member.isreg() else None
            cast(Any, archive).members = []  # it keeps all entries that it has seen

    try:
        with tarfile.open(fileobj=source, mode="r|", errors="surrogateescape") as archive:
            yield entries(archive)
    except (tarfile.TarError, EOFError) as error:
        raise InfrastructureError(f"the files of a machine cannot be read: {error}") from error


class _Room(io.RawIOBase):
    """A stream that ends with an error when more was read or taken than there is room for."""

    def __init__(self, stream: IO[bytes], most_bytes: int) -> None:
        self._stream = stream
        self._most = most_bytes
        self._left = most_bytes
        self._stream_left = 2 * most_bytes + _LARGEST_LOGS_BYTES
        self._entries_left, self._names_left = MOST_ENTRIES, _MOST_NAMES_BYTES

    @property
    def taken(self) -> int:
        """Return what all entries take."""
        return self._most - self._left

    def take(self, entry: tarfile.TarInfo) -> None:
        """Count an entry and what it takes."""
        self._entries_left -= 1
        if self._entries_left < 0:
            raise FilesTooLargeError(f"the machine holds more than {MOST_ENTRIES} files and folders")
        if len(entry.name) > _LONGEST_PATH:
            raise FilesTooLargeError(f"a path of the machine has more than {_LONGEST_PATH} characters")
        self._left -= max(entry.size, PAGE_BYTES) if entry.isreg() else PAGE_BYTES
        if self._left < 0:
            raise FilesTooLargeError(f"the machine holds more than its {self._most >> 20} MiB")

    def note(self, entry: tarfile.TarInfo) -> None:
        """Count the names of an entry that is held in memory."""
        self._names_left -= len(entry.name) + len(entry.linkname)
        if self._names_left < 0:
            raise FilesTooLargeError(_TOO_MANY_NAMES)

    def read(self, size: int = -1) -> bytes:
        """Read on; long names count here alone."""
        data = self._stream.read(size)
        self._stream_left -= len(data)
        if self._stream_left < 0:
            raise FilesTooLargeError(f"the machine's names and files are more than its {self._most >> 20} MiB")
        return data


class RewardArchive:
    """``/logs/verifier`` as an archive that a provider read after the tests."""

    def __init__(self, stream: IO[bytes], names: Iterable[str], most_bytes: int = _LARGEST_LOGS_BYTES) -> None:
        """Read the files of these names; ``most_bytes`` are read in search of them."""
        self._problem = ""
        self._members: dict[str, str | None] = {}
        self._is_folder = False
        wanted = set(names)
        try:
            with tarfile.open(fileobj=_Bounded(stream, most_bytes), mode="r|") as archive:
                for number, member in enumerate(archive):
                    path = PurePosixPath(os.path.normpath(member.name))
                    self._is_folder |= not number and member.isdir()
                    if self._is_folder and len(path.parts) == 2 and path.name in wanted:
                        self._members[path.name] = _text(archive, member)
        except (tarfile.TarError, EOFError) as error:
            most = f"it may hold {most_bytes >> 20} MiB"
            self._problem = f"/logs/verifier cannot be read: {error} ({most})"

    @property
    def names(self) -> Collection[str]:
        """Return which of the files are there."""
        return self._members

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

    def __init__(self, stream: IO[bytes], most_bytes: int) -> None:
        self._stream = stream
        self._left = most_bytes

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(min(size, self._left) if size >= 0 else self._left)
        self._left -= len(data)
        return data
