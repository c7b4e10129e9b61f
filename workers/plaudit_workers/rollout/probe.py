"""Read the trainer's probe of published weights and compare it with the engine's. Called by ``weights``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from plaudit_workers.published_weights import PROBE_FILE, Probe
from plaudit_workers.rollout.engines.protocol import WeightsUnreadableError


def read_probe(folder: Path) -> Probe | None:
    """Read the folder's probe; None if it has none.

    Raises:
        WeightsUnreadableError: the file is not a probe.
    """
    try:
        return msgspec.json.decode((folder / PROBE_FILE).read_bytes(), type=Probe)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsUnreadableError(f"probe.json in {folder}: {error}") from error


def mean_difference(expected: Sequence[float], actual: Sequence[float]) -> float:
    """Return the mean absolute difference of two [N] sequences: infinite if lengths differ, 0 if empty."""
    if len(expected) != len(actual):
        return math.inf
    return math.fsum(abs(a - b) for a, b in zip(expected, actual, strict=True)) / max(1, len(expected))
