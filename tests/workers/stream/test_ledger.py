from __future__ import annotations

from plaudit_workers.stream.trainer import Ledger


def test_a_ledger_that_adds_up_has_no_problems() -> None:
    ledger = Ledger(admitted=10, trained=4, evaluated=1, dropped={"run_ended": 2, "too_few_scored": 1}, open=2)
    assert ledger.problems() == []
    assert Ledger.from_counters(ledger.counters(), num_open=2) == ledger
    assert ledger.counters()["dropped"] == 3


def test_a_lost_group_shows_in_the_ledger() -> None:
    [problem] = Ledger(admitted=3, trained=1, open=1).problems()
    assert problem == "3 groups were admitted, but 1 trained + 0 evaluated + 0 dropped + 1 open = 2"


def test_a_negative_count_is_a_problem_even_when_the_sum_is_right() -> None:
    assert Ledger(admitted=0, trained=1, open=-1).problems() == ["open is -1"]
