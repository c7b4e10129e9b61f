from __future__ import annotations

from builders import make_body, make_prompt, scored
from plaudit_wire.messages import Announcement, PolicyVersion, Prompt
from plaudit_wire.records import Sample
from plaudit_workers.stream.calls import Admission, Commitment, Publication, StreamLimits
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions, commit, publish, unpublished
from plaudit_workers.stream.trainer import Ledger, TrainerStreams
from plaudit_workers.stream.transport import Transport


async def test_one_group_goes_from_admission_to_close(transport: Transport, quick: ConsumerOptions) -> None:
    trainer = TrainerStreams(transport, StreamLimits(max_open_groups=4))
    assert await trainer.take_over() == 1
    announcement = Announcement(PolicyVersion(1, 0), "weights/1.0", "abc")
    await trainer.announce(announcement)
    assert await transport.announced() == announcement
    prompt = make_prompt()
    assert await trainer.admit(prompt) is Admission.admitted

    prompts: Consumer[Prompt] = Consumer(transport, "prompts", "rollout-0", quick)
    samples: Consumer[Sample] = Consumer(transport, "samples", "reward-0", quick)
    async with prompts, samples:
        [taken] = await prompts.take(4)
        assert taken.payload == prompt
        assert await unpublished(transport, prompt) == [0, 1]
        for index in (0, 1):
            assert await publish(transport, taken, index, make_body(prompt, index)) is Publication.published
        prompts.finished(taken)
        deliveries = await samples.take(8)
        assert [d.payload.index for d in deliveries] == [0, 1]
        for delivery in deliveries:
            assert await commit(transport, delivery, scored(0.25 * delivery.payload.index)) is Commitment.committed
            samples.finished(delivery)

    [group] = await trainer.take_ready(8, 0.01)
    assert (group.id, group.phase, group.prompt) == (prompt.group, "ready", prompt)
    assert [s.scoring.value for s in group.samples if s.scoring] == [0.0, 0.25]
    assert [s.body for s in group.samples] == [make_body(prompt, 0), make_body(prompt, 1)]
    for sample in group.samples:
        s = sample.stamps
        times = [s.admitted, s.taken, s.published, s.score_taken, s.committed, group.ready, group.taken]
        assert times == sorted(time for time in times if time is not None)
    assert await trainer.take_ready(8, 0.01) == []
    assert await trainer.close(group.id, "trained")
    counters = await trainer.counters()
    assert Ledger.from_counters(counters, len(await trainer.open_groups())) == Ledger(admitted=1, trained=1)
    for stream in ("prompts", "samples", "ready"):
        assert await transport.commands.xlen(transport.names.prefix + stream) == 0
