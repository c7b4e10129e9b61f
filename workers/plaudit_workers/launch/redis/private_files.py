"""Files that only this user may read."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(file: Path, content: str) -> None:
    """Write a text file with mode 0600, in a folder with mode 0700 if that has to be made.

    A file that is there already is replaced, so that no earlier mode or link of it counts.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(content)
