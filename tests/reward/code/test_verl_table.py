"""verl's own results, recorded from its package (``make_verl_table.py``), are ours."""

from __future__ import annotations

import json
from pathlib import Path

from plaudit_job.rules.arguments import CodeOptions
from plaudit_reward.code.scorer import CodeScorer
from plaudit_reward.scorer import Attempt
from plaudit_wire.records import Sample

ROWS = [json.loads(line) for line in Path(__file__).with_name("verl_0.9.1.jsonl").read_text().splitlines()]


async def test_every_program_of_the_table_scores_as_in_verl() -> None:
    scorer = CodeScorer("code", CodeOptions(), processes=2)
    await scorer.open()
    try:
        differences = []
        for row in ROWS:
            sample = Sample("t-0-1.0", 0, "apps", "", row["response"], ground_truth=row["ground_truth"])
            score = await scorer.score(sample, Attempt(100.0))
            if score.value != row["value"]:
                differences.append((row, score))
    finally:
        await scorer.close()
    assert len(ROWS) > 100
    assert differences == []
