"""Records of samples and groups from the seconds that they spent in each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plaudit_wire.records import (
    GenerationRecord,
    GroupRecord,
    Outcome,
    SampleRecord,
    SandboxRecord,
    ScorerRecord,
    ScoringRecord,
    Split,
    Stamps,
    TurnRecord,
)

ADMITTED = 1_000_000.0


def build_sample(
    group: str = "t-0-1.0",
    index: int = 0,
    *,
    admitted: float = ADMITTED,
    rollout_queue: float = 0.0,
    sandboxes: float = 0.0,
    engine_queue: float = 0.0,
    generation: float = 0.0,
    tools: float = 0.0,
    sample_queue: float = 0.0,
    redelivery: float = 0.0,
    limiter: float = 0.0,
    retry: float = 0.0,
    score: float = 0.0,
    commit: float = 0.0,
    outcome: Outcome = "scored",
    value: float | None = 1.0,
    version: int = 3,
    step: int = 1,
    split: Split = "train",
    num_preempted: int = 0,
    scorers: dict[str, ScorerRecord] | None = None,
    deliveries: int = 1,
    prompt_tokens: int = 10,
    response_tokens: int = 20,
    turns: Sequence[TurnRecord] = (),
) -> SampleRecord:
    """Build a sample that spent the given seconds in the given stages, one after the other."""
    taken = admitted + rollout_queue
    published = taken + sandboxes + engine_queue + generation + tools
    first_taken = published + sample_queue
    score_taken = first_taken + redelivery
    committed = score_taken + limiter + retry + score + commit
    return SampleRecord(
        group=group,
        index=index,
        split=split,
        step=step,
        data_source="digits",
        stamps=Stamps(
            admitted=admitted,
            taken=taken,
            published=published,
            score_first_taken=first_taken if redelivery else None,
            score_taken=score_taken,
            committed=committed,
        ),
        scoring=ScoringRecord(
            outcome=outcome,
            value=value if outcome == "scored" else None,
            scorers=scorers or {},
            limiter_s=limiter,
            retry_s=retry,
            call_s=score,
            worker="reward-1",
        ),
        generation=GenerationRecord(
            worker="rollout-1",
            generate_s=engine_queue + generation,
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens,
            version_min=version,
            version_max=version,
            tool_s=sandboxes + tools,
            engine_queue_s=engine_queue,
            num_preempted=num_preempted,
            turns=list(turns),
            sandbox=SandboxRecord(start_s=sandboxes) if sandboxes else None,
        ),
        deliveries=deliveries,
    )


def build_group(
    samples: Sequence[SampleRecord], *, group_scorer: float = 0.0, ready_queue: float = 0.0, **fields: Any
) -> GroupRecord:
    """Build the record of a group of these samples whose group scorers took ``group_scorer`` seconds."""
    terminal = max(sample.stamps.committed or 0.0 for sample in samples)
    ready = terminal + group_scorer
    defaults: dict[str, Any] = {
        "group": samples[0].group,
        "split": samples[0].split,
        "step": samples[0].step,
        "end": "trained",
        "num_samples": len(samples),
        "num_scored": sum(sample.scoring.outcome == "scored" for sample in samples),
        "admitted": samples[0].stamps.admitted,
        "terminal": terminal,
        "ready": ready,
        "taken": ready + ready_queue,
        "closed": ready + ready_queue + 1.0,
    }
    return GroupRecord(**defaults | fields)
