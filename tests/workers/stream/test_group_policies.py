"""What a group that was never scored as one comes to: its samples keep what their scorers' policies leave them."""

from __future__ import annotations

from typing import Any

import msgspec

from builders import scored
from plaudit_workers.stream.consumer import commit


async def test_past_the_deadline_of_its_group_scorers_a_sample_keeps_its_own_score(run: Any) -> None:
    await run.start(has_group_scorers=True, group_scoring_deadline_s=0.0)
    first, second = await run.published(n=2)
    await commit(run.transport, first, msgspec.structs.replace(scored(1.0), alone=0.5))
    await commit(run.transport, second, scored(1.0))
    assert await run.trainer.release_expired() == [first.group]
    [group] = await run.trainer.take_ready(1, 0.0)
    scorings = [sample.scoring for sample in group.samples]
    assert [(scoring.outcome, scoring.value, scoring.alone) for scoring in scorings] == [
        ("scored", 0.5, None),
        ("timeout", None, None),
    ]
