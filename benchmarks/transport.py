"""What the transport costs: samples a second, CPU seconds per 1,000 samples, milliseconds added per hop.

Three real processes and a private Redis (password, AOF everysec): a trainer admits groups of 8 and closes them, a rollout
publishes finished samples of 512 response tokens, a reward worker commits a score that cost nothing. The same flow then
runs over ``ray.util.queue.Queue`` actors, which is what sample queues in the field are made of; those keep nothing when
a process dies and know no groups, leases or stamps.

- *samples/s*: from the first admission to the last close, everything warm, `WINDOW` groups open at a time.
- *CPU-s per 1,000*: user + system time of every process below this one (Redis, or Ray's daemons and actors, included),
  read from /proc at the begin and the end of that stretch.
- *added per hop*: samples are published at 500/s and scored for 0.512 s each, so that 256 are in flight. A hop is from
  the call that sends (admit, publish, commit of the group's last sample) to the moment the receiver has the parsed record
  in its hands; the machine's monotonic clock is the same for all its processes.

Usage: ``python benchmarks/transport.py [--json FILE] [--quick] [--no-ray]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import struct
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from plaudit_metrics.records import GenerationRecord, ScorerRecord, ScoringRecord
from plaudit_reward.sample import Sample
from plaudit_workers.launch.redis_server import RedisServer
from plaudit_workers.stream.commits import commit, commit_many
from plaudit_workers.stream.connection import RedisAddress, Transport
from plaudit_workers.stream.consumer import Consumer, ConsumerOptions
from plaudit_workers.stream.groups import Admission, StreamLimits, TrainerStreams
from plaudit_workers.stream.lease import Delivery
from plaudit_workers.stream.producer import publish, publish_many
from plaudit_workers.stream.records import Body, Group, PolicyVersion, Prompt, Sampling

TOKENS = 512
GROUP_SIZE = 8
WINDOW = 128
RATE_PER_S = 500
SCORE_S = 0.512
BATCH = 64
NO_WAIT = ConsumerOptions(block_s=0.2)

_IDS = struct.pack(f"<{TOKENS}i", *range(TOKENS))
_LOGPROBS = struct.pack(f"<{TOKENS}f", *([-0.5] * TOKENS))
_MASK = bytes([1] * TOKENS)
_TEXT = "the answer is 42. " * 110  # about four characters a token
Hops = dict[str, list[float]]


def make_prompt(position: int, incarnation: int) -> Prompt:
    return Prompt(
        group=f"t-{position}-{incarnation}.0",
        position=position,
        split="train",
        step=0,
        n=GROUP_SIZE,
        min_version=PolicyVersion(1, 0),
        seed=position,
        sampling=Sampling(max_tokens=TOKENS),
        data_source="benchmark",
        prompt="What is six times seven? " * 8,
        prompt_ids=_IDS[:256],
        extra_info={"sent": time.monotonic()},
    )


def make_body(prompt: Prompt, index: int) -> Body:
    return Body(
        response_ids=_IDS,
        logprobs=_LOGPROBS,
        loss_mask=_MASK,
        version_spans=[(0, 1, 0)],
        generation=GenerationRecord("rollout", 1.0, 64, TOKENS, 0, 0),
        sample=Sample(
            group=prompt.group,
            index=index,
            data_source=prompt.data_source,
            prompt=prompt.prompt,
            response=_TEXT,
            ground_truth="42",
            extra_info={"sent": time.monotonic()},
            response_tokens=TOKENS,
        ),
    )


def no_op_score() -> ScoringRecord:
    scorer = ScorerRecord("scored", 1.0, extra={"sent": time.monotonic()})
    return ScoringRecord("scored", 1.0, scorers={"no-op": scorer}, worker="reward")


async def rollout(transport: Transport, groups: int, paced: bool) -> Hops:
    """Publishes every sample of every prompt; paced: one after the other at RATE_PER_S."""
    hops: list[float] = []
    publishing: set[asyncio.Task[None]] = set()
    start = 0.0

    async def publish_paced(delivery: Delivery[Prompt], number: int) -> None:
        for index in range(GROUP_SIZE):
            due = start + (number * GROUP_SIZE + index) / RATE_PER_S
            await asyncio.sleep(max(due - time.monotonic(), 0))
            await publish(transport, delivery, index, make_body(delivery.payload, index))
        consumer.finished(delivery)

    async with Consumer[Prompt](transport, "prompts", "rollout", NO_WAIT) as consumer:
        done = 0
        while done < groups:
            deliveries = await consumer.take(BATCH // GROUP_SIZE)
            received = time.monotonic()
            start = start or received
            hops += [received - d.payload.extra_info["sent"] for d in deliveries]
            if paced:
                _spawn(publishing, *(publish_paced(d, done + i) for i, d in enumerate(deliveries)))
            elif deliveries:
                items = [(d, i, make_body(d.payload, i)) for d in deliveries for i in range(GROUP_SIZE)]
                await publish_many(transport, items)
                for delivery in deliveries:
                    consumer.finished(delivery)
            done += len(deliveries)
        await asyncio.gather(*publishing)
    return {"prompts": hops}


def _spawn(tasks: set[asyncio.Task[None]], *work: Coroutine[Any, Any, None]) -> None:
    for part in work:
        task = asyncio.create_task(part)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def reward(transport: Transport, groups: int, paced: bool) -> Hops:
    """Commits a score for every sample; paced: after SCORE_S, hundreds at a time."""
    hops: list[float] = []
    scoring: set[asyncio.Task[None]] = set()

    async def score(delivery: Delivery[Sample]) -> None:
        await asyncio.sleep(SCORE_S)
        await commit(transport, delivery, no_op_score())
        consumer.finished(delivery)

    async with Consumer[Sample](transport, "samples", "reward", NO_WAIT) as consumer:
        done = 0
        while done < groups * GROUP_SIZE:
            deliveries = await consumer.take(BATCH)
            received = time.monotonic()
            hops += [received - d.payload.extra_info["sent"] for d in deliveries]
            done += len(deliveries)
            if paced:
                _spawn(scoring, *(score(delivery) for delivery in deliveries))
            elif deliveries:
                await commit_many(transport, [(delivery, no_op_score()) for delivery in deliveries])
                for delivery in deliveries:
                    consumer.finished(delivery)
        await asyncio.gather(*scoring)
    return {"samples": hops}


def last_sent(group: Group) -> float:
    return max(float(s.scoring.scorers["no-op"].extra["sent"]) for s in group.samples if s.scoring)


async def trainer(transport: Transport, groups: int, paced: bool) -> Hops:
    """Admits groups up to the window, closes those that are ready."""
    window = RATE_PER_S // GROUP_SIZE if paced else WINDOW
    streams = TrainerStreams(transport, StreamLimits(max_open_groups=window))
    incarnation = await streams.take_over()
    hops: list[float] = []
    admitted = closed = 0
    start = time.monotonic()
    while closed < groups:
        allowed = groups if not paced else int((time.monotonic() - start) * RATE_PER_S / GROUP_SIZE) + 1
        room = min(window - (admitted - closed), groups - admitted, allowed - admitted)
        prompts = [make_prompt(admitted + i, incarnation) for i in range(room)]
        answers = await asyncio.gather(*(streams.admit(prompt) for prompt in prompts))
        admitted += sum(answer is Admission.admitted for answer in answers)
        ready = await streams.take_ready(BATCH, 0.01 if paced else 0.5)
        received = time.monotonic()
        hops += [received - last_sent(group) for group in ready]
        await asyncio.gather(*(streams.close(group.id, "trained") for group in ready))
        closed += len(ready)
    return {"ready": hops}


ROLES: dict[str, Callable[[Transport, int, bool], Coroutine[Any, Any, Hops]]] = {
    "trainer": trainer,
    "rollout": rollout,
    "reward": reward,
}


def role_process(
    role: str, url: str, password: str, run: str, groups: int, paced: bool, barrier: Any, results: Any
) -> None:
    """One process: connects, waits for the others, works, reports its hops and when it ended."""

    async def work() -> tuple[Hops, float]:
        transport = await Transport.open(RedisAddress(url, password), run)
        await asyncio.to_thread(barrier.wait)
        hops = await ROLES[role](transport, groups, paced)
        ended = time.monotonic()
        await transport.close()
        return hops, ended

    results.put(asyncio.run(work()))
    barrier.wait()  # processes stay until the CPU time of all was read


def cpu_seconds(root: int) -> float:
    """User + system seconds of a process and all that descend from it."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            spent[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    total = 0.0
    for pid in spent:
        ancestor = pid
        while ancestor not in (root, 0, 1):
            ancestor = parents.get(ancestor, 0)
        total += spent[pid] if ancestor == root else 0.0
    return total


def run_flow(server: RedisServer, groups: int, *, paced: bool) -> tuple[float, float, Hops]:
    """One flow through three processes; returns seconds, CPU seconds and the hops."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(len(ROLES) + 1), context.Queue()
    run = f"benchmark-{time.monotonic_ns()}"
    arguments = (server.url, server.password, run, groups, paced, barrier, results)
    processes = [context.Process(target=role_process, args=(role, *arguments)) for role in ROLES]
    for process in processes:
        process.start()
    barrier.wait()
    start, cpu_start = time.monotonic(), cpu_seconds(os.getpid())
    reports = [results.get() for _ in processes]
    cpu_s = cpu_seconds(os.getpid()) - cpu_start
    barrier.wait()
    for process in processes:
        process.join()
    hops: Hops = {name: times for part, _ in reports for name, times in part.items()}
    return max(ended for _, ended in reports) - start, cpu_s, hops


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="a shortened run")
    parser.add_argument("--no-ray", action="store_true", help="leave out the Ray queue")
    options = parser.parse_args()
    groups = 256 if options.quick else 8192
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        seconds, cpu_s, _ = run_flow(server, groups, paced=False)
        n = groups * GROUP_SIZE
        print(f"{n / seconds:.0f} samples/s, {cpu_s / n * 1000:.3f} CPU-s per 1,000")
        _, _, hops = run_flow(server, RATE_PER_S * (3 if options.quick else 20) // GROUP_SIZE, paced=True)
        for name, times in hops.items():
            print(name, np.percentile(np.array(times) * 1e3, [50, 99]), len(times))


if __name__ == "__main__":
    main()
