"""Choose the sequences of the next forward pass, by pure arithmetic over their lengths.

A packed pass (``choose_oldest``) costs as much as its tokens, whatever their lengths: first come, first served.

A padded pass (``choose_neighbours``) costs as much as its padded tokens, plus a fixed part. So sequences of about the
same length go together, around the one that has waited longest (no sequence starves), and a sequence joins only while
the padding that it adds costs less than a separate forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile


def choose_oldest(lengths: Iterable[int], max_tokens: int) -> int:
    """Return the number of longest-waiting sequences that fit into one pass.

    Args:
        lengths: tokens of all waiting sequences, in order of arrival; at least one.
        max_tokens: most tokens of a forward pass; a longer sequence goes alone.
    """
    return max(1, sum(1 for _ in takewhile(lambda tokens: tokens <= max_tokens, accumulate(lengths))))


def choose_neighbours(lengths: Sequence[int], oldest: int, max_tokens: int, max_padding: int) -> slice:
    """Choose neighbours of the oldest sequence.

    Args:
        lengths: tokens of all waiting sequences, in ascending order.
        oldest: index of the sequence that has waited longest; it is always chosen.
        max_tokens: most tokens of a forward pass, padding included; a longer sequence goes alone.
        max_padding: most padding, in tokens, that one more sequence may add.

    Returns:
        The indices of the chosen ones. Padded to the longest of them they fill ``len * longest`` tokens.
    """
    start, stop = oldest, oldest + 1
    while True:
        count, longest = stop - start, lengths[stop - 1]
        shorter = longest - lengths[start - 1] if start else math.inf
        longer = (lengths[stop] - longest) * count if stop < len(lengths) else math.inf
        padding, width = min((shorter, longest), (longer, lengths[stop] if stop < len(lengths) else longest))
        if padding > max_padding or (count + 1) * width > max_tokens:
            return slice(start, stop)
        if shorter <= longer:
            start -= 1
        else:
            stop += 1
