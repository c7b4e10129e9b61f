"""The lease: one leads, a standby takes over in time, nobody leads twice."""

from __future__ import annotations

import random

from cluster_model import ClusterModel

from plaudit_operator.runtime.kube import ApiUnavailableError
from plaudit_operator.runtime.leader import DURATION_S, Leader


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pair() -> tuple[ClusterModel, Clock, Leader, Leader]:
    cluster, clock = ClusterModel(), Clock()
    return (
        cluster,
        clock,
        Leader(cluster, ("system", "lease"), "a", clock),
        Leader(cluster, ("system", "lease"), "b", clock),
    )


def test_the_first_leads_and_the_second_stands_by():
    _, clock, first, second = pair()
    for _ in range(20):
        first.step()
        second.step()
        clock.now += 2
    assert first.leads
    assert not second.leads


def test_a_dead_leaders_lease_is_taken_over_within_twenty_seconds():
    _, clock, first, second = pair()
    first.step()
    second.step()
    died = clock.now
    while not second.leads:
        clock.now += 2
        second.step()
    assert DURATION_S <= clock.now - died <= 20


def test_a_lease_that_is_given_back_is_taken_at_once():
    _, _, first, second = pair()
    first.step()
    second.step()
    first.release()
    second.step()
    assert second.leads
    assert not first.leads


def test_a_leader_cut_off_stops_before_another_begins():
    cluster, clock, first, second = pair()
    draw = random.Random(7)
    cut_off = None

    def fault(_: str) -> None:
        if speaking is cut_off:
            raise ApiUnavailableError("cut off")

    cluster.before = fault
    for round_ in range(400):
        cut_off = {0: None, 1: first, 2: second}[round_ // 15 % 3]
        for speaking in draw.sample([first, second], 2):
            speaking.step()
        assert not (first.leads and second.leads), round_
        clock.now += draw.uniform(0.5, 3.0)
