"""slime's ``--rm-type remote_rm --rm-url``: ``{prompt, response, label}`` to a reward, which slime takes as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plaudit_workers.gateway.callers.results import SampleAnswer
from plaudit_workers.scoring.offline.lines import SampleInput, sample_input


def samples(body: Mapping[str, Any]) -> list[SampleInput]:
    """Return the one sample of a request; ``metadata``, if present, becomes ``extra_info``. Raise ``ValueError``."""
    metadata = body.get("metadata") or {}
    row = {
        "prompt": body.get("prompt"),
        "response": body.get("response"),
        "ground_truth": body.get("label"),
        "extra_info": metadata,
        "data_source": metadata.get("data_source") if isinstance(metadata, Mapping) else None,
    }
    return [sample_input(row, SampleInput)]


def answer(body: Mapping[str, Any], results: Sequence[SampleAnswer]) -> float | None:
    """Return the reward; None without one."""
    return results[0].score
