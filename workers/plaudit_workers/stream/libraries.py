"""List the libraries of functions that a run's Redis needs.

``python -m plaudit_workers.stream.libraries FOLDER`` writes each into a file, from which the pod of a job's own Redis
loads it; ``plaudit run`` loads them into the Redis that it starts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from plaudit_reward.endpoint.budget import BUDGET
from plaudit_wire.redis import FunctionLibrary
from plaudit_workers.stream.scripts import Scripts


def libraries() -> tuple[FunctionLibrary, ...]:
    """Return the library of the transitions and that of the judges' limits."""
    return Scripts().library, BUDGET


def main() -> None:
    """Write the libraries into the folder that the command line names."""
    for library in libraries():
        (Path(sys.argv[1]) / f"{library.name}.lua").write_text(library.text, encoding="utf-8")


if __name__ == "__main__":
    main()
