"""A scoring service in miniature: clients with sessions, reward workers, faults. As ``world``, without a trainer.

``violations`` collects what breaks S1-S7 of docs/streams.md. What a client keeps when it is killed is what a careful
program would have on disk: the samples that it wanted scored, and the results that it wrote before it acknowledged.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from plaudit_metrics.sources.stream import decode_event
from plaudit_wire.messages import Service
from plaudit_wire.records import Sample, SampleRecord
from plaudit_wire.redis import RedisAddress
from plaudit_workers.stream.calls import SessionGoneError, SessionTakenError, Submission
from plaudit_workers.stream.libraries import Scripts
from plaudit_workers.stream.sessions import StreamSession, encoded_group
from stream_protocol.world import Worker, World, score_of

ROOM = 6


class Client:
    """One program and its session; a restart creates a new ``session``."""

    def __init__(self, world: Any, name: str) -> None:
        self.world = world
        self.name = name
        self.wanted: dict[str, list[Sample]] = {}  # on disk: submitted, or to be
        self.written: dict[str, Any] = {}  # on disk: results, before they are acknowledged
        self.to_acknowledge: list[tuple[str, str]] = []
        self.session: StreamSession

    async def start(self) -> None:
        self.session = StreamSession(self.world.of("client"), self.name, self.world.service, keep_s=1000.0)
        await self.session.open()

    async def submit(self, *groups: str) -> None:
        answers = await self.session.submit_many([encoded_group(group, self.wanted[group]) for group in groups])
        for group, answer in zip(groups, answers, strict=True):
            if answer is Submission.conflict:
                self.world.violations.append(f"S1: {group} is in conflict with itself")
            if answer is Submission.returned and group not in self.written:
                self.world.violations.append(f"S1: {group} counts as returned, and its client has no result")

    async def submit_new(self, *sizes: int) -> None:
        groups = [self.session.group_id(str(len(self.wanted) + number)) for number in range(len(sizes))]
        for group, n in zip(groups, sizes, strict=True):
            self.wanted[group] = [self.sample(group, index) for index in range(n)]
        await self.submit(*groups)

    def sample(self, group: str, index: int) -> Sample:
        return Sample(group, index, "made-up", "p", f"response {self.world.random.randrange(1 << 30)}")

    async def read(self, count: int = 3) -> None:
        for result in await self.session.read(count, 0.0):
            self.world.check_result(self, result)
            if result.group in self.written and not self.world.redis_lost and not self.killed_since_write(result.group):
                self.world.violations.append(f"S1: {result.group} came twice")
            self.written[result.group] = self.session
            self.to_acknowledge.append((result.group, result.entry))

    def killed_since_write(self, group: str) -> bool:
        return self.written[group] is not self.session

    async def acknowledge(self) -> None:
        done, self.to_acknowledge = self.to_acknowledge, []
        await self.session.acknowledge(done)

    async def kill(self) -> None:
        """Kill the client with results unacknowledged, restart it, and submit all samples without a result."""
        self.world.zombies.append(self.session)
        self.to_acknowledge = []
        await self.start()
        again = [each for each in self.wanted if each not in self.written or self.world.random.random() < 0.2]
        await self.submit(*again, *again[:1])

    async def repair(self) -> None:
        """Do a client's periodic check: find the groups that Redis has lost or restored."""
        try:
            await self.session.acknowledge([])
        except SessionGoneError:
            await self.session.open()
        known = await self.session.groups()
        for group in self.wanted:
            if group not in known and group not in self.written:
                await self.submit(group)
        if known & self.written.keys():
            self.session.read_again()


class SessionWorld(World):
    """Clients and reward workers of one service."""

    def __init__(self, group_scorers: bool, deadline_s: float, seed: int) -> None:
        super().__init__(None, seed)
        self.service = Service("job", ["a"], group_scorers, deadline_s, ROOM, kept_share=0.5)
        self.clients: list[Client] = []
        self.redis_lost = False
        self.random = random.Random(seed)

    async def start(self, address: RedisAddress, run: str, scripts: Scripts) -> None:
        await self.connect(address, run, scripts)
        self.workers = [Worker(self, stream) for stream in ("samples", "samples", "groups")]
        self.clients = [Client(self, "a"), Client(self, "b/1"), Client(self, "b/2")]
        for client in self.clients:
            await client.start()

    async def everybody_works(self) -> None:
        for client in self.clients:
            if self.random.random() < 0.7:
                await client.submit_new(*(self.random.randint(1, 3) for _ in range(self.random.randint(1, 2))))
        await self.check_room()
        await self.workers_work()
        for client in self.clients:
            await client.read()
            if self.random.random() < 0.5:
                await client.acknowledge()

    async def after_loss(self) -> None:
        self.sent.clear()
        self.redis_lost = True
        for client in self.clients:
            await client.repair()

    async def clean_up(self) -> None:
        await self.random.choice(self.clients).session.clean_up()

    async def zombie_acts(self) -> None:
        """Let a replaced client wake up and try every call."""
        zombie = self.random.choice(self.zombies)
        group = zombie.group_id("0")
        sample = Sample(group, 0, "made-up", "p", "of a zombie")
        for attempt in (
            zombie.submit_many([encoded_group(group + "z", [sample])]),
            zombie.acknowledge([(group, "0-1")]),
            zombie.end(),
        ):
            try:
                await attempt
            except SessionTakenError:
                continue
            self.violations.append("S3: a client that was replaced was obeyed")

    # ---- checks

    async def check_room(self) -> None:
        """S4: the sessions of no owner have more samples in work than they may, but for a group larger than a part."""
        for owner in {client.name.partition("/")[0] for client in self.clients}:
            own = [client.session for client in self.clients if client.name.partition("/")[0] == owner]
            groups = [group for session in own for group in await session.groups()]
            sizes = [
                int(await self.transport.commands.hget(self.transport.names.group(group), "n") or 0) for group in groups
            ]
            counted = int(await self.transport.commands.hget(self.transport.names.prefix + "in_work", owner) or 0)
            most_too_large = 1 if len(own) > 1 else 0  # of three samples, where a part is two
            if sum(sizes) > ROOM + most_too_large:
                self.violations.append(f"S4: {owner} has {sum(sizes)} samples in work")
            if sum(sizes) != counted:
                self.violations.append(f"S4: {owner} has {sum(sizes)} samples in work, and {counted} count")

    async def step_clock(self, by_s: float) -> None:
        """Let the server's clock step: seen from it, every time that was noted before lies elsewhere."""
        names, redis = self.transport.names, self.transport.commands
        for key in (names.open, names.sessions):
            for member, at in await redis.zrange(key, 0, -1, withscores=True):
                await redis.zadd(key, {member: at - by_s})
        if (looked := await redis.hget(names.leases, "looked")) is not None:
            await redis.hset(names.leases, "looked", float(looked) - by_s)
        for client in self.clients:
            time = client.session.deadlines.time
            time.answered = time.answered and time.answered - by_s
        await self.clean_up()

    def check_result(self, client: Client, result: Any) -> None:
        samples = client.wanted.get(result.group)
        if samples is None:
            self.violations.append(f"S5: {result.group} came to session {client.name}, which never submitted it")
            return
        if len(samples) != len(result.samples):
            self.violations.append(f"S1: {result.group} has {len(result.samples)} results of {len(samples)}")
        for sample, of_sample in zip(samples, result.samples, strict=True):
            if of_sample.seconds < 0:
                self.violations.append(f"S2: {result.group} was scored before it was submitted")
            if of_sample.scoring.outcome == "given_up" and self.service.group_deadline_s:
                self.violations.append(f"S7: {result.group} was given up long before its deadline")
            value = of_sample.scoring.value
            if value is not None and value != score_of(_digest(sample)):
                self.violations.append(f"S2: {result.group}[{sample.index}] has the score of other samples")

    async def check_terminal_once(self) -> None:
        """S1: every sample was reported terminal once, however often it was submitted."""
        entries = await self.transport.commands.xrange(self.transport.names.events)
        records = [record for _, fields in entries for record in decode_event(fields)]
        told = Counter((each.group, each.index) for each in records if isinstance(each, SampleRecord))
        wanted = {(g, s.index) for client in self.clients for g, ss in client.wanted.items() for s in ss}
        odd = {key: count for key, count in told.items() if count != 1 or key not in wanted}
        if (odd or set(told) != wanted) and not self.redis_lost:
            self.violations.append(f"S1: reported terminal so often: {odd}, never: {wanted - set(told)}")

    async def finish(self) -> None:
        """Kill every worker and client; new ones take over all their work."""
        self.lossy = False
        for worker in list(self.workers):
            self.crash(worker)
        for client in self.clients:
            await client.kill()
        for _ in range(40):
            await self.work_off()
            if all(client.wanted.keys() == client.written.keys() for client in self.clients):
                break
        for client in self.clients:
            missing = client.wanted.keys() - client.written.keys()
            if missing:
                self.violations.append(f"S1: session {client.name} never got {sorted(missing)}")
        await self.check_terminal_once()
        for client in self.clients:
            await client.submit_new(2)
            await client.session.end()
        await self.check_memory()

    async def work_off(self) -> None:
        await self.workers_work_off()
        for client in self.clients:
            await client.repair()
            await client.read(100)
            await client.acknowledge()

    async def check_memory(self) -> None:
        """S6: nothing is left of sessions that have ended."""
        names, redis = self.transport.names, self.transport.commands
        for worker in self.workers:
            await self.lapse(worker)
            await self.take(worker, 100)
        left = [key for key in await self.keys() if b":group:" in key or b":session" in key]
        left += [name.encode() for name in (names.samples, names.groups) if await redis.xlen(name)]
        for name in (names.open, names.prefix + "in_work"):
            left += [name.encode()] * await redis.exists(name)
        if left:
            self.violations.append(f"S6: left in Redis: {left}")


def _digest(sample: Sample) -> str:
    return encoded_group(sample.group, [sample]).samples[0][0]
