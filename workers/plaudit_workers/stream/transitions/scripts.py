"""The texts of the transitions as Redis runs them.

Each ``lua/<name>.lua`` is one transition. The shared parts (``lua/shared``) are put before each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files

_SHARED = ("run", "session", "group")


class Scripts:
    """The texts of the transitions.

    Args:
        overrides: replaces some of them, by file name without ending (``shared/group`` included); the tests of the
            tests seed bugs with it.
    """

    def __init__(self, overrides: Mapping[str, str] | None = None) -> None:
        folder = files("plaudit_workers.stream.transitions") / "lua"
        read = {entry.name[:-4]: entry.read_text() for entry in folder.iterdir() if entry.name.endswith(".lua")}
        read |= {f"shared/{name}": (folder / "shared" / f"{name}.lua").read_text() for name in _SHARED}
        self.files: dict[str, str] = read | dict(overrides or {})
        shared = "".join(self.files[f"shared/{name}"] for name in _SHARED)
        self.texts: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        for name in read:
            if not name.startswith("shared/"):
                flags, _, body = self.files[name].partition("\n")
                self.texts[name] = f"{flags}\n{shared}{body}"
                self.digests[name] = hashlib.sha1(self.texts[name].encode()).hexdigest()  # noqa: S324 - Redis's own name
