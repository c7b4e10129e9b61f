"""Which policy versions survive, and which open groups a resumed trainer goes on with. Pure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.stream.groups import Group
from plaudit_workers.training.resume import adopt, bring_up_to_date
from plaudit_workers.training.schedule import GroupInFlight, Schedule, TrainerLedger
from plaudit_workers.training.state import Lineage

# 1 ran to step 12; 2 went on from its checkpoint 10 and ran to 15; 3 went on from 1's checkpoint again; 4 from 3's 13.
LINEAGE = Lineage({1: PolicyVersion(0, 0), 2: PolicyVersion(1, 10), 3: PolicyVersion(1, 10), 4: PolicyVersion(3, 13)})


@pytest.mark.parametrize(
    ("version", "head", "survives"),
    [
        ((1, 12), (1, 12), True),
        ((1, 13), (1, 12), False),
        ((1, 10), (2, 11), True),
        ((1, 11), (2, 11), False),
        ((2, 10), (3, 10), True),  # 2 published 1's weights once more before it went its own way
        ((2, 11), (3, 12), False),
        ((1, 3), (4, 13), True),
        ((3, 13), (4, 13), True),
        ((3, 14), (4, 15), False),
        ((2, 10), (4, 15), True),
        ((2, 12), (4, 15), False),
        ((9, 1), (4, 15), False),
    ],
)
def test_versions_of_a_lost_future_are_distinguished_from_the_surviving_line(
    version: tuple[int, int], head: tuple[int, int], survives: bool
) -> None:
    assert LINEAGE.survives(PolicyVersion(*version), PolicyVersion(*head)) is survives


def test_a_checkpoint_that_a_replaced_trainer_saved_late_is_ruled_out() -> None:
    lineage = Lineage({1: PolicyVersion(0, 0), 2: PolicyVersion(1, 2)})
    assert [lineage.rules_out(PolicyVersion(*version)) for version in ((1, 2), (1, 4), (2, 3))] == [False, True, False]
    assert not Lineage().rules_out(PolicyVersion(1, 4))  # its file was deleted: every checkpoint counts


def test_a_run_restarted_without_a_checkpoint_keeps_samples_of_the_first_policy() -> None:
    lineage = Lineage({1: PolicyVersion(0, 0), 2: PolicyVersion(0, 0)})
    assert lineage.survives(PolicyVersion(1, 0), PolicyVersion(2, 0))
    assert not lineage.survives(PolicyVersion(1, 1), PolicyVersion(2, 3))


def test_a_lineage_is_kept_beside_the_checkpoints(tmp_path: Path) -> None:
    assert Lineage.read(tmp_path / "none") == Lineage()
    LINEAGE.write(tmp_path / "checkpoints")
    assert Lineage.read(tmp_path / "checkpoints") == LINEAGE
    assert LINEAGE.newest == 4


Found = Callable[..., Group]


@pytest.fixture
def found(make_groups: Any) -> Found:
    """A group that is open in Redis: its position, its name's last part, the versions that sampled it."""

    def make(
        position: int, name: str = "1.0", versions: tuple[tuple[int, int], ...] = ((1, 0),), **about: Any
    ) -> Group:
        (group,) = make_groups([[1.0]])
        incarnation, attempt = (int(part) for part in name.split("."))
        prompt = msgspec.structs.replace(
            group.prompt, group=f"t-{position}-{name}", position=position, attempt=attempt,
            min_version=PolicyVersion(*versions[0]), **{"step": position // 4 + 1} | about,
        )  # fmt: skip
        spans = [(token, *version) for token, version in enumerate(versions)]
        samples = [
            msgspec.structs.replace(sample, body=msgspec.structs.replace(sample.body, version_spans=spans))
            for sample in group.samples
        ]
        return msgspec.structs.replace(group, id=prompt.group, prompt=prompt, samples=samples, incarnation=incarnation)

    return make


def ledger_at(cursor: int, *in_flight: int) -> TrainerLedger:
    """A checkpoint's ledger: everything below the cursor was trained, but for what is in flight."""
    ledger = TrainerLedger()
    for position in range(cursor):
        ledger.admit("train", GroupInFlight(f"t-{position}-1.0", position, 0, position // 4 + 1, 0))
        if position not in in_flight:
            ledger.end(f"t-{position}-1.0", "trained")
    return ledger


def any_version(_: PolicyVersion) -> bool:
    return True


SCHEDULE = Schedule(steps=10, prompts_per_step=4, max_staleness=1)


def test_groups_in_flight_at_the_checkpoint_and_admitted_after_it_are_gone_on_with(found: Found) -> None:
    ledger = ledger_at(8, 6, 7)
    adoption = adopt(SCHEDULE, 1, ledger, [found(6), found(8), found(11)], any_version)
    assert sorted(flight.position for flight in adoption.kept) == [6, 8, 11]
    bring_up_to_date(ledger, adoption, ended_since=0)
    assert sorted(ledger.train.in_flight) == ["t-11-1.0", "t-6-1.0", "t-8-1.0"]
    assert ledger.train.returned == {7: 1}  # in flight at the checkpoint, trained since: to be done again
    assert ledger.counters() == {
        "admitted": 10, "trained": 6, "evaluated": 0, "dropped": 1, "dropped:rolled_back": 1,
    }  # fmt: skip
    assert ledger.problems() == []


def test_groups_beyond_the_restored_schedule_are_rolled_back(found: Found) -> None:
    adoption = adopt(SCHEDULE, 1, ledger_at(8, 6, 7), [found(11), found(12)], any_version)
    assert ([flight.position for flight in adoption.kept], adoption.rolled_back) == ([11], ["t-12-1.0"])


def test_extra_groups_of_the_lost_future_are_rolled_back_and_those_of_the_checkpoint_are_kept(found: Found) -> None:
    ledger = ledger_at(8, 6, 7)
    ledger.train.add_extras(2, 1)
    groups = [found(8, step=2), found(9, step=2), found(10, step=3), found(12, step=3), found(13, step=4)]
    adoption = adopt(SCHEDULE, 1, ledger, groups, any_version)
    assert sorted(flight.position for flight in adoption.kept) == [8, 10, 12]
    assert adoption.rolled_back == ["t-9-1.0", "t-13-1.0"]


def test_groups_that_the_checkpoint_has_learnt_from_are_rolled_back_when_they_reappear(found: Found) -> None:
    adoption = adopt(SCHEDULE, 1, ledger_at(8, 6, 7), [found(5)], any_version)
    assert (adoption.kept, adoption.rolled_back) == ([], ["t-5-1.0"])


def test_groups_with_a_token_of_a_lost_future_are_rolled_back(found: Found) -> None:
    def survives(version: PolicyVersion) -> bool:
        return version.number <= 1

    groups = [found(6, versions=((1, 0), (1, 1))), found(7, versions=((1, 1), (1, 2)))]
    adoption = adopt(SCHEDULE, 1, ledger_at(8, 6, 7), groups, survives)
    assert ([flight.position for flight in adoption.kept], adoption.rolled_back) == ([6], ["t-7-1.0"])
    assert adoption.kept[0].version == 0


def test_of_two_groups_of_one_prompt_the_newer_is_kept(found: Found) -> None:
    adoption = adopt(SCHEDULE, 1, ledger_at(8), [found(8, "1.0"), found(8, "2.1"), found(8, "2.0")], any_version)
    assert ([flight.group for flight in adoption.kept], adoption.rolled_back) == (
        ["t-8-2.1"],
        ["t-8-1.0", "t-8-2.0"],
    )


def test_validation_groups_are_never_gone_on_with(found: Found) -> None:
    adoption = adopt(SCHEDULE, 1, ledger_at(8), [found(8, split="validation")], any_version)
    assert adoption.kept == []


def test_groups_that_ended_after_the_checkpoint_count_as_rolled_back(found: Found) -> None:
    ledger = ledger_at(8, 6, 7)
    bring_up_to_date(ledger, adopt(SCHEDULE, 1, ledger, [found(6), found(12)], any_version), ended_since=3)
    # 7 ended since and was known; 12 was admitted since and cannot be used; three more came and went.
    assert ledger.counters()["dropped:rolled_back"] == 5
    assert ledger.counters()["admitted"] == 12
    assert ledger.problems() == []


@pytest.mark.parametrize(
    ("position", "name", "num_lost"),
    [
        (5, "1.0", 0),  # trained before the checkpoint, open again because Redis lost its last seconds
        (6, "1.0", 0),  # in flight at the checkpoint
        (3, "1.1", 0),  # an attempt that was dropped before the checkpoint
        (3, "2.2", 1),  # the attempt that followed it
        (9, "1.0", 1),
    ],
)
def test_a_group_that_is_rolled_back_counts_once(found: Found, position: int, name: str, num_lost: int) -> None:
    ledger = ledger_at(8, 6, 7)
    ledger.train.returned[3] = 2
    adoption = adopt(SCHEDULE, 1, ledger, [found(position, name)], lambda _: False)
    assert (len(adoption.rolled_back), adoption.num_lost) == (1, num_lost)
    before = ledger.counters()["admitted"]
    bring_up_to_date(ledger, adoption, ended_since=0)
    assert ledger.counters()["admitted"] == before + num_lost
    assert ledger.problems() == []


def test_a_run_that_begins_with_another_runs_checkpoint_takes_its_positions_and_counts_nothing() -> None:
    ledger = ledger_at(8, 6, 7)
    ledger.train.returned[2] = 3
    begun = ledger.begun_anew()
    assert (begun.train.cursor, begun.train.returned, begun.train.in_flight) == (8, {2: 0, 6: 0, 7: 0}, {})
    assert begun.counters()["admitted"] == 0
