"""How often a process of a reward service looks for cycles of garbage."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from plaudit_wire.logs import collect_seldom
collect_seldom()
searches = []
gc.callbacks.append(lambda phase, about: searches.append(phase))
samples = [[[] for _ in range(20)] for _ in range(2000)]
assert searches == [], searches
for _ in range(60_000):
    cycle = []
    cycle.append(cycle)
assert searches, "cycles are never found"
del samples, cycle
gc.collect()
"""


def test_samples_in_work_are_not_searched_for_garbage_again_and_again() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
