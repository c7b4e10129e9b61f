"""A server whose wall clock can be stepped, by a library that is preloaded into it. Needs a C compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SteppedClock:
    """The wall clock of servers that are started within ``preloaded``.

    Args:
        folder: for the compiled library and the file with the shift.
    """

    def __init__(self, folder: Path) -> None:
        self._library = folder / "stepped_clock.so"
        self._shift = folder / "shift"
        self._shift.write_bytes(bytes(8))
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(self._library), str(source)], check=True)

    @staticmethod
    def available() -> bool:
        """Return True if there is a C compiler."""
        return shutil.which("cc") is not None

    @contextmanager
    def preloaded(self) -> Iterator[None]:
        """Preload the library into processes that are started in this context."""
        added = {"LD_PRELOAD": str(self._library), "STEPPED_CLOCK": str(self._shift)}
        os.environ |= added
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]

    def step(self, seconds: float) -> None:
        """Set the wall clock to this many seconds beside the machine's."""
        with self._shift.open("r+b") as file:
            file.write(round(seconds * 1e6).to_bytes(8, "little", signed=True))
