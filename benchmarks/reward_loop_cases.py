"""The cases of ``reward_loop``.

Imports nothing but the standard library: the interpreter that has verl imports it too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

SEED = 7
GIVE_UP_S = 30.0
"""A batch that has not ended by then (and by sixty times its bound) is taken for one that never ends."""


@dataclass(frozen=True)
class Case:
    """One burst of samples.

    Attributes:
        name: in the table.
        function: in ``reward_loop_functions.py``; empty for the built-in GSM8K scorer.
        samples: how many, all handed over at once.
        blocking: the function waits without computing, so it may run in threads.
        guilty: how many of them do what ``guilt`` says.
        guilt: ``raises`` or ``hangs``.
        shortest_s: the functions that wait do so for seconds uniform between this and ``longest_s``.
        limit_s: a call that has not answered by then is ended (where the reward loop can do that).
        longest_s: the least time that such a burst can take; 0: the bound is the processor.
    """

    name: str
    function: str
    samples: int
    blocking: bool = False
    guilty: int = 0
    guilt: str = ""
    shortest_s: float = 0.0
    longest_s: float = 0.0
    limit_s: float = 30.0


def cases(quick: bool) -> list[Case]:
    """All cases; ``quick``: a tenth of the samples, a quarter of the seconds."""
    burst, many, waits, scale = (500, 200, 128, 0.25) if quick else (5000, 1000, 1024, 1.0)
    limit_s = 2.0 * scale
    shortest_s, longest_s = 0.05 * scale, 2.0 * scale
    return [
        Case("no-op", "score", burst),
        Case("gsm8k", "", burst),
        Case("async 0.05-2 s", "score_async", waits, shortest_s=shortest_s, longest_s=longest_s),
        Case("blocking 0.05-2 s", "score", waits, True, shortest_s=shortest_s, longest_s=longest_s),
        Case("5 % raise", "score", many, guilty=many // 20, guilt="raises"),
        Case("1 hangs", "score", many, guilty=1, guilt="hangs", limit_s=limit_s),
        Case("20 hang", "score", many, guilty=20, guilt="hangs", limit_s=limit_s),
        Case("1 async hangs", "score_async", many, guilty=1, guilt="hangs", limit_s=limit_s),
    ]


@dataclass(frozen=True)
class Row:
    """One sample of a case in verl's columns."""

    response: str
    ground_truth: str
    extra_info: dict[str, Any]
    guilty: bool


def rows(case: Case) -> list[Row]:
    """The samples of a case, the same on both sides."""
    choose = random.Random(SEED)
    guilty = set(choose.sample(range(case.samples), case.guilty))
    waits = [choose.uniform(case.shortest_s, case.longest_s) for _ in range(case.samples)]
    if case.longest_s:
        waits[0] = case.longest_s
    steps = "She sold some clips in April and half as many in May. " * 12
    found = []
    for i in range(case.samples):
        about = {"seconds": waits[i], "guilt": case.guilt if i in guilty else ""}
        found.append(Row(f"{steps}#### {i % 100}", str(i % 100), about, i in guilty))
    return found
