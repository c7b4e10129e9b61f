"""Which sequences share a forward pass."""

from hypothesis import given
from hypothesis import strategies as st

from plaudit_model_server.batcher import choose_neighbours, choose_oldest

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=60).map(sorted)


@given(LENGTHS, st.data())
def test_the_oldest_is_in_and_the_pass_within_its_budget(lengths: list[int], data: st.DataObject) -> None:
    oldest = data.draw(st.integers(0, len(lengths) - 1))
    max_tokens, max_padding = data.draw(st.integers(1, 3000)), data.draw(st.integers(0, 300))
    chosen = choose_neighbours(lengths, oldest, max_tokens, max_padding)
    batch = lengths[chosen]
    assert chosen.start <= oldest < chosen.stop
    assert len(batch) == 1 or len(batch) * batch[-1] <= max_tokens
    assert len(batch) * batch[-1] - sum(batch) <= max_padding * (len(batch) - 1)


@given(LENGTHS)
def test_with_room_for_everything_all_go_together(lengths: list[int]) -> None:
    assert choose_neighbours(lengths, 0, 10**6, 10**6) == slice(0, len(lengths))


@given(LENGTHS)
def test_without_padding_only_equal_lengths_go_together(lengths: list[int]) -> None:
    batch = lengths[choose_neighbours(lengths, 0, 10**6, 0)]
    assert batch == [length for length in lengths if length == lengths[0]]


def test_neighbours_in_length_go_with_the_oldest() -> None:
    assert choose_neighbours([1, 2, 50, 52, 55, 400], 3, 10_000, 10) == slice(2, 5)


def test_a_sequence_longer_than_the_budget_goes_alone() -> None:
    assert choose_neighbours([400, 400], 1, 100, 100) == slice(1, 2)


def test_packed_the_oldest_go_together_as_far_as_the_budget_reaches() -> None:
    assert choose_oldest([30, 5, 60, 5], 95) == 3
    assert choose_oldest([30, 5, 60, 5], 94) == 2
    assert choose_oldest([30, 5], 1000) == 2
    assert choose_oldest([400, 1], 100) == 1
