"""Check the response against a regular expression of the job, such as ``<think>.*</think>.*``."""

from __future__ import annotations

import re
from typing import Literal

from plaudit_wire.sample import Sample


def matches_format(sample: Sample, *, pattern: str, match: Literal["full", "start", "anywhere"] = "full") -> float:
    """Return 1.0 if the response matches, else 0.0.

    Args:
        pattern: in Python's syntax; ``.`` matches line ends too.
        match: the part of the response that must match: all, the start, or any part.
    """
    expression = re.compile(pattern, re.DOTALL)
    methods = {"full": expression.fullmatch, "start": expression.match, "anywhere": expression.search}
    return 1.0 if methods[match](sample.response) else 0.0
