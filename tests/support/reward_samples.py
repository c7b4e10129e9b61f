"""A sample as most tests of rewards want it."""

from __future__ import annotations

from typing import Any

import builders
from plaudit_wire.records import Sample


def make_sample(response: str = "#### 4", index: int = 0, **changes: Any) -> Sample:
    """Build a finished sample of GSM8K whose ground truth is 4."""
    about = {"data_source": "openai/gsm8k", "prompt": "2 + 2?", "ground_truth": "4"}
    return builders.make_sample(response, index, **{**about, **changes})
