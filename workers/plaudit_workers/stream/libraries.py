"""Read the libraries of functions that a run's Redis needs: the transitions, and the judges' limits.

Each ``lua/<name>.lua`` is one transition, the body of a function. The shared parts (``lua/shared``) come before them.
``python -m plaudit_workers.stream.libraries FOLDER`` writes each library into a file, from which the pod of a job's own
Redis loads it; ``plaudit run`` loads them into the Redis that it starts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

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


def libraries() -> tuple[FunctionLibrary, ...]:
    """Return the library of the transitions and that of the judges' limits."""
    from plaudit_reward.endpoint.budget import BUDGET  # more than the roles of a run need

    return Scripts().library, BUDGET


def main() -> None:
    """Write the libraries into the folder that the command line names."""
    for library in libraries():
        (Path(sys.argv[1]) / f"{library.name}.lua").write_text(library.text, encoding="utf-8")


if __name__ == "__main__":
    main()
