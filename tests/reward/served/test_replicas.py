"""Which server is next, and when one is left out."""

from plaudit_reward.endpoint.served import FAILURES_BEFORE_EJECTION, Replica, Replicas


def healthy(*urls: str) -> tuple[Replicas, list[Replica]]:
    replicas = Replicas()
    replicas.update(urls, complete=True)
    members = replicas.due(0.0)
    for replica in members:
        replicas.probed(replica, 0.0, healthy=True)
    return replicas, members


def test_nothing_is_sent_to_a_server_that_was_never_healthy() -> None:
    replicas = Replicas()
    replicas.update(["a"], complete=True)
    assert replicas.pick(0.0) is None
    assert [replica.url for replica in replicas.due(0.0)] == ["a"]


def test_the_one_with_the_fewest_outstanding_requests_is_next() -> None:
    replicas, (a, b) = healthy("a", "b")
    a.outstanding, b.outstanding = 2, 1
    assert replicas.pick(0.0) is b


def test_a_server_that_fails_fast_does_not_draw_all_requests() -> None:
    replicas, (a, b) = healthy("a", "b")
    b.outstanding = 50
    replicas.failed(a, 0.0)
    assert replicas.pick(0.0) is b
    replicas.answered(a)
    assert replicas.pick(0.0) is a


def test_failures_in_a_row_eject_and_probes_come_at_growing_intervals() -> None:
    replicas, (a,) = healthy("a")
    for _ in range(FAILURES_BEFORE_EJECTION - 1):
        replicas.failed(a, 1.0)
    assert replicas.pick(1.0) is a
    replicas.failed(a, 1.0)
    assert replicas.pick(1.0) is None
    pauses, now_s = [], a.probe_at_s
    for _ in range(8):
        assert replicas.due(now_s) == [a]
        replicas.probed(a, now_s, healthy=False)
        pauses.append(a.probe_at_s - now_s)
        now_s = a.probe_at_s
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1] == pauses[-2]
    replicas.probed(a, now_s, healthy=True)
    assert replicas.pick(now_s) is a
    assert a.failures == 0


def test_an_answer_between_failures_keeps_a_server_in() -> None:
    replicas, (a,) = healthy("a")
    for _ in range(5 * FAILURES_BEFORE_EJECTION):
        replicas.failed(a, 0.0)
        replicas.answered(a)
    assert replicas.pick(0.0) is a


def test_a_full_server_rests_until_its_pause_is_over() -> None:
    replicas, (a, b) = healthy("a", "b")
    replicas.full(a, 10.0, 3.0)
    assert replicas.pick(10.0) is b
    replicas.full(b, 10.0, 5.0)
    assert replicas.pick(10.0) is None
    assert replicas.any_healthy
    assert replicas.free_at_s() == 13.0
    assert replicas.pick(13.0) is a


def test_known_servers_keep_their_state_and_those_that_are_gone_go() -> None:
    replicas, (a, _) = healthy("a", "b")
    a.outstanding = 3
    replicas.update(["a", "c"], complete=True)
    assert len(replicas) == 2
    assert replicas.pick(0.0) is a
    replicas.update([], complete=False)
    assert len(replicas) == 2
