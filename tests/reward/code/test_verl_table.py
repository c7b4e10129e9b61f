"""verl's own results, recorded from its package (``make_verl_table.py``), are ours, but for right programs it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plaudit_job.rules.arguments import CodeOptions
from plaudit_reward.code.scorer import CodeScorer
from plaudit_reward.scorer import Attempt
from plaudit_wire.records import Sample

ROWS = [json.loads(line) for line in Path(__file__).with_name("verl_0.9.1.jsonl").read_text().splitlines()]


RIGHT_HERE = ("sys.stdin.buffer.read()", "open(0)")
"""Programs with these read their input, and fail in verl."""


@pytest.mark.long
async def test_every_program_of_the_table_scores_as_in_verl() -> None:
    scorer = CodeScorer("code", CodeOptions(), processes=2)
    await scorer.open()
    try:
        differences = []
        for row in ROWS:
            sample = Sample("t-0-1.0", 0, "apps", "", row["response"], ground_truth=row["ground_truth"])
            score = await scorer.score(sample, Attempt(100.0))
            right_here = any(part in row["response"] for part in RIGHT_HERE)
            if score.value != (1.0 if right_here else row["value"]):
                differences.append((row, score))
    finally:
        await scorer.close()
    assert len(ROWS) > 100
    assert differences == []
