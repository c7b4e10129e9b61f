"""The processes of pods, where the nodes are this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def main_process(pod: dict[str, Any]) -> int:
    """Return the process id of a pod's process on this machine."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            numbers = re.search(r"^NSpid:(.*)$", (folder / "status").read_text(), re.MULTILINE)
            if pod["metadata"]["uid"] not in (folder / "cgroup").read_text() or numbers is None:
                continue
            is_pause = (folder / "cmdline").read_bytes().startswith(b"/pause")
            if numbers[1].split()[-1] == "1" and not is_pause:
                return int(folder.name)
        except OSError:
            continue  # it has ended
    raise AssertionError(f"nothing runs in {pod['metadata']['name']}")
