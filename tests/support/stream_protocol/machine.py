"""The state machine: hypothesis chooses who does what next, and which fault strikes."""

from __future__ import annotations

import uuid

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from plaudit_workers.stream.calls import StreamLimits
from stream_protocol.watched_machine import WatchedMachine


class Machine(WatchedMachine):
    """One run."""

    @initialize(
        seed=st.integers(0, 1 << 30),
        group_scorers=st.booleans(),
        deadline_s=st.sampled_from([0.0, 1000.0]),
        least=st.integers(1, 2),
    )
    def start(self, seed: int, group_scorers: bool, deadline_s: float, least: int) -> None:
        limits = StreamLimits(
            max_open_groups=4,
            max_open_validation_groups=1,
            group_deadline_s=deadline_s,
            group_scoring_deadline_s=deadline_s,
            min_samples_per_group=least,
            has_group_scorers=group_scorers,
        )
        self.world = self.world_type(limits, seed)
        self.runner.run(self.world.start(self.address, f"machine-{uuid.uuid4().hex[:12]}", self.scripts))

    @rule()
    def validate(self) -> None:
        self.do(self.world.admit(1, "validation"))

    @precondition(lambda self: self.world.trainer.open)
    @rule()
    def drop_an_open_group(self) -> None:
        group = self.world.random.choice(list(self.world.trainer.open))
        self.world.trainer.taken = [taken for taken in self.world.trainer.taken if taken.id != group]
        self.do(self.world.close(group, "dropped", "run_ended"))

    @rule()
    def release(self) -> None:
        self.do(self.world.trainer.streams.release_expired())

    @rule(stream=st.sampled_from(["prompts", "samples", "groups"]))
    def leases_lapse(self, stream: str) -> None:
        self.do(self.world.lapse(self.world.alive(stream)))

    @rule(stream=st.sampled_from(["prompts", "samples", "samples", "groups"]))
    def a_worker_freezes_and_wakes(self, stream: str) -> None:
        self.do(self.world.freeze_and_wake(stream))

    @rule(stream=st.sampled_from(["prompts", "samples", "groups"]))
    def renew(self, stream: str) -> None:
        self.do(self.world.renew(self.world.alive(stream)))

    @rule(stream=st.sampled_from(["prompts", "samples", "groups"]))
    def hand_back(self, stream: str) -> None:
        self.do(self.world.hand_back(self.world.alive(stream)))

    @rule(stream=st.sampled_from(["prompts", "samples", "groups"]))
    def crash(self, stream: str) -> None:
        self.world.crash(self.world.alive(stream))

    @rule(stream=st.sampled_from(["prompts", "samples", "groups"]), retry=st.booleans())
    def an_entry_is_buried_and_dealt_with(self, stream: str, retry: bool) -> None:
        self.do(self.world.bury_one(stream))
        self.run(self.world.deal_with_dead_letter(retry=retry))
        self.check()

    @rule(retry=st.sampled_from([True, True, False]))
    def a_dead_letter_is_dealt_with(self, retry: bool) -> None:
        self.do(self.world.deal_with_dead_letter(retry=retry))

    @rule(resume=st.booleans())
    def another_trainer_takes_over(self, resume: bool) -> None:
        self.do(self.world.take_over(resume))

    @rule()
    def checkpoint(self) -> None:
        self.do(self.world.check_ledger())
        self.world.keep_checkpoint()

    @precondition(lambda self: self.world.zombies)
    @rule()
    def replaced_trainer_wakes(self) -> None:
        self.do(self.world.zombie_acts())

    @precondition(lambda self: self.world.sent)
    @rule()
    def call_arrives_again(self) -> None:
        self.do(self.world.send_again())
