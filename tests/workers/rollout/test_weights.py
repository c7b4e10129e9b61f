"""Following the announcement: what is loaded, when, and what is refused."""

import asyncio
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from delta_series import DeltaSeries
from plaudit_wire.messages import Announcement, PolicyVersion, Transfer, TransferPart
from plaudit_workers.rollout.engine import EngineFailedError, WeightsUnreadableError
from plaudit_workers.rollout.scripted import Script, ScriptedEngine
from plaudit_workers.rollout.weights import PolicyWeights, ReceptionMarks, mean_difference, read_probe
from plaudit_workers.weights.published import weights_digest
from plaudit_workers.weights.send import WeightPart, WeightServer


class Recording(ScriptedEngine):
    """Remembers what it was told to load, and answers probes."""

    def __init__(self, logprobs=None) -> None:
        super().__init__(Script())
        self.loaded = []
        self.naps = 0
        self.logprobs = logprobs

    async def load_weights(self, path, version, switch="continue") -> None:
        self.loaded.append((version.number, path.name))
        await super().load_weights(path, version, switch)

    async def sleep(self, switch="continue") -> None:
        self.naps += 1

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


async def test_a_rollout_sleeps_when_the_trainer_needs_the_gpus_and_then_loads_the_weights_again(run) -> None:
    engine = Recording()
    reports: list[tuple[str, str, bool]] = []

    async def report() -> None:
        reports.append((weights.asleep, str(weights.loading or ""), weights.held is not None))

    weights = PolicyWeights(run.transport, engine, "continue", report)
    version = await run.announce(4)
    await weights.follow()
    for sleep in ("1.4-1", "1.4-2"):
        await run.announce(4, sleep=sleep)
        assert not await weights.follow()
        assert (weights.asleep, weights.held) == (sleep, None)
        assert weights.ready
    await run.announce(4)
    assert await weights.follow()
    assert (weights.asleep, weights.held) == ("", version)
    assert (engine.loaded, engine.naps) == ([(4, str(version))] * 2, 1)
    assert all(asleep or loading or held for asleep, loading, held in reports)  # it takes memory in no report unseen


async def test_a_rollout_that_starts_while_others_sleep_waits_before_it_builds_its_engine(run) -> None:
    weights = follower(run, Recording())
    await run.announce(4, sleep="1.4-1")
    starting = asyncio.create_task(weights.begin())
    await asyncio.sleep(0.3)
    assert (starting.done(), weights.asleep, weights.ready) == (False, "1.4-1", False)
    version = await run.announce(5)
    await starting
    assert (weights.asleep, weights.loading) == ("", version)  # nobody may take or free memory while its engine starts
    assert await weights.follow()
    assert (weights.loading, weights.held) == (None, version)


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
    watching, holding = asyncio.create_task(weights.watch()), asyncio.create_task(weights.hold())
    await asyncio.sleep(0.2)
    assert not holding.done()
    there = await run.announce(1)
    await asyncio.wait_for(holding, 10)
    watching.cancel()
    assert weights.held == there
    assert engine.loaded == [(1, str(there))]


async def test_a_version_that_the_engine_cannot_read_leaves_nothing_held(run) -> None:
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


async def test_a_version_that_the_engine_can_never_read_ends_the_process(run) -> None:
    class Blind(Recording):
        async def load_weights(self, path, version, switch="continue") -> None:
            raise WeightsUnreadableError("permission denied")

    weights = follower(run, Blind())
    await run.announce(0)
    for _ in range(3):
        assert not await weights.follow()
    await run.announce(1)
    with pytest.raises(EngineFailedError, match=r"1\.1 have the announced digest, .* 5 times: permission denied"):
        await asyncio.wait_for(weights.watch(), 30)


async def test_files_that_the_trainer_has_yet_to_write_are_awaited_for_any_time(run) -> None:
    weights = follower(run, Recording())
    version = await run.announce(0, digest="0" * 64)
    for _ in range(6):
        assert not await weights.follow()
    await run.announce(0)
    assert await weights.follow()
    assert weights.held == version


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


@pytest.fixture
def offer(run):
    """Announces weights that a server offers from memory; the announced digest may be another."""
    servers = []

    async def announce(number, *, digest="", path="") -> PolicyVersion:
        version = PolicyVersion(run.trainer.incarnation, number)
        part = WeightPart.of([(0, b"weights")])
        servers.append(WeightServer())
        servers[-1].offer(version, "token", part)
        parts = [TransferPart(f"127.0.0.1:{servers[-1].port}", digest or part.digest)]
        file_digest = weights_digest(Path(path)) if Path(path, "model.safetensors").is_file() else "0" * 64
        await run.trainer.announce(Announcement(version, path, file_digest, Transfer("token", 7, parts)))
        return version

    yield announce
    for server in servers:
        server.close()


async def test_offered_weights_are_loaded_without_files(run, offer) -> None:
    class Reading(Recording):
        async def load_weights(self, path, version, switch="continue") -> None:
            self.loaded.append((path / "model.safetensors").read_bytes())

    first, late = Reading(), Reading()
    version = await offer(3)
    for engine in (first, late):
        weights = follower(run, engine)
        assert await weights.follow()
        assert weights.held == version
        assert engine.loaded == [b"weights"]
    assert not run.folder.exists()


async def test_a_rollout_that_cannot_receive_keeps_its_version_requests_files_and_loads_them(run, offer) -> None:
    engine = Recording()
    weights = follower(run, engine)
    old = await offer(0)
    assert await weights.follow()
    new = await offer(1, digest="0" * 64)
    assert not await weights.follow()
    assert (weights.held, weights.needs_files, weights.loading) == (old, str(new), None)

    (folder := run.folder / str(new)).mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    await offer(1, digest="0" * 64, path=str(folder))
    assert await weights.follow()
    assert (weights.held, weights.needs_files) == (new, "")
    assert engine.loaded[-1] == (1, str(new))


KILLED_WHILE_IT_LOADS = """
import asyncio, os, signal, sys
from plaudit_wire.redis import RedisAddress
from plaudit_workers.rollout.scripted import Script
from plaudit_workers.rollout.scripted import ScriptedEngine
from plaudit_workers.rollout.weights import ReceptionMarks
from plaudit_workers.rollout.weights import PolicyWeights
from plaudit_workers.stream.transport import Transport
class Killed(ScriptedEngine):
    async def load_weights(self, path, version, switch="continue"):
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when the memory is exhausted
async def changed(): pass
async def follow():
    transport = await Transport.open(RedisAddress(*sys.argv[1:3]), sys.argv[3])
    weights = PolicyWeights(transport, Killed(Script()), "continue", changed)
    await weights.begin()
    await weights.follow()
asyncio.run(follow())
"""


async def test_the_successor_of_a_rollout_that_was_killed_with_received_weights_loads_files_first(
    run, offer, address, run_name
) -> None:
    version = await offer(0)
    command = [sys.executable, "-c", KILLED_WHILE_IT_LOADS, address.url, address.password, run_name]
    killed = await asyncio.create_subprocess_exec(*command)
    assert await killed.wait() == -signal.SIGKILL

    engine = Recording()
    weights = follower(run, engine)
    await weights.begin()
    for _ in range(2):
        assert not await weights.follow()
        assert (weights.held, weights.needs_files, engine.loaded) == (None, str(version), [])
    (folder := run.folder / str(version)).mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    await offer(0, path=str(folder))
    assert await weights.follow()
    following = await offer(1)
    assert await weights.follow()
    assert (weights.held, weights.needs_files) == (following, "")
    assert engine.loaded[0] == (0, str(version))


async def test_rollouts_beside_one_that_receives_do_not_take_it_for_dead(run, offer) -> None:
    version = await offer(0)
    weights = follower(run, Recording())
    with ReceptionMarks(run.transport.names.run).held():
        await weights.begin()
        assert await weights.follow()
    assert (weights.held, weights.needs_files) == (version, "")


async def test_a_rollout_that_can_receive_ignores_the_files_of_others(run, offer) -> None:
    engine = Recording()
    version = await offer(1, path=str(run.folder / "absent"))
    weights = follower(run, engine)
    assert await weights.follow()
    assert weights.held == version


async def test_a_rollout_samples_with_its_version_while_it_receives_the_next(run, offer) -> None:
    weights = follower(run, Recording())
    old = await offer(0)
    await weights.follow()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        parts = [TransferPart(f"127.0.0.1:{silent.getsockname()[1]}", "0" * 64)]
        version = PolicyVersion(run.trainer.incarnation, 1)
        await run.trainer.announce(Announcement(version, "", "", Transfer("token", 7, parts)))
        following = asyncio.create_task(weights.follow())
        connection, _ = await asyncio.to_thread(silent.accept)
        await asyncio.wait_for(weights.hold(old), 10)
        connection.close()
        assert not await following
    assert weights.held == old


async def test_a_version_that_no_delta_leads_to_is_requested_and_loaded_when_it_is_whole(run) -> None:
    series = DeltaSeries(run.folder)
    versions = [PolicyVersion(run.trainer.incarnation, number) for number in range(4)]
    announcements = [series.publish(version) for version in versions]
    engine = Recording()
    weights = follower(run, engine)
    for announcement in announcements[:2]:
        await run.trainer.announce(announcement)
        assert await weights.follow()
    assert engine.loaded[0] == (0, str(versions[0]))
    shutil.rmtree(announcements[2].path)

    await run.trainer.announce(announcements[3])
    for _ in range(2):
        assert not await weights.follow()
        assert (weights.held, weights.needs_files, weights.loading) == (versions[1], str(versions[3]), None)
    series.write(Path(announcements[3].path), whole=True, delta=False)
    assert await weights.follow()
    assert (weights.held, weights.needs_files) == (versions[3], "")
    assert engine.loaded[-1] == (3, str(versions[3]))
    await weights.close()
