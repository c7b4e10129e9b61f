"""Following the announcement: what is loaded, when, and what is refused."""

import asyncio
import shutil

import pytest

from plaudit_workers.rollout.engines.protocol import EngineFailedError, WeightsUnreadableError
from plaudit_workers.rollout.engines.script import Script
from plaudit_workers.rollout.engines.scripted import ScriptedEngine
from plaudit_workers.rollout.weights import PolicyWeights, mean_difference, read_probe


class Recording(ScriptedEngine):
    """Remembers what it was told to load, and answers probes."""

    def __init__(self, logprobs=None) -> None:
        super().__init__(Script())
        self.loaded = []
        self.logprobs = logprobs

    async def load_weights(self, path, version, switch="continue") -> None:
        self.loaded.append((version.number, path.name))
        await super().load_weights(path, version, switch)

    async def probe(self, ids):
        return self.logprobs


async def nothing() -> None:
    return None


def follower(run, engine) -> PolicyWeights:
    return PolicyWeights(run.transport, engine, "continue", nothing)


async def test_nothing_announced_is_nothing_held(run) -> None:
    weights = follower(run, Recording())
    assert not await weights.follow()
    assert not weights.ready


async def test_an_announced_version_is_loaded_once(run) -> None:
    engine = Recording()
    weights = follower(run, engine)
    version = await run.announce(4)
    assert await weights.follow()
    assert await weights.follow()
    assert weights.held == version
    assert engine.loaded == [(4, str(version))]


async def test_a_lower_version_is_loaded_when_it_is_announced(run) -> None:
    engine = Recording()
    weights = follower(run, engine)
    await run.announce(9)
    await weights.follow()
    lower = await run.announce(2)
    assert await weights.follow()
    assert weights.held == lower


async def test_files_that_differ_from_the_announcement_are_not_loaded(run) -> None:
    engine = Recording()
    weights = follower(run, engine)
    await run.announce(0, digest="0" * 64)
    assert not await weights.follow()
    assert engine.loaded == []
    assert not weights.ready


async def test_files_that_vanish_are_looked_for_under_the_next_announcement(run) -> None:
    engine = Recording()
    weights = follower(run, engine)
    gone = await run.announce(0)
    shutil.rmtree(run.folder / str(gone))
    holding = asyncio.create_task(weights.hold())
    await asyncio.sleep(0.2)
    assert not holding.done()
    there = await run.announce(1)
    await asyncio.wait_for(holding, 10)
    assert weights.held == there
    assert engine.loaded == [(1, str(there))]


async def test_a_load_that_fails_half_way_leaves_nothing_held(run) -> None:
    class Torn(Recording):
        async def load_weights(self, path, version, switch="continue") -> None:
            if version.number == 1:
                raise WeightsUnreadableError("torn")
            await super().load_weights(path, version, switch)

    weights = follower(run, Torn())
    await run.announce(0)
    assert await weights.follow()
    await run.announce(1)
    assert not await weights.follow()
    assert not weights.ready
    await run.announce(2)
    assert await weights.follow()


@pytest.mark.parametrize(("limit", "refused"), [(0.05, True), (0.3, False)])
async def test_weights_whose_probe_differs_by_more_than_its_limit_are_never_ready(
    run, probe_file, limit, refused
) -> None:
    weights = follower(run, Recording(logprobs=[-1.0, -2.5]))
    version = await run.announce(0)
    probe_file(run.folder / str(version), [1, 2, 3], [-1.0, -2.0], limit)
    if refused:
        with pytest.raises(EngineFailedError, match=r"differ from the trainer's by 0\.25 nats a token \(limit 0\.05\)"):
            await weights.follow()
    else:
        assert await weights.follow()
    assert weights.logprob_mismatch == pytest.approx(0.25)
    assert weights.ready is not refused


async def test_a_probe_that_agrees_lets_the_rollout_begin(run, probe_file) -> None:
    weights = follower(run, Recording(logprobs=[-1.0, -2.0]))
    version = await run.announce(0)
    probe_file(run.folder / str(version), [1, 2, 3], [-1.001, -2.0])
    await weights.follow()
    assert weights.logprob_mismatch == pytest.approx(0.0005)
    assert weights.ready


def test_a_folder_without_a_probe_has_none_and_a_damaged_one_is_unreadable(tmp_path) -> None:
    assert read_probe(tmp_path) is None
    (tmp_path / "probe.json").write_text('{"ids": "abc"}')
    with pytest.raises(WeightsUnreadableError):
        read_probe(tmp_path)


def test_the_difference_of_sequences_of_different_lengths_is_infinite() -> None:
    assert mean_difference([1.0], [1.0, 2.0]) == float("inf")
    assert mean_difference([], []) == 0.0
