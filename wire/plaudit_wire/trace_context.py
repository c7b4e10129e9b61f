"""Identify a sample's trace. Its ids follow from run, group and index alone, so no process has to pass them on.

The metrics service sends the spans (``spans``). A service that works on a sample, such as a judge, receives the trace
in a W3C ``traceparent`` header and adds its own spans below ours.
"""

from __future__ import annotations

import hashlib

_DRAWN_BITS = 64


def sample_ids(run: str, group: str, index: int) -> tuple[int, int]:
    """Return a sample's trace id (128 bits) and root span id (64 bits); never 0, which is not a valid id."""
    digest = hashlib.sha256(f"{run}/{group}/{index}".encode()).digest()
    return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:24]) or 1


def drawn(run: str, group: str, index: int, share: float) -> bool:
    """Return True if a sample is in the traced share (0 to 1) of all samples, independent of its outcome."""
    trace_id, _ = sample_ids(run, group, index)
    return trace_id & (1 << _DRAWN_BITS) - 1 < share * (1 << _DRAWN_BITS)


def traceparent(run: str, group: str, index: int, *, sampled: bool = True) -> str:
    """Return the sample's root span as a W3C ``traceparent`` header; ``sampled``: its spans are kept."""
    trace_id, span_id = sample_ids(run, group, index)
    return f"00-{trace_id:032x}-{span_id:016x}-{int(sampled):02x}"
