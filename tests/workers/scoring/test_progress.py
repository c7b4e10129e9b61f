"""The summary of ``plaudit score`` and ``plaudit submit``."""

from plaudit_workers.commands.score import OfflineProgress


def test_reasons_that_differ_only_in_numbers_are_one_and_places_are_kept_apart() -> None:
    progress = OfflineProgress()
    for failures in (5, 21, 22):
        progress.add(
            "infra_error", None, f"helpful: endpoint http://judge/v1: {failures} failures in a row; next try in 1 s"
        )
    progress.add("data_error", None, "mine: KeyError: 'a' (reward.py:2 in score)")
    progress.add("data_error", None, "mine: KeyError: 'a' (reward.py:7 in score)")
    assert "5 samples in less than 0.1 s: infra_error 3, data_error 2" in progress.summary()
    assert progress.summary().splitlines()[1:] == [
        "  3 × helpful: endpoint http://judge/v1: 5 failures in a row; next try in 1 s",
        "  1 × mine: KeyError: 'a' (reward.py:2 in score)",
        "  1 × mine: KeyError: 'a' (reward.py:7 in score)",
    ]
