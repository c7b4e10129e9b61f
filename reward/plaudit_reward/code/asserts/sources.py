"""Write one side of an assert as one file, for a server that has no Plaudit."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Literal

from plaudit_reward.code.sandbox import assert_calls, assert_evaluation, plain_values

Part = Literal["calls", "evaluation"]

_MODULES = {"calls": assert_calls, "evaluation": assert_evaluation}


def script_of(part: Part, text: str, payload: str) -> str:
    """Return a Python file that performs one part; ``payload`` is that of the part's function."""
    run = "perform_calls" if part == "calls" else "evaluate"
    return f"{_modules(part)}\n{run}({text!r}, {payload!r})\nsys.stderr.flush()\nos._exit(0)\n"


@cache
def _modules(part: Part) -> str:
    sources = [inspect.getsource(module) for module in (plain_values, _MODULES[part])]
    lines = [line for source in sources for line in source.splitlines()]
    kept = [line for line in lines if not line.startswith(("from __future__", "from plaudit_"))]
    return "\n".join(["from __future__ import annotations", *kept])
