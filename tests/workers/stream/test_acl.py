"""The users of a run's own Redis: each role's real work is allowed it, and what is not its work is denied.

The search here is the one that asserts I1-I7 and S1-S7 (test_invariants and test_session_invariants seed bugs in it).
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError, ResponseError
from redis.retry import Retry

from builders import make_prompt
from harbor_tasks import write_sum_task
from plaudit_job.tasks import read_task
from plaudit_metrics.service.serve import serve as serve_metrics
from plaudit_metrics.service.settings import ServiceSettings
from plaudit_metrics.sources.snapshot import take_snapshot
from plaudit_reward.endpoint.access import EndpointUsage, UsageReport
from plaudit_reward.endpoint.budget import NEVER_SENT, BudgetReport, RateLimits, RedisBudget, ReservedRequest, Settled
from plaudit_reward.providers import MachineChoice, ProcessProvider
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import PolicyVersion
from plaudit_wire.names import CONSUMER_GROUPS, Names
from plaudit_wire.redis import FunctionLibrary, RedisAddress
from plaudit_wire.redis_access import ADMIN, GRANTS, PROBE, acl_file, users
from plaudit_workers.launch.redis import free_port
from plaudit_workers.process import ProcessSettings
from plaudit_workers.sandboxes.broker import Broker
from plaudit_workers.sandboxes.places import Places
from plaudit_workers.sandboxes.series import BrokerSeries
from plaudit_workers.sandboxes.server import Pools
from plaudit_workers.service.client import RewardClient
from plaudit_workers.service.worker import serve as serve_reward
from plaudit_workers.stream.calls import MachinePlace, StreamLimits
from plaudit_workers.stream.libraries import Scripts, libraries
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport
from stream_protocol.machine import Machine
from stream_protocol.own_redis import OwnRedis
from stream_protocol.session_machine import SessionMachine
from stream_protocol.session_world import SessionWorld
from stream_protocol.watched_machine import SEARCH, machine_of
from stream_protocol.world import World

RUN = "guarded-1"
OPEN_DOOR = FunctionLibrary("door", {"open": "#!lua\nreturn redis.call(unpack(ARGV))\n"})
"""A function that runs any command, as one with an error might."""
EVERYBODY = (*GRANTS, ADMIN)


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, RedisAddress]]:
    """A Redis with the users of a run, and the address of each."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "users.acl").write_text(acl_file(RUN, {user: f"password-of-{user}" for user in EVERYBODY}))
    with OwnRedis(folder, "port {port}", f'aclfile "{folder / "users.acl"}"') as redis:
        url = f"redis://127.0.0.1:{redis.port}/0"
        with Redis(port=redis.port, username=ADMIN, password=f"password-of-{ADMIN}") as admin:
            for library in (*libraries(), OPEN_DOOR):
                admin.function_load(library.text)
        yield {user: RedisAddress(url, f"password-of-{user}", user) for user in EVERYBODY}


def machine(kind: str, guarded: dict[str, RedisAddress]) -> Any:
    """The protocol's state machine in this run, each role under its own user."""
    sessions = kind == "sessions"
    world, rules = (SessionWorld, SessionMachine) if sessions else (World, Machine)
    roles = ("client", "reward") if sessions else ("trainer", "rollout", "reward")

    class Guarded(world):  # type: ignore[misc]
        async def start(self, address: RedisAddress, run: str, scripts: Scripts) -> None:
            await super().start(address, RUN, scripts)

    Guarded.addresses = {role: guarded[role] for role in roles}
    return machine_of(rules, Guarded, guarded[ADMIN], Scripts())


@pytest.mark.alike
@pytest.mark.parametrize(("kind", "share"), [("training", 2), ("sessions", 4)])
def test_every_invariant_holds_under_random_faults_and_each_role_has_the_rights_it_needs(
    guarded: dict[str, RedisAddress], kind: str, share: int
) -> None:
    search = settings(SEARCH, max_examples=settings().max_examples // share)
    run_state_machine_as_test(machine(kind, guarded), settings=search)


async def test_processes_open_the_transport_as_their_own_user(guarded: dict[str, RedisAddress]) -> None:
    for role in ("trainer", "rollout", "reward"):
        transport = await Transport.open(guarded[role], RUN)
        await transport.recreate_groups()
        await transport.announced() if role != "reward" else None
        await transport.close()


async def test_a_broker_gives_places_and_reads_which_prompts_come(
    guarded: dict[str, RedisAddress], tmp_path: Path
) -> None:
    admitted, transport = await Transport.open(guarded["trainer"], RUN), await Transport.open(guarded["sandboxes"], RUN)
    trainer = TrainerStreams(admitted, StreamLimits(max_open_groups=4))
    await trainer.take_over()
    task = read_task(write_sum_task(tmp_path / "task"))
    version = PolicyVersion(trainer.incarnation, 0)
    await trainer.admit(make_prompt("g", min_version=version, extra_info=task.row()["extra_info"]))
    places, provider = Places(transport, "broker", 2), ProcessProvider(MachineChoice())
    assert await places.lead(asyncio.Event())
    assert await places.hold_warm("0", "0 process") is MachinePlace.held
    assert await places.hold("g 0", "0 g/0-0", "0") is MachinePlace.held
    assert await places.hold("g 1", "1 g/1-0") is MachinePlace.held
    assert await places.hold_warm("2", "2 process") is MachinePlace.full
    assert await places.held() == {"g 0": "0 g/0-0", "g 1": "1 g/1-0"}
    pools = Pools(transport, Broker(tmp_path, provider, places, BrokerSeries()), provider, 2)
    assert [samples for samples, _ in (await pools.needed()).values()] == [2]
    await trainer.close("g", "dropped", "test")
    assert await places.ended([("g", 0)]) == [("g", 0)]
    assert await places.hold("g 0", "3 g/0-1") is MachinePlace.ended
    await places.free("g 0", "0 g/0-0")
    await places.leave()
    assert list(await places.held()) == ["g 1"]
    for each in (admitted, transport):
        await each.close()


SCORES = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
def second(data_source, solution_str, ground_truth, extra_info=None):
    return 0.25
"""
SCORERS = """\
      - {name: mine, kind: python, python: {path: mine.py}, isolation: inline}
      - {name: honest, kind: python, python: {path: mine.py, function: second}, isolation: inline, audit: {share: 1}}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SCORES)
    (tmp_path / "job.yaml").write_text(
        "apiVersion: plaudit.dev/v1alpha1\nkind: RLJob\nmetadata: {name: scores}\n"
        f"spec:\n  reward:\n    scorers:\n{SCORERS}"
    )
    return tmp_path / "job.yaml"


@pytest.mark.long
async def test_a_scoring_service_with_its_client_auditor_and_metrics(
    guarded: dict[str, RedisAddress], job: Path, tmp_path: Path
) -> None:
    stop, port = asyncio.Event(), free_port()
    own = {"PLAUDIT_JOB": str(job), "PLAUDIT_RUN": RUN, "PLAUDIT_RUN_FOLDER": str(tmp_path)}
    reward = ProcessSettings.from_environment(own | guarded["reward"].environment())
    settings = ServiceSettings(RUN, guarded["metrics"], port=port, schedule="service", run_folder=tmp_path)
    running = [
        asyncio.create_task(serve_metrics(settings, stop)),
        asyncio.create_task(serve_reward(reward, stop)),
    ]
    async with RewardClient(guarded["client"], wait_s=10.0) as client:
        await client.submit([{"response": "a"}, {"response": "b"}])
        await client.submit_group([{"response": "c"}, {"response": "d"}])
        assert [result.score async for result in client.results()] == [1.0] * 4
        await client.submit([{"response": str(number)} for number in range(61)])
        assert [result.score async for result in client.results()] == [1.0] * 61
    body = ""
    shown = ('outcome="scored"', 'role="reward"', "plaudit_audit_value{", 'statistic="mean"} 0.25')
    async with asyncio.timeout(30):
        while not all(text in body for text in shown):
            body = await get(port, "/metrics")
            await asyncio.sleep(0.05)
    stop.set()
    assert await asyncio.gather(*running) == [None, 0]


async def test_metrics_reads_streams_whose_entries_are_in_work(guarded: dict[str, RedisAddress]) -> None:
    names = Names(RUN)
    keys = [names.stream(stream) for stream in CONSUMER_GROUPS]
    admin, metrics = (guarded[user].client(timeout_s=5.0, retries=0) for user in (ADMIN, "metrics"))
    await admin.delete(*keys)
    for key, group in zip(keys, CONSUMER_GROUPS.values(), strict=True):
        await admin.xgroup_create(key, group, "0", mkstream=True)
        for _ in range(2):
            await admin.xadd(key, {"group": "g"})
        await admin.xreadgroup(group, "worker-0", {key: ">"}, count=1)
    depths = (await take_snapshot(metrics, names)).streams
    assert {(depth.undelivered, depth.in_flight) for depth in depths.values()} == {(1, 1)}
    await admin.delete(*keys)
    await admin.aclose()
    await metrics.aclose()


async def get(port: int, path: str) -> str:
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        text = (await reader.read()).decode()
        writer.close()
        return text
    return ""


async def test_reward_workers_keep_the_limits_of_judges(guarded: dict[str, RedisAddress]) -> None:
    client = guarded["reward"].client(timeout_s=5.0, retries=0)
    budget = RedisBudget(client, f"plaudit:{{{RUN}}}:limits:judge", "reward-0", RateLimits(requests=2, concurrency=9))
    waiting = (ReservedRequest("a", 10), ReservedRequest("b", 10), ReservedRequest("c", 10))
    assert (await budget.exchange(BudgetReport(0, waiting=waiting, num_waiting=3))).number == 2
    assert (
        await budget.exchange(BudgetReport(0, settled=(Settled("a", NEVER_SENT),), waiting=waiting[2:]))
    ).number == 1
    await budget.close()
    usage = EndpointUsage()
    usage.requests["200"] += 1
    usage.tokens.update(prompt=5, completion=7)
    report = UsageReport("big", usage, guarded["reward"].client(timeout_s=5.0, retries=0), RUN)
    await report.stop()
    assert not usage.requests


ENDLESS = "#!lua\nwhile true do end\n"

# Who may not do what: commands with their keys, {} is the run's prefix.
DENIED = {
    "announce weights": (
        ("HSET", "{}state", "announced", "x"),
        {"rollout", "reward", "metrics", "client", "gateway", "keda"},
    ),
    "fence the trainer out": (
        ("HINCRBY", "{}state", "incarnation", "9"),
        {"rollout", "reward", "metrics", "client", "gateway"},
    ),
    "close a step": (("HSET", "{}state", "step", "9"), {"rollout", "reward", "metrics", "client", "gateway", "keda"}),
    "close a group": (
        ("ZADD", "{}closed", "1", "t-0-1.0"),
        {"rollout", "reward", "metrics", "client", "gateway", "keda"},
    ),
    "take what is ready": (
        ("XREADGROUP", "GROUP", "trainer", "x", "STREAMS", "{}ready", ">"),
        {"rollout", "reward", "metrics", "client", "gateway", "keda"},
    ),
    "offer a prompt": (
        ("XADD", "{}prompts", "*", "group", "g"),
        {"rollout", "reward", "metrics", "client", "gateway", "keda"},
    ),
    "offer a sample": (("XADD", "{}samples", "*", "sample", "s"), {"reward", "metrics", "keda"}),
    "take a prompt": (
        ("XREADGROUP", "GROUP", "rollout", "x", "STREAMS", "{}prompts", ">"),
        {"trainer", "reward", "metrics", "client", "gateway", "keda"},
    ),
    "take a sample": (
        ("XREADGROUP", "GROUP", "reward", "x", "STREAMS", "{}samples", ">"),
        {"trainer", "rollout", "metrics", "client", "gateway", "keda"},
    ),
    "write a score": (("HSET", "{}group:g", "ended:0", "x"), {"metrics", "keda"}),
    "read a body": (("HGET", "{}group:g", "tensors:0"), {"metrics", "keda"}),
    "read results of a client": (
        ("XREAD", "STREAMS", "{}session:s:results", "0"),
        set(EVERYBODY) - {"client", "gateway", ADMIN},
    ),
    "read another run": (("HGET", "plaudit:{other}:state", "step"), set(GRANTS)),
    "FLUSHALL": (("FLUSHALL",), set(GRANTS)),
    "CONFIG": (("CONFIG", "GET", "*"), set(GRANTS)),
    "KEYS": (("KEYS", "*"), set(GRANTS)),
    "DEBUG": (("DEBUG", "OBJECT", "{}state"), set(GRANTS)),
    "ACL": (("ACL", "LIST"), set(GRANTS)),
    "EVAL": (("EVAL", ENDLESS, "0"), set(GRANTS)),
    "EVAL_RO": (("EVAL_RO", ENDLESS, "0"), set(GRANTS)),
    "SCRIPT LOAD": (("SCRIPT", "LOAD", ENDLESS), set(GRANTS)),
    "EVALSHA": (("EVALSHA", sha1(ENDLESS.encode()).hexdigest(), "0"), set(GRANTS)),
    "FUNCTION LOAD": (("FUNCTION", "LOAD", FunctionLibrary("mine", {"hang": ENDLESS}).text), set(GRANTS)),
    "FUNCTION RESTORE": (("FUNCTION", "RESTORE", "x"), set(GRANTS)),
    "FUNCTION DELETE": (("FUNCTION", "DELETE", OPEN_DOOR.name), set(GRANTS)),
    "FUNCTION FLUSH": (("FUNCTION", "FLUSH"), set(GRANTS)),
    "MONITOR": (("MONITOR",), set(GRANTS)),
    "DEL": (("DEL", "{}state"), set(GRANTS)),
    "trim a stream": (("XTRIM", "{}samples", "MAXLEN", "0"), set(GRANTS)),
    "destroy a consumer group": (("XGROUP", "DESTROY", "{}samples", "reward"), set(GRANTS)),
}


@pytest.mark.alike
@pytest.mark.parametrize(
    ("user", "what"), [(user, what) for what, (_, denied) in DENIED.items() for user in sorted(denied)]
)
async def test_a_role_is_denied_other_commands(guarded: dict[str, RedisAddress], user: str, what: str) -> None:
    prefix = f"plaudit:{{{RUN}}}:"
    command = [part.replace("{}", prefix) for part in DENIED[what][0]]
    client = guarded[user].client(timeout_s=5.0, retries=0)
    with pytest.raises(ResponseError, match=r"no permissions|DEBUG command not allowed"):
        await client.execute_command(*command)
    # Nor through a function: its commands run with the caller's rights.
    if "fcall" in GRANTS[user][0].commands and what != "MONITOR":
        with pytest.raises(Exception, match=r"[Nn]o permission|not allowed from script|can't"):
            await client.fcall(OPEN_DOOR.functions["open"], 1, prefix, *command)
    await client.aclose()


async def test_the_default_user_is_off(guarded: dict[str, RedisAddress]) -> None:
    for password in ("", "password-of-admin"):
        with pytest.raises(RefusedError, match="refuses the password"):
            await Transport.open(RedisAddress(guarded[ADMIN].url, password), RUN)


async def test_a_wrong_password_and_a_wrong_user_are_reported(guarded: dict[str, RedisAddress]) -> None:
    client = RedisAddress(guarded["reward"].url, "password-of-reward", "trainer").client(timeout_s=5.0, retries=0)
    with pytest.raises(AuthenticationError):
        await client.ping()
    await client.aclose()


def test_passwords_are_not_in_the_file_of_users() -> None:
    text = acl_file(RUN, {"reward": "secret-of-reward", ADMIN: "secret-of-admin"})
    assert "secret-of" not in text
    assert text.splitlines()[0].startswith("user default reset ")


def test_a_run_has_the_users_that_it_needs() -> None:
    of_training = {"trainer", "rollout", "reward", "model", "sandboxes", "metrics", "keda", PROBE, ADMIN}
    assert set(users(trains=True)) == of_training
    assert set(users(trains=False)) == {"client", "gateway", "reward", "metrics", "keda", PROBE, ADMIN}


def test_a_redis_that_reloads_its_users_still_admits_no_one_else(tmp_path: Path) -> None:
    (tmp_path / "users.acl").write_text(acl_file(RUN, {ADMIN: "secret"}))
    command = ["redis-server", "--port", str(port := free_port()), "--dir", str(tmp_path), "--save", ""]
    command += ["--appendonly", "yes", "--appendfsync", "always", "--aclfile", str(tmp_path / "users.acl")]
    retry = Retry(ConstantBackoff(0.05), 100)
    for kept in (0, 2):
        with (
            subprocess.Popen(command, stdout=subprocess.DEVNULL) as server,
            Redis(port=port, username=ADMIN, password="secret", retry=retry) as admin,
            Redis(port=port) as stranger,
        ):
            try:
                assert admin.dbsize() == kept
                admin.eval("redis.call('set', 'a', '1') return redis.call('set', 'b', '2')", 0)
                with pytest.raises(AuthenticationError):
                    stranger.get("a")
            finally:
                server.kill()
