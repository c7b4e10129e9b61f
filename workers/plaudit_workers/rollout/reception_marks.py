"""Mark on this machine that weights are being received, so that the successor of a killed process finds it.

Received weights are memory of the process, so it may be killed for lack of memory, whatever was available before. Its
successor would receive the same weights and be killed again; it loads its first version from files instead.
"""

from __future__ import annotations

import glob
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from plaudit_workers.file_lock import FileLock


class ReceptionMarks:
    """Hold the marks of one run in the temporary folder (``TMPDIR``), which survives a restart of a pod's container."""

    def __init__(self, run: str) -> None:
        # Other users cannot lock or remove what this one left.
        self._folder, self._name = Path(tempfile.gettempdir()), f"plaudit-receiving-{os.getuid()}-{quote(run, '')}"

    def take_abandoned(self) -> bool:
        """Remove the marks of dead processes; return True if there were any."""
        abandoned = [FileLock.try_acquire(path) for path in self._folder.glob(f"{glob.escape(self._name)}.*")]
        for lock in abandoned:
            if lock is not None:
                lock.release()
        return any(abandoned)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold a mark of this process's own within the context; a process that is killed within it leaves the mark.

        Raises:
            OSError: the temporary folder is missing or full.
        """
        lock = FileLock.acquire(self._folder / f"{self._name}.{secrets.token_hex(8)}")
        try:
            yield
        finally:
            lock.release()
