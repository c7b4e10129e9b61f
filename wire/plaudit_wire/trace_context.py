"""The name of a sample's trace. Its ids follow from run, group and index alone, so nobody has to hand them on.

The metrics service sends the spans (``spans``); whoever works for a sample, a judge for one, is told the trace in a W3C
``traceparent`` header and puts its own spans below ours.
"""

from __future__ import annotations

import hashlib

_DRAWN_BITS = 64


def sample_ids(run: str, group: str, index: int) -> tuple[int, int]:
    """Trace id (128 bits) and id of the root span (64 bits) of a sample; never 0, which is no id."""
    digest = hashlib.sha256(f"{run}/{group}/{index}".encode()).digest()
    return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:24]) or 1


def drawn(run: str, group: str, index: int, share: float) -> bool:
    """Whether a sample is in the share (0 to 1) of all that is traced, whatever becomes of it."""
    trace_id, _ = sample_ids(run, group, index)
    return trace_id & (1 << _DRAWN_BITS) - 1 < share * (1 << _DRAWN_BITS)


def traceparent(run: str, group: str, index: int, *, sampled: bool = True) -> str:
    """The sample's root span as a W3C ``traceparent`` header; ``sampled`` says that its spans are kept."""
    trace_id, span_id = sample_ids(run, group, index)
    return f"00-{trace_id:032x}-{span_id:016x}-{int(sampled):02x}"
