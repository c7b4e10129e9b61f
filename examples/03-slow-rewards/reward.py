"""A reward that takes its time: uniform delays of 1-40 s, as in verl's pull request 2854, scaled to taste.

It is async, as a call of a judge or of a sandbox would be, so hundreds of samples wait at a time without a thread each.
"""

import asyncio
import random

SHORTEST_S, LONGEST_S = 1.0, 40.0


def delay_s(solution_str, extra_info, scale):
    """The same sample is always equally slow, so that strategies can be compared."""
    draw = random.Random(f"{extra_info['index']}/{solution_str}")
    return scale * draw.uniform(SHORTEST_S, LONGEST_S)


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    await asyncio.sleep(delay_s(solution_str, extra_info or {"index": 0}, scale))
    return sum(written == wanted for written, wanted in zip(solution_str, ground_truth, strict=False)) / len(
        ground_truth
    )
