"""A run in miniature: rollouts, reward workers and a trainer as plain calls against a real Redis, faults included.

Every call that changes something goes through ``Repeater``, which may send it twice (its reply was lost) and remembers
it (redis-py, or a slow network, may send it again much later). ``World.violations`` collects what breaks I1-I7 of the
protocol; the rules of the state machine only choose who does what next.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from builders import make_body, make_prompt
from plaudit_metrics.sources.stream import decode_event
from plaudit_wire.messages import Prompt, SampleBody, Sampling, encode_body
from plaudit_wire.records import SampleRecord, ScoringRecord
from plaudit_wire.redis import RedisAddress
from plaudit_workers.commands.runs import DeadLetters
from plaudit_workers.stream.calls import Admission, Call, Delivery, StreamLimits
from plaudit_workers.stream.consumer import (
    Consumer,
    ConsumerOptions,
    commit,
    commit_group,
    discard,
    publish,
    unpublished,
)
from plaudit_workers.stream.groups import Group, read_group
from plaudit_workers.stream.libraries import Scripts
from plaudit_workers.stream.trainer import Ledger, StaleIncarnationError, TrainerStreams
from plaudit_workers.stream.transport import Transport

# Nothing lapses by itself: the machine decides whose lease has lapsed.
PATIENT = ConsumerOptions(lease_s=1e6, renew_every_s=1e6, block_s=0.0, reclaim_every_s=0.0)
ROLES = {"prompts": "rollout", "samples": "reward", "groups": "reward"}
OF_A_GROUP = ("admit", "publish", "commit", "commit_group", "release", "close", "bury", "retry_dead")


class Repeater:
    """Sends calls, twice while ``lossy`` is set, and keeps the last ones."""

    def __init__(self, inner: Any, world: World) -> None:
        self._inner = inner
        self._world = world

    async def run(self, call: Call[Any]) -> Any:
        return (await self.run_many([call]))[0]

    async def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        return [call.read(answer) for call, answer in zip(calls, await self.answers(calls), strict=True)]

    async def answers(self, calls: Sequence[Call[Any]]) -> list[Any]:
        answers: list[Any] = await self._inner.answers(calls)
        if self._world.lossy:
            again = await self._inner.answers(calls)
            for call, first, second in zip(calls, answers, again, strict=True):
                await self._world.check_repeat(call, first, second)
        self._world.sent += [(c, a) for c, a in zip(calls, answers, strict=True) if c.script in OF_A_GROUP]
        del self._world.sent[:-30]
        return answers

    async def stop(self) -> None:
        await self._inner.stop()

    async def send_again(self, call: Call[Any]) -> Any:
        return (await self._inner.answers([call]))[0]


class Worker:
    """One process that takes from one stream; ``held`` is what it works on."""

    def __init__(self, world: World, stream: Any) -> None:
        world.names += 1
        self.stream = stream
        self.name = f"{stream}-{world.names}"
        self.transport = world.of(ROLES[stream])
        self.consumer: Consumer[Any] = Consumer(self.transport, stream, self.name, PATIENT)
        self.held: list[Delivery[Any]] = []

    def drop(self, delivery: Delivery[Any]) -> None:
        self.consumer.finished(delivery)
        self.held.remove(delivery)


class Trainer:
    """A trainer: its state is that of a checkpoint, and the groups that are open."""

    def __init__(self, world: World, line: list[int], ledger: Ledger) -> None:
        self.streams = TrainerStreams(world.of("trainer"), world.limits)
        self.line = line  # positions trained, in the surviving line of checkpoints
        self.ledger = ledger
        self.open: dict[str, int] = {}
        self.taken: list[Group] = []

    def ends(self, group: str, end: str, reason: str) -> None:
        position = self.open.pop(group)
        self.ledger.open -= 1
        if end == "dropped":
            self.ledger.dropped[reason] = self.ledger.dropped.get(reason, 0) + 1
        elif end == "evaluated":
            self.ledger.evaluated += 1
        else:
            self.ledger.trained += 1
            self.line.append(position)


def score_of(digest: str) -> float:
    return int(digest[:6], 16) / 1000


class World:
    """All processes of one run; ``addresses`` gives roles an address (a user of Redis) of their own."""

    addresses: Mapping[str, RedisAddress] = {}

    def __init__(self, limits: StreamLimits, seed: int) -> None:
        self.limits = limits
        self.random = random.Random(seed)
        self.violations: list[str] = []
        self.sent: list[tuple[Call[Any], Any]] = []
        self.lossy = False
        self.lost_everything = False
        self.names = 0
        self.positions = 0
        self.attempts: Counter[int] = Counter()
        self.sizes: dict[str, int] = {}
        self.zombies: list[Trainer] = []
        self.transport: Transport
        self.transports: dict[str, Transport] = {}
        self.workers: list[Worker] = []
        self.trainer: Trainer
        self.checkpoint: tuple[list[int], Ledger] = ([], Ledger())

    async def start(self, address: RedisAddress, run: str, scripts: Scripts) -> None:
        await self.connect(address, run, scripts)
        self.workers = [Worker(self, stream) for stream in ("prompts", "prompts", "samples", "samples", "groups")]
        self.trainer = Trainer(self, [], Ledger())
        await self.trainer.streams.take_over()

    async def connect(self, address: RedisAddress, run: str, scripts: Scripts) -> None:
        self.transport = await Transport.open(address, run, scripts=scripts)
        for role, own in self.addresses.items():
            self.transports[role] = Transport(own, run, None, scripts)
        for transport in (self.transport, *self.transports.values()):
            transport.scripts = Repeater(transport.scripts, self)  # type: ignore[assignment]
            transport.reads = Repeater(transport.reads, self)  # type: ignore[assignment]

    def of(self, role: str) -> Transport:
        return self.transports.get(role, self.transport)

    async def keys(self) -> list[bytes]:
        return [key async for key in self.transport.commands.scan_iter(self.transport.names.prefix + "*", count=10000)]

    # ---- trainer

    async def admit(self, n: int, split: str, position: int | None = None) -> None:
        trainer = self.trainer
        if position is None:
            position, self.positions = self.positions, self.positions + 1
        group = f"{split[0]}-{position}-{trainer.streams.incarnation}.{self.attempts[position]}"
        self.attempts[position] += 1
        prompt = make_prompt(
            group,
            n,
            position=position,
            split=split,  # type: ignore[arg-type]
            step=0,
            seed=position,
            sampling=Sampling(max_tokens=4),
            data_source="made-up",
            prompt="p",
            prompt_ids=b"",
        )
        if await trainer.streams.admit(prompt) is Admission.admitted:
            self.sizes[group] = n
            trainer.open[group] = position
            trainer.ledger.admitted += 1
            trainer.ledger.open += 1

    async def take_ready(self) -> None:
        for group in await self.trainer.streams.take_ready(2, 0.0):
            self.trainer.taken.append(group)
            self.check_group(group)

    async def close_one(self) -> None:
        trainer = self.trainer
        if not trainer.taken:
            return
        group = trainer.taken.pop(0)
        end = "dropped" if group.phase == "dropped" else "trained" if group.prompt.split == "train" else "evaluated"
        await self.close(group.id, end, group.reason if end == "dropped" else "")

    async def close(self, group: str, end: str, reason: str) -> None:
        trainer = self.trainer
        if end == "trained" and group in self.sizes and int(group.split("-")[1]) in trainer.line:
            self.violations.append(f"I2: {group}: its position was trained before in the surviving line")
        known = group in trainer.open
        closed = await trainer.streams.close(group, end, reason)  # type: ignore[arg-type]
        if closed and known:
            await self.check_ended(group)
            trainer.ends(group, end, reason)
        elif known:
            self.violations.append(f"I1: {group} is open for the trainer, and was ended by somebody else")

    def keep_checkpoint(self) -> None:
        line, ledger = self.trainer.line, self.trainer.ledger
        kept = Ledger(ledger.admitted, ledger.trained, ledger.evaluated, dict(ledger.dropped))
        self.checkpoint = (list(line), kept)

    async def repair(self) -> None:
        """Do a trainer's periodic check: find the groups that Redis has lost, and restore the ledger."""
        trainer = self.trainer
        for group in await trainer.streams.missing(list(trainer.open)):
            position = trainer.open[group]
            trainer.taken = [taken for taken in trainer.taken if taken.id != group]
            await trainer.streams.close(group, "dropped", "lost")
            trainer.ends(group, "dropped", "lost")
            await self.admit(self.sizes[group], "train" if group[0] == "t" else "validation", position)
        for group in await trainer.streams.open_groups():
            if group not in trainer.open:
                await trainer.streams.close(group, "dropped", "unknown")
        await trainer.streams.restore(trainer.ledger.counters(), 0)

    async def take_over(self, resume: bool) -> None:
        """The trainer dies or freezes; another goes on from the checkpoint, or from where it was."""
        old = self.trainer
        self.zombies.append(old)
        line, ledger = self.checkpoint if resume else (old.line, old.ledger)
        new = Trainer(self, list(line), Ledger(ledger.admitted, ledger.trained, ledger.evaluated, dict(ledger.dropped)))
        await new.streams.take_over(floor=old.streams.incarnation)
        self.trainer = new
        for group in await new.streams.open_groups():
            position = int(group.split("-")[1])
            if position in new.line or group not in self.sizes:
                await new.streams.close(group, "dropped", "rolled_back")
            else:
                new.open[group] = position
        new.ledger.open = len(new.open)
        new.ledger.admitted = new.ledger.trained + new.ledger.evaluated + sum(new.ledger.dropped.values())
        new.ledger.admitted += new.ledger.open
        await new.streams.restore(new.ledger.counters(), 0)
        for position in set(old.line) - {*new.line, *new.open.values()}:
            await self.admit(2, "train", position)

    async def zombie_acts(self) -> None:
        """Let a replaced trainer wake up and try every call."""
        zombie = self.random.choice(self.zombies)
        groups = [group.id for group in zombie.taken] or list(zombie.open) or ["t-0-1.0"]
        attempts = [
            zombie.streams.close(self.random.choice(groups), "dropped", "zombie"),
            zombie.streams.take_ready(2, 0.0),
            zombie.streams.release_expired(),
            zombie.streams.restore({"admitted": 1000}, 7),
        ]
        for attempt in attempts:
            try:
                done = await attempt
            except StaleIncarnationError:
                continue
            if done != []:
                self.violations.append(f"I3: a trainer that was replaced was obeyed: {done}")

    # ---- workers

    def alive(self, stream: str) -> Worker:
        return self.random.choice([worker for worker in self.workers if worker.stream == stream])

    async def take(self, worker: Worker, slots: int) -> None:
        worker.held += await worker.consumer.take(slots)

    async def lapse(self, worker: Worker) -> None:
        """Every lease that others hold in this worker's stream has lapsed; it takes what it may."""
        await self.take(worker, 1)  # creates the consumer groups where Redis has lost them
        worker.held += await worker.consumer.reclaim(100, lease_s=0.0)

    async def freeze_and_wake(self, stream: str) -> None:
        """Freeze a worker for longer than its lease while others take over; then let it continue unaware."""
        frozen = max(
            (worker for worker in self.workers if worker.stream == stream), key=lambda worker: len(worker.held)
        )
        other = Worker(self, stream)
        self.workers.append(other)
        await self.lapse(other)
        for worker in (other, frozen):
            for _ in range(self.random.randint(0, len(worker.held))):
                if worker.held:
                    await self.work(worker)
        self.workers.remove(frozen)

    async def renew(self, worker: Worker) -> None:
        await worker.consumer.renew()
        worker.held = [delivery for delivery in worker.held if not delivery.lost.is_set()]

    async def hand_back(self, worker: Worker) -> None:
        back, worker.held = worker.held, []
        await worker.consumer.hand_back(back)

    async def bury_one(self, stream: str) -> None:
        """An entry loses one worker after another, until it is a dead letter."""
        for _ in range(PATIENT.poison_limit + 1):
            worker = Worker(self, stream)
            self.workers.append(worker)
            await self.lapse(worker)
            self.workers.remove(worker)

    async def deal_with_dead_letter(self, *, retry: bool) -> None:
        letters = DeadLetters(self.transport)
        there = await letters.list()
        if there:
            letter = self.random.choice(there)
            await (letters.retry(letter) if retry else letters.drop(letter))

    def crash(self, worker: Worker) -> None:
        self.workers[self.workers.index(worker)] = Worker(self, worker.stream)

    async def publish_one(self, worker: Worker) -> None:
        delivery = self.random.choice(worker.held)
        lacking = await unpublished(worker.transport, delivery.payload)
        again = not lacking or self.random.random() < 0.2
        index = self.random.randrange(delivery.payload.n) if again else self.random.choice(lacking)
        await publish(worker.transport, delivery, index, self.body(delivery.payload, index))
        if not await unpublished(worker.transport, delivery.payload):
            worker.drop(delivery)

    def body(self, prompt: Prompt, index: int) -> SampleBody:
        tokens = [self.random.randrange(1 << 30) for _ in range(3)]
        return make_body(prompt, index, f"response {tokens}", tokens)

    async def commit_one(self, worker: Worker, outcome: str, drop: bool) -> None:
        delivery = self.random.choice(worker.held)
        value = score_of(delivery.digest) if outcome == "scored" else None
        delivery.taken -= self.random.choice([0.0, 0.0, 30.0])  # a clock that runs fast, a process that was frozen
        scoring = ScoringRecord(outcome, value, drop_group=drop, worker=worker.name)  # type: ignore[arg-type]
        await commit(worker.transport, delivery, scoring)
        worker.drop(delivery)

    async def commit_group(self, worker: Worker, outcome: str) -> None:
        delivery = self.random.choice(worker.held)
        group = await read_group(worker.transport, delivery.group)
        if group is None or group.phase != "group_scoring":
            await discard(worker.transport, delivery)
            worker.drop(delivery)
            return
        scorings = [
            ScoringRecord(outcome, score_of(s.digest) if outcome == "scored" else None)  # type: ignore[arg-type]
            if s.scoring is not None and s.scoring.outcome == "scored"
            else s.scoring or ScoringRecord("given_up")
            for s in group.samples
        ]
        await commit_group(worker.transport, delivery, group, scorings)
        worker.drop(delivery)

    async def everybody_works(self) -> None:
        """One turn of each process, most of the time."""
        while len(self.trainer.open) < 3 and self.random.random() < 0.9:
            await self.admit(self.random.randint(2, 4), "train")
        await self.workers_work()
        await self.take_ready()
        await self.close_one()

    async def workers_work(self) -> None:
        for worker in self.workers:
            await self.take(worker, 4)
            for _ in range(self.random.randint(0, 2)):
                if worker.held:
                    await self.work(worker)

    async def work(self, worker: Worker) -> None:
        outcome = self.random.choice(["scored"] * 6 + ["infra_error"])
        if worker.stream == "prompts":
            await self.publish_one(worker)
        elif worker.stream == "samples":
            await self.commit_one(worker, outcome, drop=self.random.random() < 0.05)
        else:
            await self.commit_group(worker, outcome)

    # ---- Redis

    async def lose_last_second(self, rounds: int) -> None:
        """Redis dies, and loads an append-only file that lacks what happened last."""
        redis = self.transport.commands
        kept = {key: await redis.dump(key) for key in await self.keys()}
        for _ in range(rounds):
            await self.everybody_works()
        await redis.unlink(*await self.keys())
        for key, dumped in kept.items():
            await redis.restore(key, 0, dumped)
        await self.after_loss()
        for _ in range(3):
            await self.everybody_works()

    async def lose_everything(self) -> None:
        self.lost_everything = True
        await self.transport.commands.unlink(*await self.keys())
        await self.after_loss()

    async def after_loss(self) -> None:
        self.sent.clear()
        await self.repair()

    async def send_again(self) -> None:
        """A call arrives once more, long after it was answered."""
        call, first = self.random.choice(self.sent)
        if first not in (b"full", b"not_due"):
            await self.check_repeat(call, first, await self.transport.scripts.send_again(call))  # type: ignore[attr-defined]

    async def check_repeat(self, call: Call[Any], first: Any, second: Any) -> None:
        """A repeated call repeats its answer, as long as its group lives and its trainer rules.

        A refusal may become another refusal meanwhile: neither changes anything.
        """
        if call.script in ("claim", "overdue"):
            first, second = sorted(first[1:]), sorted(second[1:])  # without the server's time
        lives = not call.group or await self.transport.commands.exists(self.transport.names.group(call.group))
        refusals = all(answer in (b"refused", b"duplicate") for answer in (first, second))
        if first != second and second != b"stale" and lives and not refusals:
            self.violations.append(f"repeat: {call.script} answered {first}, then {second}")

    # ---- checks

    def check_group(self, group: Group) -> None:
        """I1, I6 and I7 of a group that the trainer was given."""
        for sample in group.samples:
            name, stamps, scoring = f"{group.id}[{sample.index}]", sample.stamps, sample.scoring
            if scoring is None:
                self.violations.append(f"I1: {name} is not terminal in phase {group.phase}")
                continue
            times = [stamps.admitted, stamps.taken, stamps.published, stamps.score_first_taken, stamps.score_taken]
            known = [time for time in [*times, stamps.committed] if time is not None]
            if known != sorted(known):
                self.violations.append(f"I6: {name}: a negative wait in {stamps}")
            if scoring.outcome == "scored":
                digest = encode_body(sample.body).digest if sample.body else ""
                if digest != sample.digest or abs((scoring.value or 0) - score_of(digest)) > 1e-9:
                    self.violations.append(f"I7: {name} has the score of another body")
        scored = sum(sample.scoring is not None and sample.scoring.outcome == "scored" for sample in group.samples)
        least = min(self.limits.min_samples_per_group, group.prompt.n) if group.prompt.split == "train" else 0
        if group.phase == "ready" and scored < least:
            self.violations.append(f"I1: {group.id} is ready with {scored} scored samples")

    async def check_ended(self, group: str) -> None:
        """I1: every sample of a group that has ended was reported terminal exactly once."""
        entries = await self.transport.commands.xrange(self.transport.names.events)
        records = [record for _, fields in entries for record in decode_event(fields)]
        told = Counter(each.index for each in records if isinstance(each, SampleRecord) and each.group == group)
        if told != Counter(range(self.sizes[group])):
            self.violations.append(f"I1: the samples of {group} became terminal so often: {dict(told)}")

    async def check_ledger(self) -> None:
        """I3: the ledger adds up, and is the trainer's."""
        streams = self.trainer.streams
        ledger = Ledger.from_counters(await streams.counters(), len(await streams.open_groups()))
        self.violations += [f"I3: {problem}" for problem in ledger.problems()]
        if ledger != self.trainer.ledger:
            self.violations.append(f"I3: Redis counts {ledger}, the trainer {self.trainer.ledger}")

    async def finish(self) -> None:
        """Every worker dies; new ones take over all they left, and the run ends."""
        self.lossy = False
        await self.repair()
        for worker in list(self.workers):
            self.crash(worker)
        for _ in range(40):
            if not self.trainer.open:
                break
            await self.work_off()
        if self.trainer.open:
            self.violations.append(f"I4: the work of lost workers was not taken over: {sorted(self.trainer.open)}")
        await self.check_ledger()
        await self.check_memory()

    async def workers_work_off(self) -> None:
        for worker in self.workers:
            await self.lapse(worker)
            await self.take(worker, 100)
            while worker.held:
                await self.work(worker)

    async def work_off(self) -> None:
        await self.workers_work_off()
        await self.take_ready()
        while self.trainer.taken:
            await self.close_one()

    async def check_memory(self) -> None:
        """I5: nothing is left of groups that have ended."""
        names, redis = self.transport.names, self.transport.commands
        streams = (names.prompts, names.samples, names.groups, names.ready)
        for _ in range(20):
            await self.work_off()
            if not any([await redis.xlen(name) for name in streams]):
                break
        left = [key for key in await self.keys() if b":group:" in key]
        left += [name.encode() for name in streams if await redis.xlen(name)]
        if left:
            self.violations.append(f"I5: left in Redis at the end of the run: {left}")

    async def stop(self) -> None:
        keys = await self.keys()
        if keys:
            await self.transport.commands.unlink(*keys)
        for transport in (self.transport, *self.transports.values()):
            await transport.close()
