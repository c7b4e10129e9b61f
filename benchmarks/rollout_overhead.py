"""Measure a rollout worker's overhead over its engine: its tokens/s ÷ the tokens/s of plain ``LLM.generate``.

Two processes on the same model and the same requests (prompt, sampling, seed), taking turns so that both see the same
machine; the responses are compared token for token:

- *bare*: vLLM's ``LLM.generate`` with log-probabilities and text, all requests of a round in one call.
- *worker*: ``python -m plaudit_workers.rollout`` as a job starts it, on a private Redis (password, AOF everysec). A
  round begins before the first prompt is admitted and ends when the last sample is published: reading prompts, leases,
  version checks, bodies, transitions and heartbeats are all in it.

Beside the wall clock stands the CPU time of the two processes (bare ÷ worker, Redis not counted): it tells the same on
a machine that is busy with other things.

The model is tiny (2 layers, 128 wide), so the engine spends its time in Python as the worker does: on a real model the
share of the worker is smaller. *long* is a round of responses of at most 256 tokens; *short* of at most 8 tokens (what
the copy-digits example generates), where the cost per sample shows most.

Usage: ``python benchmarks/rollout_overhead.py [--json FILE] [--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transport import cpu_seconds

from plaudit_wire.messages import Announcement, Prompt, Sampling
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.rollout.vllm_arguments import VllmSettings, engine_arguments, prepare_environment
from plaudit_workers.stream.calls import StreamLimits
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport

GOAL = 0.95
PROMPT_TOKENS = 64
SAMPLES_PER_PROMPT = 8
SYMBOLS = [chr(0x4E00 + number) for number in range(508)]  # many, so that few responses end early
ARGUMENTS = {"kv_cache_memory_bytes": 256 << 20}
CONCURRENT = 64
MODEL_LENGTH = 512
READY_WITHIN_S = 300.0
EXAMPLES = Path(__file__).parents[1] / "examples"

JOB = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {{name: rollout-overhead}}
spec:
  model: {{source: {model}, dtype: float32}}
  data: {{train: {{path: none.parquet, maxPromptLength: 64}}}}
  algorithm: {{steps: 1, promptsPerStep: 1, samplesPerPrompt: {samples}}}
  rollout:
    engine:
      maxModelLength: {length}
      maxConcurrentSamples: {concurrent}
      arguments: {{kv_cache_memory_bytes: {cache_bytes}}}
    sampling: {{maxTokens: 256}}
  reward: {{scorers: [{{name: none, kind: rule}}]}}
  trainer: {{}}
"""


@dataclass(frozen=True)
class Round:
    """One set of requests, the same for both."""

    name: str
    number: int
    prompts: int
    max_tokens: int

    def prompt_ids(self) -> list[list[int]]:
        """[prompts][PROMPT_TOKENS] token ids."""
        random = np.random.default_rng(self.number)
        ids: list[list[int]] = random.integers(0, len(SYMBOLS), (self.prompts, PROMPT_TOKENS)).tolist()
        return ids

    def seed(self, prompt: int) -> int:
        """Of a prompt; its sample ``i`` uses ``seed + i``."""
        return (self.number * 1000 + prompt) * SAMPLES_PER_PROMPT


def plan(quick: bool) -> list[Round]:
    """Rounds in the order they run; the first of each name warms up and is not counted."""
    rounds = 2 if quick else 5
    long, short = (4, 64) if quick else (24, 256), (8, 8) if quick else (96, 8)
    return [
        Round(name, 10 * place + number, *size)
        for place, (name, size) in enumerate([("long", long), ("short", short)])
        for number in range(rounds)
    ]


# --- bare ------------------------------------------------------------------------------------------------------------


def bare_process(model: str) -> None:
    """Reads rounds from standard input, answers with seconds and responses on standard output, one JSON a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prepare_environment(model)
    from vllm import LLM

    settings = VllmSettings(
        model, max_model_length=MODEL_LENGTH, max_concurrent_samples=CONCURRENT, arguments=ARGUMENTS
    )
    engine = engine_arguments(settings)
    engine.load_format, engine.disable_log_stats = "auto", True
    llm = LLM.from_engine_args(engine) if hasattr(LLM, "from_engine_args") else LLM(**vars(engine))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(bare_round(llm, Round(**json.loads(line)))), file=answers, flush=True)


def bare_round(llm: Any, about: Round) -> dict[str, Any]:
    """One call of ``generate``: seconds, and [prompts * samples] responses."""
    from vllm import SamplingParams

    requests, parameters = [], []
    for number, ids in enumerate(about.prompt_ids()):
        for index in range(SAMPLES_PER_PROMPT):
            requests.append({"prompt_token_ids": ids})
            parameters.append(SamplingParams(max_tokens=about.max_tokens, logprobs=0, seed=about.seed(number) + index))
    started = time.perf_counter()
    outputs = llm.generate(requests, parameters, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "responses": [list(output.outputs[0].token_ids) for output in outputs]}


class Bare:
    """The process of ``bare_process``."""

    def __init__(self, model: Path, log: Path) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--bare", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def wait_ready(self) -> None:
        """Returns when the engine is up."""
        if self._line() != "ready\n":
            raise SystemExit(f"bare vLLM did not start:\n{Path(self._log.name).read_text()[-2000:]}")

    def run(self, about: Round) -> dict[str, Any]:
        """Seconds and responses of one round."""
        assert self._process.stdin is not None
        cpu_s = cpu_seconds(self._process.pid)
        print(json.dumps(asdict(about)), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._line())
        return {**answer, "cpu_s": cpu_seconds(self._process.pid) - cpu_s}

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()


# --- worker ----------------------------------------------------------------------------------------------------------


class Worker:
    """The rollout process, and the trainer's side of its streams."""

    def __init__(self, server: RedisServer, model: Path, folder: Path) -> None:
        self._address = RedisAddress(server.url, server.password)
        self._model = model
        self._log = folder / "rollout.log"
        job = folder / "job.yaml"
        job.write_text(
            JOB.format(
                model=model,
                samples=SAMPLES_PER_PROMPT,
                length=MODEL_LENGTH,
                concurrent=CONCURRENT,
                cache_bytes=ARGUMENTS["kv_cache_memory_bytes"],
            )
        )
        environment = {
            "PLAUDIT_JOB": str(job),
            "PLAUDIT_RUN": "bench",
            "PLAUDIT_RUN_FOLDER": str(folder),
            "PLAUDIT_REDIS_URL": server.url,
            "PLAUDIT_REDIS_PASSWORD": server.password,
            "PLAUDIT_LOG_FILE": str(self._log),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "plaudit_workers.rollout"],
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    async def connect(self) -> None:
        """Announces the model's own weights and waits until the worker holds them."""
        self.transport = await Transport.open(self._address, "bench")
        self.streams = TrainerStreams(self.transport, StreamLimits(max_open_groups=10_000))
        self._version = await self._announce()
        deadline = time.monotonic() + READY_WITHIN_S
        while not any(record.version for record in await self.transport.workers()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the rollout worker did not get ready:\n{self._log.read_text()[-2000:]}")
            await asyncio.sleep(0.1)

    async def _announce(self) -> Any:
        from plaudit_wire.messages import PolicyVersion
        from plaudit_workers.weights.published import weights_digest

        version = PolicyVersion(await self.streams.take_over(), 0)
        digest = weights_digest(self._model)
        await self.streams.announce(Announcement(version, str(self._model), digest))
        return version

    async def run(self, about: Round) -> dict[str, Any]:
        """Seconds from before the first admission to the last publication, and the responses."""
        prompts = [self._prompt(about, number, ids) for number, ids in enumerate(about.prompt_ids())]
        total = len(prompts) * SAMPLES_PER_PROMPT
        cpu_s = cpu_seconds(self._process.pid)
        started = time.perf_counter()
        await asyncio.gather(*map(self.streams.admit, prompts))  # together, as a trainer admits those of a step
        await self._published(total)
        seconds, cpu_s = time.perf_counter() - started, cpu_seconds(self._process.pid) - cpu_s
        responses = []
        for prompt in prompts:
            group = await self.streams.read(prompt.group)
            assert group is not None
            responses += [np.frombuffer(s.body.response_ids, "<i4").tolist() for s in group.samples if s.body]
            await self.streams.close(prompt.group, "dropped", "benchmark")
        await self.transport.commands.xtrim(self.transport.names.samples, maxlen=0)
        return {"seconds": seconds, "responses": responses, "cpu_s": cpu_s}

    async def _published(self, total: int) -> None:
        while True:
            if await self.transport.commands.xlen(self.transport.names.samples) >= total:
                return
            await asyncio.sleep(0.005)

    def _prompt(self, about: Round, number: int, ids: list[int]) -> Prompt:
        return Prompt(
            group=f"t-{about.number * 1000 + number}-1.0",
            position=number,
            split="train",
            step=1,
            n=SAMPLES_PER_PROMPT,
            min_version=self._version,
            seed=about.seed(number),
            sampling=Sampling(max_tokens=about.max_tokens),
            data_source="benchmark",
            prompt="".join(SYMBOLS[token] for token in ids),
            prompt_ids=np.asarray(ids, "<i4").tobytes(),
        )

    async def close(self) -> None:
        """Stops the process the way a job does."""
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, 30)
        finally:
            self._process.kill()
        await self.transport.close()


# --- both ------------------------------------------------------------------------------------------------------------


def make_model(folder: Path) -> None:
    """The examples' tiny model with a larger vocabulary."""
    specification = importlib.util.spec_from_file_location("tiny_model", EXAMPLES / "tiny_model.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    module.save_tiny_model(folder, SYMBOLS, "{{ messages[0].content }}", max_length=MODEL_LENGTH, seed=1)


async def measure(folder: Path, quick: bool) -> list[dict[str, Any]]:
    """Both processes take turns; one row per counted round."""
    model = folder / "model"
    make_model(model)
    rows = []
    with RedisServer(folder / "redis") as server:
        bare = Bare(model, folder / "bare.log")
        worker = Worker(server, model, folder)
        try:
            await worker.connect()
            bare.wait_ready()
            for about in plan(quick):
                rows.append(await measure_round(about, bare, worker))
                print(".", end="", file=sys.stderr, flush=True)
        finally:
            bare.close()
            await worker.close()
    print(file=sys.stderr)
    return [row for row in rows if row["number"] % 10]


async def measure_round(about: Round, bare: Bare, worker: Worker) -> dict[str, Any]:
    """One turn of each, the second of the last round first."""
    if about.number % 2:
        ours = await worker.run(about)
        theirs = await asyncio.to_thread(bare.run, about)
    else:
        theirs = await asyncio.to_thread(bare.run, about)
        ours = await worker.run(about)
    tokens = sum(map(len, ours["responses"]))
    return {
        "name": about.name,
        "number": about.number,
        "samples": len(ours["responses"]),
        "tokens": tokens,
        "same_responses": ours["responses"] == theirs["responses"],
        "worker_tokens_per_s": tokens / ours["seconds"],
        "bare_tokens_per_s": sum(map(len, theirs["responses"])) / theirs["seconds"],
        "cpu_ratio": theirs["cpu_s"] / ours["cpu_s"],
    }


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds of each kind; the ratio is the median of the rounds' own ratios."""
    kinds = {}
    for name in ("long", "short"):
        mine = [row for row in rows if row["name"] == name]
        kinds[name] = {
            "samples_per_round": mine[0]["samples"],
            "tokens_per_sample": sum(row["tokens"] for row in mine) / sum(row["samples"] for row in mine),
            "bare_tokens_per_s": statistics.median(row["bare_tokens_per_s"] for row in mine),
            "worker_tokens_per_s": statistics.median(row["worker_tokens_per_s"] for row in mine),
            "ratio": statistics.median(row["worker_tokens_per_s"] / row["bare_tokens_per_s"] for row in mine),
            "cpu_ratio": statistics.median(row["cpu_ratio"] for row in mine),
            "same_responses": all(row["same_responses"] for row in mine),
        }
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "goal": GOAL,
        "ratio": kinds["long"]["ratio"],
        **kinds,
        "rounds": rows,
    }


def print_table(summary: dict[str, Any]) -> None:
    """One line per kind of round."""
    print(
        f"{'':6} {'tokens/sample':>14} {'bare tokens/s':>14} {'worker tokens/s':>16} {'ratio':>7} {'same tokens':>12}"
    )
    for name in ("long", "short"):
        kind = summary[name]
        print(
            f"{name:6} {kind['tokens_per_sample']:14.1f} {kind['bare_tokens_per_s']:14,.0f} "
            f"{kind['worker_tokens_per_s']:16,.0f} {kind['ratio']:7.3f} {kind['cpu_ratio']:10.3f} "
            f"{kind['same_responses']!s:>12}"
        )
    print(f"goal: long ≥ {GOAL}")


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="one short round of each kind")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        bare_process(arguments.bare)
        return
    with tempfile.TemporaryDirectory() as scratch:
        summary = summarise(asyncio.run(measure(Path(scratch), arguments.quick)))
    print_table(summary)
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
