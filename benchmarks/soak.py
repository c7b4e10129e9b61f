"""Run whole jobs through seeded faults and check what may never break.

Each run is a trainer (scripted policy), two rollouts (scripted engine), two reward workers and a private Redis, all
real code in one process. A seed draws the schedule and, every second or so, a fault:

- *trainer*: killed at any line and started again, or a second one started beside it;
- *worker*: a rollout or reward worker killed, and another started under a new name;
- *rewind*: Redis comes back with a state up to two seconds old, or empty;
- *refuse*: Redis refuses for a second or two: READONLY (it follows another server), NOREPLICAS, OOM;
- *freeze*: Redis does not answer for a second (SIGSTOP);
- *restart*: Redis is killed and comes back with its append-only file;
- *start*: a trainer starts while Redis is away for seconds;
- *stall*: the network forwards nothing for up to 6.5 s, while connections stay open;
- *cut*: the network ends all connections and refuses new ones for up to 3 s;
- *clock*: Redis's wall clock is stepped, by up to ten minutes (needs a C compiler);
- *volume*: the folder of spilled records is away for a second.

Every run must finish and, in the surviving line of checkpoints, have trained every position exactly once, with a ledger
that adds up, steps without a gap, no staleness beyond the schedule's, no poison among healthy samples, and nothing left
in Redis but counters.

    python benchmarks/soak.py [--runs 200] [--seed 0] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import redis

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from bad_network import BadNetwork
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.stream.trainer import StaleIncarnationError
from simulated_run import Simulation, make_plan
from stepped_clock import SteppedClock

STEPS, PROMPTS = 8, 4
FAULTS = (
    *("trainer", "second trainer", "start", "worker", "volume"),
    *("rewind", "flush", "refuse", "freeze", "restart", "stall", "cut", "clock"),
)
STEPS_OF_CLOCK_S = (-600.0, -30.0, -3.0, 0.0, 3.0, 30.0, 600.0)
FAULTS_A_RUN = 5
ENDS_WITHIN_S = 120.0
TINY_RECORD_BYTES = 64
"""Records above it lie on the volume, so that faults of the volume matter."""
REFUSALS = {
    "READONLY": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    "NOREPLICAS": (("CONFIG", "SET", "min-replicas-to-write", "1"), ("CONFIG", "SET", "min-replicas-to-write", "0")),
    "OOM": (("CONFIG", "SET", "maxmemory", "1mb"), ("CONFIG", "SET", "maxmemory", "0")),
}


def raised(error: Exception) -> str:
    """Return an exception with the frames of ours that it passed; redis-py's ``repr`` leaves the message out."""
    frames = [f"{Path(each.filename).name}:{each.lineno}" for each in traceback.extract_tb(error.__traceback__)]
    own = [each for each in frames if not each.startswith(("client.py", "connection.py", "base.py"))]
    return f"raised {type(error).__name__} {error} at {' '.join(own[-6:])}"[:500]


class Soak:
    """One run and its faults.

    Args:
        server: the run's Redis, started.
        network: between Redis and all processes of the run.
        clock: of that Redis.
        folder: the run's files.
        seed: what every choice follows from.
    """

    def __init__(
        self, server: RedisServer, network: BadNetwork, clock: SteppedClock | None, folder: Path, seed: int
    ) -> None:
        self.server = server
        self.network = network
        self.clock = clock
        self.chance = random.Random(seed)
        self.simulation = Simulation(server, f"soak-{seed}", folder)
        self.simulation.port = network.port
        self.simulation.update_s = lambda groups: 0.03
        self.simulation.slow_s = self.chance.choice([0.05, 0.2])
        self.simulation.spill_above_bytes = self.chance.choice([None, TINY_RECORD_BYTES])
        self.simulation.consumer = {"block_s": 0.1, "lease_s": 2.0, "renew_every_s": 0.5, "reclaim_every_s": 0.5}
        self.staleness = self.chance.choice([0, 1, 2])
        self.plan = make_plan(
            steps=STEPS,
            prompts_per_step=PROMPTS,
            staleness=self.staleness,
            mini_batches=self.chance.choice([1, 2, 4]),
            order=self.chance.choice(["step", "ready"]),
            checkpoint_every_steps=self.chance.choice([1, 2, 3]),
            validate_every=self.chance.choice([None, 2]),
        )
        self.faults: list[str] = []
        self._state: list[bytes] = []
        self._life: asyncio.Task[Any]

    async def run(self) -> list[str]:
        """Train to the end under faults; return what broke."""
        async with self.simulation.workers(2, 2):
            keeping = asyncio.create_task(self._keep_states())
            self._life = asyncio.create_task(self.simulation.train(self.plan))
            try:
                for _ in range(FAULTS_A_RUN):
                    done, _ = await asyncio.wait([self._life], timeout=self.chance.uniform(0.1, 1.3))
                    if done:
                        break
                    await self._strike(self.chance.choice(FAULTS))
                async with asyncio.timeout(ENDS_WITHIN_S):
                    _, policy = await asyncio.shield(self._life)
            except TimeoutError:
                return [f"not finished after {ENDS_WITHIN_S:.0f} s; steps {len(self.simulation.steps())}"]
            except Exception as error:
                return [raised(error)]
            finally:
                keeping.cancel()
        left = await self._left()
        if left and self.faults[-1] == "rewind":  # it fell between the trainer's last write and its end
            await self._kill_trainer()
            await self._life
            left = await self._left()
        return [*self._trained(policy), *self._ledger(), *self._steps(), *left]

    async def _keep_states(self) -> None:
        while True:
            await asyncio.sleep(self.chance.uniform(0.1, 1.0))
            try:
                self._state = await self.simulation.state()
            except (redis.RedisError, OSError):
                continue  # a fault is under way

    async def _strike(self, fault: str) -> None:
        self.faults.append(fault)
        strike: dict[str, Callable[[], Awaitable[None]]] = {
            "trainer": self._kill_trainer,
            "second trainer": self._second_trainer,
            "worker": lambda: self.simulation.kill_worker(self.chance),
            "rewind": lambda: self._rewind(self._state),
            "flush": lambda: self._rewind([]),
            "refuse": self._refuse,
            "freeze": self._freeze,
            "restart": self._restart,
            "start": self._start_without_redis,
            "stall": lambda: self.network.stall(self.chance.uniform(0.3, 6.5)),
            "cut": self._cut,
            "clock": self._step_clock,
            "volume": self._volume_away,
        }
        await strike[fault]()

    async def _second_trainer(self) -> None:
        both = {self._life, asyncio.create_task(self.simulation.train(self.plan))}
        left, going_on = await asyncio.wait(both, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        if not left:
            raise RuntimeError("two trainers went on beside each other")
        for trainer in left:
            _raise_unless_replaced(trainer)
        # The last to take over, which is not always the last to start: the first may still have waited for Redis.
        self._life = min(going_on or left, key=lambda trainer: trainer.done() and trainer.exception() is not None)

    async def _rewind(self, state: list[bytes]) -> None:
        await self.simulation.rewind(state)
        if not state or self._life.done() or self.chance.random() < 0.5:
            await self._kill_trainer()  # groups that a rewind brings back after the end have no other owner

    async def _freeze(self) -> None:
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGSTOP)
        await asyncio.sleep(self.chance.uniform(0.2, 1.5))
        os.kill(self.server.pid, signal.SIGCONT)

    async def _restart(self) -> None:
        self.server.kill()
        await asyncio.sleep(self.chance.uniform(0.1, 1.0))
        await asyncio.to_thread(self.server.start)

    async def _start_without_redis(self) -> None:
        self.server.kill()
        await self._kill_trainer()
        await asyncio.sleep(self.chance.uniform(0.1, 3.0))
        await asyncio.to_thread(self.server.start)

    async def _cut(self) -> None:
        self.network.cut()
        await asyncio.sleep(self.chance.uniform(0.1, 3.0))
        self.network.restore()

    async def _step_clock(self) -> None:
        if self.clock is not None:
            self.clock.step(self.chance.choice(STEPS_OF_CLOCK_S))

    async def _kill_trainer(self) -> None:
        if self._life.done():
            self._life.result()  # a failure of its own is not hidden by the next trainer
        self._life.cancel()
        await asyncio.wait([self._life])
        self._life = asyncio.create_task(self.simulation.train(self.plan))

    async def _refuse(self) -> None:
        name = self.chance.choice(sorted(REFUSALS))
        self.faults[-1] += f" {name}"
        begin, end = REFUSALS[name]
        with redis.Redis(port=self.server.port, password=self.server.password) as client:
            client.execute_command(*begin)
            await asyncio.sleep(self.chance.uniform(0.5, 2.0))
            client.execute_command(*end)

    async def _volume_away(self) -> None:
        folder, away = self.simulation.folder / "spill", self.simulation.folder / "away"
        if not folder.exists():
            return
        folder.rename(away)
        await asyncio.sleep(self.chance.uniform(0.2, 1.0))
        shutil.rmtree(folder, ignore_errors=True)  # a trainer that took over meanwhile has made an empty one
        away.rename(folder)

    def _trained(self, policy: Any) -> list[str]:
        positions = sorted(int(group.split("-")[1]) for update in policy.trained for group in update)
        wanted = list(range(STEPS * PROMPTS))
        return [] if positions == wanted else [f"trained positions {positions}"]

    def _ledger(self) -> list[str]:
        ledger = self.simulation.ledger()
        ended = ledger["trained"] + ledger["dropped"] + ledger["evaluated"]
        whole = not ledger["problems"] and not ledger["open"] and ledger["admitted"] == ended
        poison = sum(step.statistics.get("reward_pipeline/outcome/poison", 0) for step in self.simulation.steps())
        return ([] if whole else [f"ledger {ledger}"]) + ([f"poison {poison}"] if poison else [])

    def _steps(self) -> list[str]:
        steps = [step for step in self.simulation.steps() if step.step]
        problems = []
        if [step.step for step in steps] != list(range(1, STEPS + 1)):
            problems.append(f"steps {[step.step for step in steps]}")
        stalest = max(step.statistics["reward_pipeline/staleness/max"] for step in steps)
        return problems + ([f"staleness {stalest}"] if stalest > self.staleness else [])

    async def _left(self) -> list[str]:
        transport = await self.simulation.open()
        try:
            left = [key async for key in transport.commands.scan_iter(f"{transport.names.prefix}group:*")]
        finally:
            await transport.close()
        return [f"groups left in Redis: {left}"] if left else []


def _raise_unless_replaced(trainer: asyncio.Task[Any]) -> None:
    error = trainer.exception()
    if error is not None and not isinstance(error, StaleIncarnationError):
        raise error


async def soak(first: int, runs: int) -> dict[str, Any]:
    """Run the seeds one after another; return the figures."""
    struck: Counter[str] = Counter()
    broken: list[dict[str, Any]] = []
    began = time.monotonic()
    for seed in range(first, first + runs):
        with tempfile.TemporaryDirectory(prefix="plaudit-soak-") as folder:
            clock = SteppedClock(Path(folder)) if SteppedClock.available() else None
            with (
                clock.preloaded() if clock else contextlib.nullcontext(),
                RedisServer(Path(folder) / "redis") as server,
            ):
                async with BadNetwork(server.port) as network:
                    run = Soak(server, network, clock, Path(folder) / "run", seed)
                    try:
                        problems = await run.run()
                    except Exception as error:
                        problems = [f"a worker {raised(error)}"]
            gc.collect()
        struck.update(run.faults)
        if problems:
            broken.append({"seed": seed, "faults": run.faults, "problems": problems})
            print(f"seed {seed}: {', '.join(run.faults)}: {'; '.join(problems)}", flush=True)
    return {"runs": runs, "broken": broken, "faults": dict(struck), "seconds": time.monotonic() - began}


def main() -> None:
    """Print the figures; exit 1 when anything broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others count on from it")
    parser.add_argument("--quick", action="store_true", help="six runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore", ResourceWarning)  # killed trainers do not close their connections
    figures = asyncio.run(soak(options.seed, 6 if options.quick else options.runs))
    print(f"{figures['runs']} runs in {figures['seconds']:.0f} s, {len(figures['broken'])} broken")
    for fault, count in sorted(figures["faults"].items()):
        print(f"  {fault}: {count}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    sys.exit(bool(figures["broken"]))


if __name__ == "__main__":
    main()
