"""Keep whole weights in this machine's temporary folder, and bring them to each version that is published as a delta.

The engine loads whole files, and a delta is useless without the version before it. Nothing is copied before the first
delta: whole versions are loaded from where they were published.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

from plaudit_wire.logs import get_logger
from plaudit_workers.file_lock import FileLock
from plaudit_workers.published_weights import weights_digest
from plaudit_workers.rollout.engines.protocol import WeightsUnreadableError
from plaudit_workers.weight_deltas.encoding import DeltaError
from plaudit_workers.weight_deltas.folders import DeltaChain, chain_from_held, chain_from_whole, is_whole
from plaudit_workers.weight_deltas.restore import copy_companions, restore
from plaudit_workers.whole_files import remove, temporary_folder

logger = get_logger(__name__)

_FOLDER = "plaudit-weights"
"""Below the temporary folder (``TMPDIR``); with the user's number, as other users cannot remove what this one left."""


class LocalWeights:
    """Keep the local copy of one version. A process that is killed leaves it to the next one, which deletes it.

    All methods block, and may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._folder_lock: FileLock | None = None
        self._held = ""
        """The version of the copy; empty while it is changed, or damaged."""

    def whole(self, folder: Path, digest: str) -> Path:
        """Return a folder that holds the whole weight files of a published version, checked, and its probe.

        Raises:
            WeightsUnreadableError: the files are missing or damaged, or there is no room for the copy.
        """
        with self._lock:
            try:
                return self._brought_forward(folder, digest) or self._published_or_restored(folder, digest)
            except (DeltaError, OSError) as error:
                raise WeightsUnreadableError(str(error)) from error

    def discard(self) -> None:
        """Delete the copy."""
        with self._lock:
            self._discard()

    def _brought_forward(self, folder: Path, digest: str) -> Path | None:
        """Change the copy in place; return None if it does not lead to the version."""
        try:
            chain = chain_from_held(folder, self._held) if self._held else None
            if chain is None or self._folder is None:
                return None
            self._held = ""
            return self._restored(DeltaChain(self._folder, chain.deltas), folder, digest)
        except (DeltaError, OSError) as error:
            logger.warning("local weights cannot be brought forward", version=folder.name, error=str(error))
            return None

    def _published_or_restored(self, folder: Path, digest: str) -> Path:
        self._discard()
        if is_whole(folder):
            _check(weights_digest(folder), digest)
            return folder
        return self._restored(chain_from_whole(folder), folder, digest)

    def _restored(self, chain: DeltaChain, folder: Path, digest: str) -> Path:
        if self._folder is None:
            self._folder, self._folder_lock = temporary_folder(Path(tempfile.gettempdir()) / f"{_FOLDER}-{os.getuid()}")
            self._folder.chmod(0o700)
        if chain.start != self._folder:
            copy_companions(chain.start, self._folder)
        _check(restore(chain.start, chain.deltas, self._folder), digest)
        copy_companions(folder, self._folder)
        self._held = folder.name
        return self._folder

    def _discard(self) -> None:
        self._held = ""
        if self._folder is not None and self._folder_lock is not None:
            remove(self._folder)
            self._folder_lock.release()
        self._folder = self._folder_lock = None


def _check(digest: str, announced: str) -> None:
    if digest != announced:
        raise DeltaError(f"the files have digest {digest}, announced was {announced}")
