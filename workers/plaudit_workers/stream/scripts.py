"""Read the code of the transitions into the library of functions that Redis runs.

Each ``lua/<name>.lua`` is one transition, the body of a function. The shared parts (``lua/shared``) come before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from plaudit_wire.redis import FunctionLibrary

_SHARED = ("run", "session", "group")


class Scripts:
    """Hold the code of the transitions; ``overrides`` replaces files: the tests of the tests seed bugs with it."""

    def __init__(self, overrides: Mapping[str, str] | None = None) -> None:
        folder = files("plaudit_workers.stream") / "lua"
        read = {entry.name[:-4]: entry.read_text() for entry in folder.iterdir() if entry.name.endswith(".lua")}
        bodies = sorted(read)
        read |= {f"shared/{name}": (folder / "shared" / f"{name}.lua").read_text() for name in _SHARED}
        self.files: dict[str, str] = read | dict(overrides or {})
        """The text of each file, by name without ending (``shared/group`` included)."""
        self.library = FunctionLibrary(
            "plaudit",
            {name: self.files[name] for name in bodies},
            shared="".join(self.files[f"shared/{name}"] for name in _SHARED),
            begin="begin(KEYS, ARGV)",
        )
