from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import scored
from plaudit_wire.records import ScoringRecord
from plaudit_workers.stream.calls import Commitment
from plaudit_workers.stream.consumer import commit, commit_group
from plaudit_workers.stream.groups import read_group
from plaudit_workers.stream.transport import Transport

TIMEOUT = ScoringRecord("timeout", reason="the judge was silent")


async def test_the_first_score_counts_whoever_commits_it(run: Any, transport: Transport) -> None:
    slow = await run.published(n=1)
    other = run.another(run.samples, "reward-1")
    [taken] = await other.reclaim(8, lease_s=0.0)
    assert (taken.deliveries, taken.payload) == (2, slow[0].payload)
    assert await commit(transport, slow[0], scored(0.5)) is Commitment.committed
    assert await commit(transport, taken, scored(0.75)) is Commitment.duplicate
    [group] = await run.trainer.take_ready(1, 0.0)
    assert group.samples[0].scoring.value == 0.5
    assert await transport.commands.xlen(transport.names.samples) == 0
    assert (await run.trainer.counters())["duplicates:samples"] == 1


async def test_a_failure_counts_only_from_the_samples_holder(run: Any, transport: Transport) -> None:
    frozen = await run.published(n=1)
    other = run.another(run.samples, "reward-1")
    [taken] = await other.reclaim(8, lease_s=0.0)
    assert await commit(transport, frozen[0], TIMEOUT) is Commitment.refused
    assert await commit(transport, taken, TIMEOUT) is Commitment.committed


async def test_a_score_of_another_body_is_refused_and_its_entry_ended(run: Any, transport: Transport) -> None:
    [delivery] = await run.published(n=1)
    stranger = replace(delivery, digest="0" * 32)
    assert await commit(transport, stranger, scored(1.0)) is Commitment.refused
    assert await transport.commands.xlen(transport.names.samples) == 0


async def test_a_group_with_too_few_scores_is_dropped_with_its_reason(run: Any, transport: Transport) -> None:
    await run.start(min_samples_per_group=2)
    deliveries = await run.published(n=3)
    for delivery, scoring in zip(deliveries, [scored(1.0), TIMEOUT, TIMEOUT], strict=True):
        await commit(transport, delivery, scoring)
    [group] = await run.trainer.take_ready(1, 0.0)
    assert (group.phase, group.reason) == ("dropped", "too_few_scored")
    with pytest.raises(ValueError, match="is not ready"):
        await run.trainer.close(group.id, "trained")
    assert await run.trainer.close(group.id, "dropped", group.reason)
    counters = await run.trainer.counters()
    assert (counters["dropped"], counters["dropped:too_few_scored"]) == (1, 1)


async def test_a_scorer_may_ask_for_the_group_to_be_dropped(run: Any, transport: Transport) -> None:
    first, second = await run.published(n=2)
    await commit(transport, first, ScoringRecord("infra_error", drop_group=True))
    await commit(transport, second, scored(1.0))
    [group] = await run.trainer.take_ready(1, 0.0)
    assert (group.phase, group.reason) == ("dropped", "drop_group")


async def test_a_validation_group_is_ready_whatever_became_of_it(run: Any, transport: Transport) -> None:
    await run.start(min_samples_per_group=2, has_group_scorers=True)
    [delivery] = await run.published(group="v-0-2.0", split="validation", n=1)
    await commit(transport, delivery, TIMEOUT)
    [group] = await run.trainer.take_ready(1, 0.0)
    assert group.phase == "ready"
    assert await run.trainer.close(group.id, "evaluated")


async def test_a_sample_was_not_taken_before_it_was_published(run: Any, transport: Transport) -> None:
    [delivery] = await run.published(n=1)
    delivery.taken -= 3600
    await commit(transport, delivery, scored(1.0))
    [group] = await run.trainer.take_ready(1, 0.0)
    stamps = group.samples[0].stamps
    assert stamps.score_taken == stamps.published
    assert stamps.score_first_taken is None


async def test_the_first_taker_of_a_sample_is_known_after_a_takeover(run: Any, transport: Transport) -> None:
    await run.published(n=1)
    [again] = await run.another(run.samples, "reward-1").reclaim(1, lease_s=0.0)
    await commit(transport, again, scored(1.0))
    [group] = await run.trainer.take_ready(1, 0.0)
    stamps = group.samples[0].stamps
    assert group.samples[0].deliveries == 2
    assert stamps.published <= stamps.score_first_taken < stamps.score_taken <= stamps.committed


async def test_group_scorers_replace_the_scores_when_all_samples_are_terminal(run: Any, transport: Transport) -> None:
    await run.start(has_group_scorers=True)
    group_id = await run.scored(n=2)
    assert await run.trainer.take_ready(1, 0.0) == []
    [delivery] = await run.groups.take(1)
    group = await read_group(transport, delivery.payload.group)
    assert group is not None
    assert (group.id, group.phase) == (group_id, "group_scoring")
    ranked = [scored(0.0), scored(9.0)]
    with pytest.raises(ValueError, match="1 scorings for the 2 samples"):
        await commit_group(transport, delivery, group, ranked[:1])
    assert await commit_group(transport, delivery, group, ranked) is Commitment.committed
    assert await commit_group(transport, delivery, group, ranked) is Commitment.duplicate
    [ready] = await run.trainer.take_ready(1, 0.0)
    assert [sample.scoring for sample in ready.samples] == ranked
    assert await transport.commands.xlen(transport.names.groups) == 0


async def test_a_group_result_for_other_bodies_is_refused(run: Any, transport: Transport) -> None:
    await run.start(has_group_scorers=True)
    await run.scored(n=1)
    [delivery] = await run.groups.take(1)
    group = await read_group(transport, delivery.group)
    await transport.commands.hset(transport.names.group(delivery.group), "published:0", "call other 1 1 1-1\n")
    assert group is not None
    assert await commit_group(transport, delivery, group, [scored(1.0)]) is Commitment.refused


async def test_only_the_holder_of_a_group_may_take_scores_away(run: Any, transport: Transport) -> None:
    await run.start(has_group_scorers=True)
    await run.scored(n=1)
    [frozen] = await run.groups.take(1)
    [holder] = await run.another(run.groups, "reward-1").reclaim(1, lease_s=0.0)
    group = await read_group(transport, frozen.group)
    assert group is not None
    assert await commit_group(transport, frozen, group, [TIMEOUT]) is Commitment.refused
    assert await commit_group(transport, holder, group, [TIMEOUT]) is Commitment.committed
    [taken] = await run.trainer.take_ready(1, 0.0)
    assert (taken.phase, taken.reason) == ("dropped", "too_few_scored")
