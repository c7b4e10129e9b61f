"""The state machine of sessions: hypothesis chooses who does what next, and which fault strikes."""

from __future__ import annotations

import uuid

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from stream_protocol.watched_machine import WatchedMachine


class SessionMachine(WatchedMachine):
    """One service."""

    @initialize(seed=st.integers(0, 1 << 30), group_scorers=st.booleans(), deadline_s=st.sampled_from([0.0, 1000.0]))
    def start(self, seed: int, group_scorers: bool, deadline_s: float) -> None:
        self.world = self.world_type(group_scorers, deadline_s, seed)
        self.runner.run(self.world.start(self.address, f"service-{uuid.uuid4().hex[:12]}", self.scripts))

    @rule(client=st.integers(0, 2))
    def a_client_is_killed_and_goes_on(self, client: int) -> None:
        self.do(self.world.clients[client].kill())

    @rule(client=st.integers(0, 2))
    def a_client_submits_again(self, client: int) -> None:
        chosen = self.world.clients[client]
        if chosen.wanted:
            self.do(chosen.submit(self.world.random.choice(list(chosen.wanted))))

    @precondition(lambda self: self.world.zombies)
    @rule()
    def a_replaced_client_wakes(self) -> None:
        self.do(self.world.zombie_acts())

    @rule()
    def clean_up(self) -> None:
        self.do(self.world.clean_up())

    @rule(by_s=st.sampled_from([-5000.0, 60.0, 5000.0]))
    def the_clock_steps(self, by_s: float) -> None:
        self.do(self.world.step_clock(by_s))

    @rule(stream=st.sampled_from(["samples", "groups"]))
    def leases_lapse(self, stream: str) -> None:
        self.do(self.world.lapse(self.world.alive(stream)))

    @rule(stream=st.sampled_from(["samples", "groups"]))
    def a_worker_freezes_and_wakes(self, stream: str) -> None:
        self.do(self.world.freeze_and_wake(stream))

    @rule(stream=st.sampled_from(["samples", "groups"]))
    def crash(self, stream: str) -> None:
        self.world.crash(self.world.alive(stream))
