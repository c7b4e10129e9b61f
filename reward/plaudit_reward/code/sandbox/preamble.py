"""The imports that verl puts before every program: models often leave them out."""

from __future__ import annotations

_STAR_MODULES = """string re datetime collections heapq bisect copy math random statistics itertools functools operator
    io sys json builtins typing""".split()  # noqa: SIM905 - a list of words
_NAMED_MODULES = [name for name in _STAR_MODULES if name not in {"builtins", "typing"}]

PREAMBLE = "".join(
    [
        *(f"from {name} import *\n" for name in _STAR_MODULES),
        *(f"import {name}\n" for name in _NAMED_MODULES),
    ]
)
