"""A reward function that raises, hangs and returns None: the run ends, and no zero is invented."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)

REWARD = """
import hashlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    lot = int.from_bytes(hashlib.sha256(repr((solution_str, extra_info)).encode()).digest()[:4], "little") % 100
    if lot < 5:
        raise ValueError("raised on purpose")
    if lot < 6:
        while True:
            time.sleep(0.01)
    if lot < 7:
        return None
    return 1.0 + lot / 100
"""


def test_raising_hanging_and_none_cost_their_own_sample_and_are_counted(
    example: Callable[[str], Path],
    change_job: Callable[..., Path],
    plaudit_run: Callable[..., Any],
    scripted: dict[str, Any],
    tmp_path: Path,
) -> None:
    reward = tmp_path / "bad_reward.py"
    reward.write_text(REWARD)
    scorer = {
        "name": "bad",
        "kind": "python",
        "python": {"path": str(reward), "function": "compute_score"},
        "timeoutSeconds": 1,
    }
    job = change_job(
        example("01-copy-digits") / "job.yaml",
        reward__scorers=[scorer],
        rollout__engine=scripted,
        data__validation=None,
    )
    run = plaudit_run(job, "--steps", "3")
    assert run.exit_code == 0, run.output
    counts: dict[str, float] = {}
    for step in run.steps:
        for outcome in ("scored", "data_error", "timeout", "skipped"):
            counts[outcome] = counts.get(outcome, 0) + step.statistics.get(f"reward_pipeline/outcome/{outcome}", 0)
        # Values are 1.06 and more: any zero among them would pull the mean below.
        assert step.statistics["reward/min"] >= 1.0
    assert sum(counts.values()) == sum(step.num_samples for step in run.steps)
    assert all(counts[outcome] > 0 for outcome in ("scored", "data_error", "timeout", "skipped")), counts
    assert run.ledger["admitted"] == run.ledger["trained"] + run.ledger["dropped"] + run.ledger["evaluated"]
