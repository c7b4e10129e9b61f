import pytest

from plaudit_wire.backoff import backoff_s


@pytest.mark.parametrize(("failures", "pause_s"), [(1, 0.5), (2, 1.0), (3, 2.0), (5, 8.0), (6, 10.0), (10_000, 10.0)])
def test_pauses_double_up_to_a_limit(failures: int, pause_s: float) -> None:
    assert backoff_s(failures, 0.5, 10.0) == pause_s


def test_jitter_spreads_the_pause_around_its_limit() -> None:
    pauses = {backoff_s(9, 0.5, 10.0, jitter=(0.5, 1.5)) for _ in range(100)}
    assert len(pauses) > 50
    assert all(5.0 <= pause_s <= 15.0 for pause_s in pauses)
