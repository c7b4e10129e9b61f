"""Store the images of a run once each, by the SHA-256 of their files: ``images/ab/abcd…`` in the run's folder.

Written by the trainer before the first prompt is admitted; read by rollouts and by every rank of the trainer. Prompts
on the streams carry digests only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from plaudit_workers.images.decoding import ImageError
from plaudit_workers.whole_files import whole_file

FOLDER = "images"


class ImageStore:
    """Store the images of one run."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / FOLDER

    def path(self, digest: str) -> Path:
        """Return the file of an image; it may be missing."""
        return self._folder / digest[:2] / digest

    def add(self, content: bytes) -> str:
        """Store an image file, unless one of its size is stored already; return its digest, hexadecimal.

        Raises:
            RefusedError: the disk is full.
        """
        digest = hashlib.sha256(content).hexdigest()
        path = self.path(digest)
        if not path.is_file() or path.stat().st_size != len(content):
            with whole_file(path) as temporary:
                temporary.write_bytes(content)
        return digest

    def read(self, digest: str) -> bytes:
        """Return an image file.

        Raises:
            ImageError: it is missing or damaged.
        """
        path = self.path(digest)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ImageError(
                f"{path} cannot be read ({error.strerror or error})",
                "Trainer and rollouts need the run's folder at this path",
            ) from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise ImageError(
                f"{path} is damaged", "Delete it and start again with --resume: the trainer writes it again"
            )
        return content
