"""A judge that goes away in the middle of a run: samples are tried again, then masked; none is a zero; the run ends."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from judge_process import JudgeProcess

pytestmark = pytest.mark.timeout(900)

KEY = "hush-hush"
OUTAGE_S = 6.0
OUTCOMES = ("scored", "data_error", "infra_error", "timeout", "skipped", "poison", "given_up")


@pytest.fixture
def judge(example: Callable[[str], Path]) -> Iterator[JudgeProcess]:
    script = example("04-judge") / "judge_server.py"
    judge = JudgeProcess(script, "--latency", "0.3", "--busy", "0.05", "--key", KEY)
    judge.start()
    yield judge
    judge.kill()


def break_after_steps(judge: JudgeProcess, steps: Path, count: int) -> None:
    """Kills the judge once so many steps are closed and starts it again after the outage."""
    while not (steps.exists() and len(steps.read_text().splitlines()) >= count):
        time.sleep(0.05)
    judge.kill()
    time.sleep(OUTAGE_S)
    judge.start()


def test_an_outage_masks_samples_and_the_run_ends(
    example: Callable[[str], Path],
    change_job: Callable[..., Path],
    plaudit_run: Callable[..., Any],
    judge: JudgeProcess,
    scripted: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLAUDIT_SECRET_JUDGE_TOKEN", KEY)
    folder = example("04-judge")
    scorer = {
        "name": "judge",
        "kind": "judge",
        "judge": {
            "baseUrl": f"http://127.0.0.1:{judge.port}/v1",
            "model": "stand-in",
            "apiKeySecret": {"name": "judge", "key": "token"},
            "promptTemplate": {"path": "judge.j2"},
            "parse": {"regex": r'"score": ([\d.]+)'},
        },
        "retries": 2,
        "limits": {"requestsPerMinute": 30000, "concurrency": 64},
    }
    job = change_job(
        folder / "job.yaml",
        reward__scorers=[scorer],
        reward__workers={"replicas": 2},
        reward__maxFailedShare=0.9,
        rollout__engine=scripted,
    )
    breaking = threading.Thread(
        target=break_after_steps, args=(judge, tmp_path / "run" / "steps.jsonl", 3), daemon=True
    )
    breaking.start()
    run = plaudit_run(job, "--steps", "10")
    breaking.join(timeout=60)
    assert run.exit_code == 0, run.output
    assert run.trained_steps == list(range(1, 11))
    counts: Counter[str] = Counter()
    for step in run.steps:
        counts.update({name: int(step.statistics.get(f"reward_pipeline/outcome/{name}", 0)) for name in OUTCOMES})
    assert counts["infra_error"] > 0
    assert counts["scored"] + counts["infra_error"] == counts.total() == sum(step.num_samples for step in run.steps)
    samples = [
        row
        for file in (run.folder / "samples").glob("*.parquet")
        for row in pyarrow.parquet.read_table(file, columns=["outcome", "score"]).to_pylist()
    ]
    assert Counter(row["outcome"] for row in samples) == counts
    assert {row["score"] for row in samples if row["outcome"] == "infra_error"} == {None}
    ledger = run.ledger
    assert ledger["admitted"] == ledger["trained"] + ledger["evaluated"] + ledger["dropped"] == len(samples) / 8
    logs = "".join(log.read_text() for log in (run.folder / "logs").glob("*"))
    assert "endpoint fails; requests to it stop" in logs
    assert "endpoint responds again" in logs
    assert KEY not in logs
