"""The state machine: hypothesis chooses who does what next, and which fault strikes."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

from hypothesis import HealthCheck, Phase, reject, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from redis.exceptions import ResponseError

from plaudit_workers.stream.connection import RedisAddress
from plaudit_workers.stream.groups import StreamLimits
from plaudit_workers.stream.scripts import Scripts

SEARCH = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)


class Machine(RuleBasedStateMachine):
    """One run; ``machine_of`` says in which Redis and with which texts of the transitions."""

    world_type: Any
    address: RedisAddress
    scripts: Scripts
    watched: str
    """Which invariant: violations of all others are left aside; "" watches all."""
    found: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.world: Any = None

    def do(self, work: Any) -> None:
        with contextlib.closing(work):
            self.run(self.world.everybody_works())
            self.run(work)
            self.check()

    def run(self, work: Any) -> None:
        try:
            self.runner.run(work)
        except ResponseError:  # a seeded bug may also break a script that comes after it
            if not self.watched:
                raise
            reject()

    def check(self) -> None:
        broken = [violation for violation in self.world.violations if violation.startswith(self.watched)]
        self.found += broken
        assert not broken, "\n".join(broken)

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

    @rule(lossy=st.booleans())
    def replies_get_lost(self, lossy: bool) -> None:
        self.world.lossy = lossy

    @precondition(lambda self: self.world.sent)
    @rule()
    def call_arrives_again(self) -> None:
        self.do(self.world.send_again())

    @rule(rounds=st.integers(1, 2))
    def redis_loses_its_last_second(self, rounds: int) -> None:
        self.do(self.world.lose_last_second(rounds))

    @precondition(lambda self: not self.world.lost_everything)
    @rule()
    def redis_loses_everything(self) -> None:
        self.do(self.world.lose_everything())

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            if not self.world.violations:
                self.run(self.world.finish())
                self.check()
        finally:
            self.runner.run(self.world.stop())
            self.runner.close()


def machine_of(
    world_type: Any, address: RedisAddress, scripts: Scripts, watched: str = "", found: list[str] | None = None
) -> type[Machine]:
    """The machine against one Redis, with these texts of the transitions; ``found`` collects violations."""
    about = {"world_type": world_type, "address": address, "scripts": scripts}
    return type("Machine", (Machine,), {**about, "watched": watched, "found": [] if found is None else found})
