"""Whole runs whose versions are published as deltas."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from delta_series import DeltaSeries
from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.training.publish import prune_weights
from plaudit_workers.training.scripted import ScriptedBackend
from plaudit_workers.weights.published import is_whole
from simulated_run import make_plan


class Deltas(ScriptedBackend):
    """Publishes its first version whole and then deltas; that of step 2 is damaged."""

    def __init__(self, folder: Path, *args: Any) -> None:
        super().__init__(folder, *args)
        self.series = DeltaSeries(folder / "weights")
        self.requested: list[str] = []

    def publish(self, version: PolicyVersion) -> Announcement:
        announcement = self.series.publish(version)
        if version.number == 2:
            for path in Path(announcement.path).glob("*.delta"):
                path.write_bytes(b"damaged")
        return announcement

    def write_whole(self, announcement: Announcement) -> None:
        self.requested.append(str(announcement.version))
        for path in Path(announcement.path).glob("*.delta"):
            path.unlink()
        self.series.write(Path(announcement.path), whole=True, delta=True)

    def prune(self, in_use: Collection[str]) -> None:
        prune_weights(self._folder / "weights", in_use)


async def test_a_version_whose_delta_is_damaged_is_written_whole_once_and_the_run_ends(simulation: Any) -> None:
    simulation.policy_class = Deltas
    async with simulation.workers(rollouts=2):
        done, policy = await simulation.train(make_plan(steps=4))
    assert done
    assert policy.requested == ["1.2"]
    weights = simulation.folder / "weights"
    assert [is_whole(weights / f"1.{number}") for number in (2, 3, 4)] == [True, False, False]
    assert (simulation.ledger()["trained"], simulation.ledger()["problems"]) == (16, [])
    whole = sum(path.stat().st_size for path in (weights / "1.2").glob("*.safetensors"))
    assert 0 < simulation.steps()[-1].statistics["training/published_bytes"] < whole / 2


@pytest.mark.long
async def test_rollouts_follow_the_next_trainer_whose_deltas_begin_anew(simulation: Any) -> None:
    simulation.policy_class = Deltas
    plan = make_plan(steps=6, checkpoint_every_steps=1)
    async with simulation.workers(rollouts=2):
        simulation.update_s = lambda groups: 0.1
        assert not await simulation.killed(plan, after_s=0.5)
        done, _ = await simulation.train(plan)
    assert done
    assert simulation.ledger()["problems"] == []
    assert simulation.steps()[-1].step == 6
