"""Limits that more than one part applies."""

from __future__ import annotations

from typing import Final

LIVE_WITHIN_S: Final = 20.0
"""A process counts as dead when its last heartbeat is older than this."""

LEASE_S: Final = 20.0
"""An entry of a stream that its worker has not renewed for this long may be claimed by others."""

ADMISSION_MEMORY_SHARE: Final = 0.7
"""Share of Redis's memory above which no group is admitted and no session submits."""

INLINE_LIMIT_BYTES: Final = 256 * 1024
"""Larger records are spilled to the shared volume; Redis holds a path and a checksum instead."""

EVENTS_MEMORY_SHARE: Final = 0.1
"""Share of Redis's memory that the stream ``events`` may take."""
