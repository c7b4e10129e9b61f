"""Find what saturates first as a run grows: many rollouts and reward workers in virtual time, on a real Redis.

Every process is simulated, but its calls are real: the product's consumers, transitions and records, over connections
of its own to a private Redis that executes the real Lua. One call at a time runs, is measured and then takes its time
in the simulation: the CPU time of the caller occupies the caller's core, that of Redis occupies Redis's only thread.
Generation and scoring are waits. So two cores show what 1,000 rollouts would do to each part:

- *redis*: its main thread, as the kernel counts it;
- *trainer*: admits, takes and decodes groups, closes them (one Python thread; updates take no time here);
- *metrics*: the metrics service reads and aggregates each sample's record;
- *rollouts*: generate ``--tokens-per-s`` each; *workers*: hold ``--in-flight`` samples each, ``--score-s`` long.

Three steps are open at a time (``maxStaleness`` 2), of groups of 8, of a sample for each place of the rollouts, at most
4,096. Left out are searches for lapsed leases (``lease_cost.py``), weights and disks. The Python processes of a real
fleet run on cores of their own, which share no cache with Redis as they do here.

Usage::

    python benchmarks/scale.py [--json FILE] [--plot FILE.svg]     # the sweep, 10 to 1,000 rollouts
    python benchmarks/scale.py --step 65536 --rollouts 1000        # one step of 65,536 samples
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import math
import random
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transport_streams import GROUP_SIZE, make_body, make_prompt, no_op_score

from plaudit_metrics.service.series.collectors import Naming
from plaudit_metrics.service.series.run import RunInfo, RunSeries
from plaudit_metrics.service.view import RunView
from plaudit_metrics.sources.steps import KeptSteps
from plaudit_metrics.sources.stream import decode_event
from plaudit_wire.messages import Prompt
from plaudit_wire.names import EVENTS_GROUP
from plaudit_wire.records import Sample, StepRecord, WorkerRecord
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.calls import Delivery, StreamLimits
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions, commit, publish
from plaudit_workers.stream.groups import Group
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport
from plaudit_workers.training.groups import GroupEnding, group_record

T = TypeVar("T")
AT_ONCE = 64
"""Groups that the trainer admits, takes or closes in one batch."""
PROMPTS_A_TAKE = 4
STEP = 4096
"""Samples of a step in the sweep: with two more steps open, enough to keep Redis busy."""
KEEP_EVERY_S = 5.0
OURS = ConsumerOptions(block_s=0, lease_s=1e6, renew_every_s=1e6, reclaim_every_s=1e6)
"""Without clocks of its own: the simulation renews, and real time has no meaning in it."""


@dataclass
class Core:
    """A thread in virtual time."""

    name: str
    free_at: float = 0.0
    busy_s: float = 0.0

    def occupy(self, now: float, seconds: float) -> float:
        """Return when it has done so much more work, after what waits already."""
        self.free_at = max(now, self.free_at) + seconds
        self.busy_s += seconds
        return self.free_at


@dataclass
class Cost:
    """What the calls of one kind took."""

    calls: int = 0
    caller_s: float = 0.0
    redis_s: float = 0.0


class World:
    """Virtual time. One task at a time runs, until it waits for a time or a signal."""

    def __init__(self, redis_pid: int) -> None:
        self.now = 0.0
        self.redis = Core("redis")
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self.ended = False
        self._statistics = Path(f"/proc/{redis_pid}/task/{redis_pid}/schedstat")
        self._due: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._running = 0
        self._waits = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    def _redis_s(self) -> float:
        return int(self._statistics.read_text().split()[0]) / 1e9

    def resume(self, future: asyncio.Future[None], at: float) -> None:
        """Let the task that awaits the future go on at this time."""
        heapq.heappush(self._due, (at, next(self._numbers), future))

    async def wait(self, future: asyncio.Future[None]) -> None:
        """Wait for a future of ``resume``: meanwhile others run."""
        self._running -= 1
        self._waits.set()
        await future

    async def sleep_until(self, at: float) -> None:
        """Wait until this time."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.resume(future, max(at, self.now))
        await self.wait(future)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task at this moment of virtual time."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.resume(future, self.now)

        async def begin() -> None:
            await future
            try:
                await work
            finally:
                self._running -= 1
                self._waits.set()

        task = asyncio.create_task(begin())
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._error = error
            self._waits.set()

    async def run(self) -> None:
        """Let time pass until ``ended``, or until nothing is due."""
        while self._due and not self.ended:
            self.now, _, future = heapq.heappop(self._due)
            self._running += 1
            future.set_result(None)
            while self._running and not self._error:
                self._waits.clear()
                await self._waits.wait()
            if self._error:
                raise self._error

    async def close(self) -> None:
        """End all tasks."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def call(self, caller: Core, kind: str, operation: Callable[[], Awaitable[T]]) -> T:
        """Run a real call, and let it take in virtual time what it took of its caller's core and of Redis's."""
        while caller.free_at > self.now:
            await self.sleep_until(caller.free_at)
        caller_s, redis_s = time.thread_time(), self._redis_s()
        answer = await operation()
        caller_s, redis_s = time.thread_time() - caller_s, self._redis_s() - redis_s
        cost = self.costs[kind]
        cost.calls, cost.caller_s, cost.redis_s = cost.calls + 1, cost.caller_s + caller_s, cost.redis_s + redis_s
        await self.sleep_until(caller.occupy(self.now, caller_s))
        await self.sleep_until(self.redis.occupy(self.now, redis_s))
        return answer


async def _together(operations: Sequence[Callable[[], Awaitable[Any]]]) -> None:
    """Run calls at once: they travel in one pipeline."""
    await asyncio.gather(*(each() for each in operations))


class Signal:
    """Wakes one waiting task a time, in the order in which they came; one that nobody awaits is kept."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._kept = False

    def send(self) -> None:
        """Wake the first."""
        if self._waiting:
            self._world.resume(self._waiting.popleft(), self._world.now)
        else:
            self._kept = True

    async def wait(self) -> None:
        """Wait for it."""
        if self._kept:
            self._kept = False
            return
        self._waiting.append(asyncio.get_running_loop().create_future())
        await self._world.wait(self._waiting[-1])


@dataclass(frozen=True)
class Fleet:
    """The sizes of a run."""

    rollouts: int
    workers: int
    tokens: int = 512
    tokens_per_s: float = 20_000.0
    places: int = 16
    """Samples that a rollout generates at a time."""
    in_flight: int = 256
    score_s: float = 0.5
    steps: int = 4
    """The first is not counted, unless it is the only one."""
    samples: int = 0
    """Of a step; 0: one for each place, at most ``STEP``."""
    staleness: int = 2

    @property
    def groups(self) -> int:
        """Return the groups of a step."""
        samples: int = self.samples or min(self.rollouts * self.places, STEP)
        return max(samples // int(GROUP_SIZE), 1)

    @property
    def generated_per_s(self) -> float:
        """Return the samples that its rollouts can generate in a second."""
        return self.rollouts * self.tokens_per_s / self.tokens

    @property
    def scored_per_s(self) -> float:
        """Return the samples that its workers can score in a second."""
        return self.workers * self.in_flight / self.score_s


@dataclass
class Run:
    """What the processes of one simulated run share."""

    fleet: Fleet
    world: World
    address: RedisAddress
    name: str
    stack: AsyncExitStack
    rolls: random.Random = field(default_factory=lambda: random.Random(1))
    scored: int = 0
    """The samples that have a score."""

    def __post_init__(self) -> None:
        self.prompts, self.samples, self.ready, self.events = (Signal(self.world) for _ in range(4))

    async def open(self) -> Transport:
        """Open the connections of one process."""
        transport = await Transport.open(self.address, self.name)
        self.stack.push_async_callback(transport.close)
        return transport


class Worker:
    """What rollouts and reward workers have in common: they take, wait, send, and keep their leases."""

    def __init__(self, run: Run, transport: Transport, name: str, places: int) -> None:
        self.run, self.transport, self.core = run, transport, Core(name)
        self.free = places
        self._outbox: list[Callable[[], Awaitable[Any]]] = []
        self._filled, self.freed = Signal(run.world), Signal(run.world)

    async def call(self, kind: str, operation: Callable[[], Awaitable[T]]) -> T:
        """Run a real call on this process's core."""
        return await self.run.world.call(self.core, kind, operation)

    def send_after(self, seconds: float, call: Callable[[], Awaitable[Any]]) -> None:
        """Send a call when a sample has been generated or scored."""

        async def send() -> None:
            await self.run.world.sleep_until(self.run.world.now + seconds)
            self._outbox.append(call)
            self._filled.send()

        self.run.world.spawn(send())

    async def send_all(self, kind: str, sent: Signal) -> None:
        """Send what waits in one pipeline, as ``ScriptRunner`` does."""
        while True:
            while not self._outbox:
                await self._filled.wait()
            batch, self._outbox = self._outbox, []
            await self.call(kind, partial(_together, batch))
            self.free += len(batch)
            self.freed.send()
            sent.send()

    async def keep(self, consumer: Consumer[Any], record: WorkerRecord) -> None:
        """Renew leases and send heartbeats."""
        await self.run.world.sleep_until(self.run.rolls.uniform(0, KEEP_EVERY_S))
        while True:
            await self.call("renew", consumer.renew)
            await self.call("beat", partial(self.transport.beat, record))
            await self.run.world.sleep_until(self.run.world.now + KEEP_EVERY_S)


async def rollout(run: Run, number: int) -> None:
    """Take prompts, publish their samples."""
    fleet, transport = run.fleet, await run.open()
    places = fleet.places + GROUP_SIZE  # one more prompt than the engine has places for (RolloutWorker)
    worker = Worker(run, transport, f"rollout-{number}", places)
    consumer = Consumer[Prompt](transport, "prompts", worker.core.name, OURS)
    takes_s = fleet.tokens * places / fleet.tokens_per_s
    left: dict[str, int] = {}

    async def send(delivery: Delivery[Prompt], index: int) -> None:
        await publish(transport, delivery, index, make_body(delivery.payload, index, fleet.tokens))
        left[delivery.group] = left.get(delivery.group, GROUP_SIZE) - 1
        if not left[delivery.group]:
            del left[delivery.group]
            consumer.finished(delivery)

    async def take() -> None:
        while True:
            while worker.free < GROUP_SIZE:
                await worker.freed.wait()
            wanted = min(worker.free // GROUP_SIZE, PROMPTS_A_TAKE)
            taken = await worker.call("take prompts", partial(consumer.take, wanted))
            for delivery in taken:
                worker.free -= GROUP_SIZE
                for index in range(GROUP_SIZE):
                    seconds = takes_s * run.rolls.uniform(0.5, 1.5)
                    worker.send_after(seconds, partial(send, delivery, index))
            if not taken:
                await run.prompts.wait()

    run.world.spawn(take())
    run.world.spawn(worker.send_all("publish", run.samples))
    run.world.spawn(worker.keep(consumer, WorkerRecord(worker.core.name, "rollout", fleet.places)))


async def reward_worker(run: Run, number: int) -> None:
    """Take samples, commit their scores."""
    fleet, transport = run.fleet, await run.open()
    worker = Worker(run, transport, f"reward-{number}", fleet.in_flight)
    consumer = Consumer[Sample](transport, "samples", worker.core.name, OURS)

    async def send(delivery: Delivery[Sample]) -> None:
        await commit(transport, delivery, no_op_score())
        run.scored += 1
        consumer.finished(delivery)

    async def take() -> None:
        while True:
            while not worker.free:
                await worker.freed.wait()
            wanted = worker.free
            taken = await worker.call("take samples", partial(consumer.take, wanted))
            worker.free -= len(taken)
            for delivery in taken:
                worker.send_after(fleet.score_s, partial(send, delivery))
            if not taken:
                await run.samples.wait()

    run.world.spawn(take())
    run.world.spawn(worker.send_all("commit", run.ready))
    run.world.spawn(worker.keep(consumer, WorkerRecord(worker.core.name, "reward", fleet.in_flight)))


class Trainer:
    """Admits the groups of the coming steps, holds those that are ready until a step has all, closes them."""

    def __init__(self, run: Run, transport: Transport, metrics: Core) -> None:
        self._run, self._world, self._metrics = run, run.world, metrics
        self._streams = TrainerStreams(transport, StreamLimits(max_open_groups=1 << 30))
        self.core = Core("trainer")
        self._held: list[Group] = []
        self.closed: list[tuple[dict[str, float], dict[str, Cost]]] = []
        """Of each step: when its last group was closed (``now``), samples scored, what cores and calls had taken."""

    async def work(self) -> None:
        """Train all steps."""
        fleet = self._run.fleet
        incarnation = await self._streams.take_over()
        admitted = 0
        for step in range(1, fleet.steps + 1):  # the last ends while the groups of the next are generated
            room = fleet.groups * (step + fleet.staleness)
            while admitted < room:
                part = range(admitted, min(admitted + AT_ONCE, room))
                prompts = [make_prompt(position, incarnation) for position in part]
                await self._call("admit", *(partial(self._streams.admit, each) for each in prompts))
                admitted = part.stop
                for _ in prompts:
                    self._run.prompts.send()
            await self._train(step, fleet.groups)
        self._world.ended = True

    async def _train(self, step: int, groups: int) -> None:
        while len(self._held) < groups:
            taken = await self._world.call(self.core, "take ready", partial(self._streams.take_ready, AT_ONCE, 0))
            self._held += taken
            if not taken:
                await self._run.ready.wait()
        batch, self._held = self._held[:groups], self._held[groups:]
        ending = GroupEnding("trained", step, time.time())
        for start in range(0, groups, AT_ONCE):
            part = batch[start : start + AT_ONCE]
            await self._call("close", *(partial(self._close, each, ending) for each in part))
            self._run.events.send()
        record = StepRecord(step, 1, time.time() - 1, time.time(), groups * GROUP_SIZE, groups, {})
        await self._call("close", partial(self._streams.record_step, record))
        cores = (self._world.redis, self.core, self._metrics)
        busy = {"now": self._world.now, "scored": float(self._run.scored), **{core.name: core.busy_s for core in cores}}
        self.closed.append((busy, {kind: replace(cost) for kind, cost in self._world.costs.items()}))

    async def _close(self, group: Group, ending: GroupEnding) -> None:
        await self._streams.close(group.id, "trained", record=group_record(group, ending, time.time()))

    async def _call(self, kind: str, *operations: Callable[[], Awaitable[Any]]) -> None:
        await self._world.call(self.core, kind, partial(_together, operations))


class Metrics:
    """Reads the records of all samples, as the metrics service does."""

    def __init__(self, run: Run, transport: Transport) -> None:
        self._run, self._transport = run, transport
        self._view = RunView(RunSeries(info=RunInfo(run.name), naming=Naming(run.name)), KeptSteps(), None)
        self.core = Core("metrics")

    async def work(self) -> None:
        """Read until the run ends."""
        events = self._transport.names.events
        await self._transport.commands.xgroup_create(events, EVENTS_GROUP, id="0", mkstream=True)
        while True:
            if not await self._run.world.call(self.core, "read events", self._read):
                await self._run.events.wait()

    async def _read(self) -> int:
        commands, events = self._transport.commands, self._transport.names.events
        answer: Any = await commands.xreadgroup(EVENTS_GROUP, EVENTS_GROUP, {events: ">"}, count=100)
        entries = [entry for _, entries in answer for entry in entries] if answer else []
        for _, fields in entries:
            self._view.handle(list(decode_event(fields)), True)
        if entries:
            await commands.xack(events, EVENTS_GROUP, *(entry for entry, _ in entries))
        return len(entries)


async def simulate(fleet: Fleet) -> dict[str, Any]:
    """Return the figures of one run."""
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        assert server.pid is not None
        world, address = World(server.pid), RedisAddress(server.url, server.password)
        async with AsyncExitStack() as stack:
            run = Run(fleet, world, address, "scale", stack)
            metrics = Metrics(run, await run.open())
            trainer = Trainer(run, await run.open(), metrics.core)
            stack.push_async_callback(world.close)
            for number in range(fleet.rollouts):
                await rollout(run, number)
            for number in range(fleet.workers):
                await reward_worker(run, number)
            for process in (metrics, trainer):
                world.spawn(process.work())
            await world.run()
        return figures(fleet, trainer)


def figures(fleet: Fleet, trainer: Trainer) -> dict[str, Any]:
    """Return the rate of the counted steps, each part's share of what it can do, and the cost of each call."""
    counted = max(fleet.steps - 1, 1)
    before, costs_before = trainer.closed[0] if fleet.steps > 1 else ({}, {})
    after, costs_after = trainer.closed[-1]
    seconds = after["now"] - before.get("now", 0.0)
    # Not the samples of the closed steps: those of several are in work at a time.
    samples = after["scored"] - before.get("scored", 0.0)
    used = {name: (after[name] - before.get(name, 0.0)) / seconds for name in ("redis", "trainer", "metrics")}
    used |= {"rollouts": samples / seconds / fleet.generated_per_s, "workers": samples / seconds / fleet.scored_per_s}
    costs = {}
    for kind, cost in costs_after.items():
        earlier = costs_before.get(kind, Cost())
        costs[kind] = {
            "calls": (cost.calls - earlier.calls) / samples,
            "caller_ms": 1e3 * (cost.caller_s - earlier.caller_s) / samples,
            "redis_ms": 1e3 * (cost.redis_s - earlier.redis_s) / samples,
        }
    return {
        **asdict(fleet),
        "samples_per_step": fleet.groups * GROUP_SIZE,
        "step_s": seconds / counted,
        "samples_per_s": samples / seconds,
        "used": used,
        "first": max(used, key=lambda name: used[name]),
        "costs": costs,
    }


def print_row(row: dict[str, Any]) -> None:
    """Print the shares of one run."""
    used = "".join(f"{row['used'][name]:>10.0%}" for name in ("rollouts", "workers", "redis", "trainer", "metrics"))
    print(f"{row['rollouts']:>9}{row['workers']:>9}{row['samples_per_s']:>11,.0f}{used}   {row['first']}", flush=True)


def print_costs(row: dict[str, Any]) -> None:
    """Print where the CPU time of a sample goes."""
    print(f"\n{'CPU ms a sample':<16}{'caller':>9}{'Redis':>9}{'calls a sample':>16}")
    for kind, cost in sorted(row["costs"].items(), key=lambda item: -item[1]["redis_ms"]):
        print(f"{kind:<16}{cost['caller_ms']:>9.3f}{cost['redis_ms']:>9.3f}{cost['calls']:>16.3f}")
    caller_ms, redis_ms = (sum(cost[part] for cost in row["costs"].values()) for part in ("caller_ms", "redis_ms"))
    print(f"{'all':<16}{caller_ms:>9.3f}{redis_ms:>9.3f}")


_PLOT = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 400" font-family="sans-serif" font-size="13">
<rect width="640" height="400" fill="#fff"/>
{parts}
<text x="330" y="390" text-anchor="middle">rollouts of {tokens_per_s:,.0f} tokens/s, {tokens:,} tokens a sample</text>
<text transform="translate(16 190) rotate(-90)" text-anchor="middle">samples/s</text>
</svg>
"""
_COLOURS = ("#b3541e", "#2a7f62", "#2b5fa4", "#7a3f9d", "#555")
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 500, 20, 350


def plot(rows: list[dict[str, Any]]) -> str:
    """Draw samples/s over the number of rollouts, a line for each number of reward workers; both axes logarithmic."""
    most, least = math.log10(max(map(_generated, rows))), math.floor(math.log10(min(r["samples_per_s"] for r in rows)))
    first, last = (math.log10(pick(row["rollouts"] for row in rows)) for pick in (min, max))

    def place(rollouts: float, rate: float) -> str:
        x = _LEFT + (_RIGHT - _LEFT) * (math.log10(rollouts) - first) / max(last - first, 1e-9)
        y = _BOTTOM - (_BOTTOM - _TOP) * (math.log10(rate) - least) / (most - least)
        return f"{x:.1f},{y:.1f}"

    labelled: list[float] = []

    def line(points: list[tuple[float, float]], style: str, label: str) -> Iterator[str]:
        places = [place(*point) for point in points]
        x, y = map(float, places[-1].split(","))
        y = min(
            (y + down for down in (0, 15, -15, 30, -30)), key=lambda at: any(abs(at - other) < 15 for other in labelled)
        )
        labelled.append(y)
        yield f'<polyline points="{" ".join(places)}" fill="none" {style}/>'
        yield f'<text x="{x + 8:.1f}" y="{y + 4:.1f}">{label}</text>'

    parts = []
    for power in range(least, math.floor(most) + 1):
        x, y = place(10**first, 10**power).split(",")
        parts.append(
            f'<path d="M{x} {y}H{_RIGHT}" stroke="#ddd"/><text x="62" y="{y}" text-anchor="end">{10**power:,}</text>'
        )
    for rollouts in sorted({row["rollouts"] for row in rows}):
        x = place(rollouts, 10**least).split(",")[0]
        parts.append(f'<text x="{x}" y="368" text-anchor="middle">{rollouts:,}</text>')
    generated = sorted({(row["rollouts"], _generated(row)) for row in rows})
    parts += line(generated, 'stroke="#999" stroke-dasharray="4 4"', "generated at most")
    for colour, workers in zip(_COLOURS, sorted({row["workers"] for row in rows}), strict=False):
        points = [(row["rollouts"], row["samples_per_s"]) for row in rows if row["workers"] == workers]
        parts += line(points, f'stroke="{colour}" stroke-width="2"', f"{workers} workers")
        parts += (
            f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in (place(*p).split(",") for p in points)
        )
    return _PLOT.format(parts="\n".join(parts), tokens=rows[0]["tokens"], tokens_per_s=rows[0]["tokens_per_s"])


def _generated(row: dict[str, Any]) -> float:
    return float(row["rollouts"] * row["tokens_per_s"] / row["tokens"])


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--plot", type=Path, help="draw samples/s over rollouts, as SVG")
    parser.add_argument("--quick", action="store_true", help="two small runs")
    parser.add_argument("--step", type=int, metavar="SAMPLES", help="one step of so many samples, nothing in advance")
    parser.add_argument("--rollouts", type=int, nargs="+", default=[10, 30, 100, 300, 1000])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 10, 50])
    for name in ("tokens", "tokens_per_s", "places", "in_flight", "score_s"):
        default = getattr(Fleet(1, 1), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in ("tokens", "tokens_per_s", "places", "in_flight", "score_s")}
    if options.step:
        sizes |= {"samples": options.step, "steps": 1, "staleness": 0, "places": max(options.places, 64)}
    rollouts, workers = ([2, 32], [1]) if options.quick else (options.rollouts, options.workers)
    parts = "".join(f"{part:>10}" for part in ("rollouts", "workers", "redis", "trainer", "metrics"))
    print(f"{'rollouts':>9}{'workers':>9}{'samples/s':>11}{parts}   first")
    rows = []
    for fleet in (Fleet(r, w, **sizes) for w in workers for r in rollouts):
        rows.append(asyncio.run(simulate(fleet)))
        print_row(rows[-1])
    print_costs(rows[-1])
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "scale", "rows": rows}, indent=1) + "\n")
    if options.plot:
        options.plot.write_text(plot(rows))


if __name__ == "__main__":
    main()
