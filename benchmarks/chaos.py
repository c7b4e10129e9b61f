"""Kills every kind of process of a running job with SIGKILL, at random times, and looks at what is left.

The copy-digits job runs once undisturbed and once under fire: a rollout, a reward worker, the trainer and Redis are
each killed ``--kills`` times. Shown of the disturbed run: its end, its ledger, whether the prompts it trained on (in
the surviving line of checkpoints) are those of the undisturbed run, how many samples ended as poison, and for each kill
how long entries stayed with the dead consumer (the takeover; a lease lasts 20 s, and begins anew when Redis was away).

    python benchmarks/chaos.py [--kills 2] [--steps 60] [--seed 0] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as parquet
import redis
import yaml

from plaudit_metrics.sources.steps import read_steps
from plaudit_workers.launch.transport import redis_address

VICTIMS = ("rollout", "reward", "trainer", "redis")
EXAMPLE = Path(__file__).parent.parent / "examples" / "01-copy-digits"
JOB = EXAMPLE / ".chaos.yaml"
"""The example with two rollouts and two reward workers, so that somebody is there to take over."""
PLAUDIT = [sys.executable, "-m", "plaudit_workers.cli"]
_HOLDS_WITHIN_S = 90.0
"""A worker is killed while it holds work; after another's death the job may need so long to have some again."""
STREAMS = ("prompts", "samples", "groups", "ready")
SCRIPTED = {"kind": "scripted", "arguments": {"latencySeconds": {"kind": "uniform", "low": 0.2, "high": 0.6}}}
"""The quick form's rollouts: they die and come back as vLLM's do, without its start of 15 s."""


@dataclass
class Takeover:
    """The fate of the entries that a killed process held."""

    victim: str
    killed: float
    entries: int = 0
    seconds: float = 0.0
    """From the kill until no entry was pending under the dead name."""
    seconds_with_redis: float = 0.0
    """The same from Redis's last kill on, where that was later."""


@dataclass
class Run:
    """One run of the job and what was seen of it."""

    folder: Path
    exit_code: int = -1
    seconds: float = 0.0
    takeovers: list[Takeover] = field(default_factory=list)

    def ledger(self) -> dict[str, int]:
        """The ledger that the trainer left."""
        ledger: dict[str, int] = json.loads((self.folder / "ledger.json").read_text())
        return ledger

    def trained_positions(self) -> list[int]:
        """Data positions of the groups trained in the surviving line, sorted."""
        positions = []
        for record in read_steps(self.folder / "steps.jsonl"):
            file = self.folder / "samples" / f"step-{record.step:06d}-i{record.incarnation}.parquet"
            rows = parquet.read_table(file, columns=["group", "end"]).to_pylist()
            groups = {row["group"] for row in rows if row["end"] == "trained" and row["group"].startswith("t-")}
            positions += [int(group.split("-")[1]) for group in groups]
        return sorted(positions)


def run_job(folder: Path, steps: int, kills: Iterable[tuple[float, str]] = ()) -> Run:
    """Runs the job to its end; ``kills`` gives the seconds to wait and the victim, one after the other."""
    command = [*PLAUDIT, "run", str(JOB), "--runs-folder", str(folder.parent), "--run", folder.name]
    began = time.monotonic()
    run = Run(folder)
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen([*command, "--steps", str(steps)], stdout=log, stderr=log)
        try:
            _kill_along(process, run, kills)
            run.exit_code = process.wait()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
    run.seconds = time.monotonic() - began
    return run


def _kill_along(process: subprocess.Popen[bytes], run: Run, kills: Iterable[tuple[float, str]]) -> None:
    """Waits for the first step, then kills as told, watching what dead consumers still hold."""
    steps_file = run.folder / "steps.jsonl"
    while process.poll() is None and not steps_file.exists():
        time.sleep(0.1)
    for pause_s, victim in kills:
        until = time.monotonic() + pause_s
        while process.poll() is None and time.monotonic() < until:
            _watch(run)
            time.sleep(0.25)
        if process.poll() is not None:
            return
        _kill(process, run, victim)
    while process.poll() is None and any(takeover.seconds == 0 for takeover in run.takeovers):
        _watch(run)
        time.sleep(0.25)


def _kill(process: subprocess.Popen[bytes], run: Run, victim: str) -> None:
    file = run.folder / "redis" / "redis.pid" if victim == "redis" else run.folder / "logs" / f"{victim}-0.pid"
    worker = file.with_suffix(".worker")
    takeover = Takeover(victim, time.monotonic())
    patience = time.monotonic() + _HOLDS_WITHIN_S
    while victim in {"rollout", "reward"} and not takeover.entries and time.monotonic() < patience:
        if process.poll() is not None:
            return
        takeover.victim = worker.read_text().strip()  # a process that is started again has a new name
        takeover.entries = _held(run, takeover.victim)  # an idle worker's death would show nothing
        time.sleep(0.005)
    while not _killed(int(file.read_text())):
        time.sleep(0.1)  # it died a moment ago and is being started again
    takeover.killed = time.monotonic()
    run.takeovers.append(takeover)


def _killed(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _watch(run: Run) -> None:
    """Notes for each kill whose entries are all gone from the dead name how long that took."""
    for takeover in run.takeovers:
        if takeover.seconds == 0 and (takeover.victim in VICTIMS or not _holds(run, takeover.victim)):
            now = time.monotonic()
            takeover.seconds = now - takeover.killed
            killed = [takeover.killed, *(other.killed for other in run.takeovers if other.victim == "redis")]
            takeover.seconds_with_redis = now - max(killed)


def _held(run: Run, consumer: str) -> int:
    try:
        return sum(_pending(run, consumer).values())
    except redis.RedisError:
        return 0  # Redis is away


def _holds(run: Run, consumer: str) -> bool:
    try:
        return any(_pending(run, consumer).values())
    except redis.RedisError:
        return True  # Redis is away: nobody has taken anything over


def _pending(run: Run, consumer: str) -> dict[str, int]:
    """Entries pending under a consumer, by stream."""
    pending = {}
    with _client(run) as client:
        for stream in STREAMS:
            key = f"plaudit:{{{run.folder.name}}}:{stream}"
            for group in client.xinfo_groups(key) if client.exists(key) else []:
                consumers = client.xinfo_consumers(key, group["name"])
                pending[stream] = sum(c["pending"] for c in consumers if c["name"].decode() == consumer)
    return pending


def _client(run: Run) -> redis.Redis:
    address = redis_address(run.folder, None)
    return redis.Redis.from_url(address.url, username=address.username, password=address.password, socket_timeout=2)


def schedule(kills: int, rng: random.Random, apart_s: tuple[float, float]) -> Iterator[tuple[float, str]]:
    """Every victim ``kills`` times in random order, so many seconds apart."""
    victims = [victim for victim in VICTIMS for _ in range(kills)]
    rng.shuffle(victims)
    return ((rng.uniform(*apart_s), victim) for victim in victims)


def main() -> int:
    """Prints what the disturbed run left; exit code 1 when a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--quick", action="store_true", help="one kill of each kind in a short run without vLLM, no undisturbed one"
    )
    arguments = parser.parse_args()
    kills, steps = (1, 24) if arguments.quick else (arguments.kills, arguments.steps)
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True)
    job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    job["spec"]["rollout"]["replicas"] = job["spec"]["reward"]["workers"]["replicas"] = 2
    if arguments.quick:
        job["spec"]["rollout"]["engine"] = SCRIPTED
    JOB.write_text(yaml.safe_dump(job))
    try:
        return disturb(arguments, kills, steps)
    finally:
        JOB.unlink()


def disturb(arguments: argparse.Namespace, kills: int, steps: int) -> int:
    """Runs the job, undisturbed unless quick and under fire; prints what is left. Returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = None if arguments.quick else run_job(Path(folder) / "undisturbed", steps)
        kills_along = schedule(kills, random.Random(arguments.seed), (0.5, 2) if arguments.quick else (3, 9))
        disturbed = run_job(Path(folder) / "disturbed", steps, kills_along)
        expected = undisturbed.trained_positions() if undisturbed else every_position(steps)
        figures = report(disturbed, expected)
        if undisturbed:
            figures |= {"undisturbed": {"exit_code": undisturbed.exit_code, "seconds": round(undisturbed.seconds, 1)}}
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))
    return 0 if figures["same_prompts_trained"] and disturbed.exit_code == 0 else 1


def every_position(steps: int) -> list[int]:
    """Return the training data of an undisturbed run: every prompt of every step once, since none of them fails."""
    job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    return list(range(steps * job["spec"]["algorithm"]["promptsPerStep"]))


def report(disturbed: Run, expected: list[int]) -> dict[str, object]:
    """The results of the disturbed run."""
    positions = disturbed.trained_positions()
    statistics = [record.statistics for record in read_steps(disturbed.folder / "steps.jsonl")]
    return {
        "exit_code": disturbed.exit_code,
        "seconds": round(disturbed.seconds, 1),
        "kills": len(disturbed.takeovers),
        "takeover_max_s": round(max((takeover.seconds_with_redis for takeover in disturbed.takeovers), default=0.0), 1),
        "takeovers": [
            {
                "victim": t.victim,
                "entries_held": t.entries,
                "seconds": round(t.seconds, 1),
                "seconds_with_redis": round(t.seconds_with_redis, 1),
            }
            for t in disturbed.takeovers
        ],
        "same_prompts_trained": positions == expected,
        "trained_twice": len(positions) - len(set(positions)),
        "poison": sum(figures.get("reward_pipeline/outcome/poison", 0) for figures in statistics),
        "ledger": disturbed.ledger(),
    }


if __name__ == "__main__":
    raise SystemExit(main())
