"""Sequences/s of a reward model on texts of mixed lengths: Plaudit's server, vLLM's pooling server, a plain loop.

Four ways to the same logits, in one run, on the same texts, each with one thread for the model:

- *loop, one by one*: ``model(**tokenizer(text))`` in a loop.
- *loop, batches*: what a trainer script does: batches of 32 as they come, padded to their longest, with a mask.
- *model_server* and *vllm*: as a job starts them (``launch.served_models``), asked over HTTP with one text a request,
  64 requests at a time, as reward workers ask. HTTP, JSON and tokenising are in it.

The ways take turns, so that all see the same machine, the servers in 45 rounds and the slow loops in every fifth of
them; a way's figure is the median of its rounds, and how it compares to another the median of the rounds' ratios (a
single one may be off by a fifth on a busy machine). The logits of all are compared. Lengths are log-normal, most texts
short and few long, as answers are. The model is tiny (2 layers, 128 wide): a forward pass of one short text is mostly
overhead, which batching shares; of a large model on a CPU it is mostly arithmetic, which only padding can waste.

Usage: ``python benchmarks/reward_model.py [--json FILE] [--quick]`` (``--quick``: few texts, and no vLLM)
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import platform
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from plaudit_job.processes import server_command, server_environment
from plaudit_job.spec.rewards import RewardModelSpec
from plaudit_workers.launch.redis import free_port

ONE_BY_ONE = "loop, one by one"
LOOP_GOAL, VLLM_GOAL = 3.0, 1.0
MAX_LENGTH = 1024
LOOP_BATCH = 32
IN_FLIGHT = 64
SAME = 1e-4
EXAMPLES = Path(__file__).parents[1] / "examples"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def mixed_texts(count: int, seed: int) -> list[str]:
    """Texts of 4 to ``MAX_LENGTH`` characters, which are tokens: median 55, mean 90 or so."""
    draw = random.Random(seed)
    lengths = [min(MAX_LENGTH, max(4, round(draw.lognormvariate(4.0, 1.0)))) for _ in range(count)]
    return ["".join(draw.choices(string.ascii_letters + " ", k=length)) for length in lengths]


def save_model(folder: Path) -> None:
    """The tiny classifier that everybody serves."""
    spec = importlib.util.spec_from_file_location("tiny_model", EXAMPLES / "tiny_model.py")
    assert spec is not None
    assert spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    model, tokenizer = tiny.make_tiny_classifier(string.printable, TEMPLATE, max_length=MAX_LENGTH, seed=1)
    model.score.weight.data.mul_(30)  # logits of order 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- plain loops -----------------------------------------------------------------------------------------------------


def loop_process(folder: str) -> None:
    """Saves the model, reads ``[batch, texts]`` from standard input, answers ``[seconds, logits]``, one JSON a line."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(1)
    save_model(Path(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    print("ready", flush=True)
    for line in sys.stdin:
        batch, texts = json.loads(line)
        logits: list[float] = []
        started = time.perf_counter()
        with torch.inference_mode():
            for first in range(0, len(texts), batch):
                inputs = tokenizer(texts[first : first + batch], padding=batch > 1, return_tensors="pt")
                logits += model(**inputs).logits[:, 0].tolist()
        print(json.dumps([time.perf_counter() - started, logits]), flush=True)


class Loops:
    """The process of ``loop_process``."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--loop", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def wait_ready(self) -> None:
        """Returns when the model is saved and loaded."""
        if self._line() != "ready\n":
            raise SystemExit("the plain loop did not start")

    def run(self, batch: int, texts: list[str]) -> tuple[float, list[float]]:
        """Seconds and logits."""
        assert self._process.stdin is not None
        print(json.dumps([batch, texts]), file=self._process.stdin, flush=True)
        seconds, logits = json.loads(self._line())
        return seconds, logits

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


# --- servers ---------------------------------------------------------------------------------------------------------


class Server:
    """A reward model server as a job has it, on one thread."""

    def __init__(self, engine: str, folder: Path, log: Path) -> None:
        model = RewardModelSpec.model_validate({"source": str(folder), "engine": engine, "dtype": "float32"})
        self._port = port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **server_environment(model, with_gpu=False)}
        command = [sys.executable, *server_command(model, "tiny", "127.0.0.1", port, with_gpu=False)]
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def wait_ready(self) -> None:
        """Returns when its health is good."""
        while self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        raise SystemExit(f"the server did not start:\n{self._log.read_text()[-2000:]}")

    def run(self, texts: list[str]) -> tuple[float, list[float]]:
        """Seconds and logits of one request a text."""
        return asyncio.run(self._run(texts))

    async def _run(self, texts: list[str]) -> tuple[float, list[float]]:
        logits = [math.nan] * len(texts)
        left = iter(enumerate(texts))
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(self._connection(left, logits))
        return time.perf_counter() - started, logits

    async def _connection(self, left: Iterator[tuple[int, str]], logits: list[float]) -> None:
        """Asks on one connection, one text after the other: plain HTTP/1.1, since a client costs CPU too."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        for number, text in left:
            body = json.dumps({"input": text, "use_activation": False}).encode()
            head = "POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(answer.partition(b"content-length:")[2].split(b"\r\n")[0])
            logits[number] = json.loads(await reader.readexactly(length))["data"][0]["probs"][0]
        writer.close()
        await writer.wait_closed()

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait()


# --- the comparison --------------------------------------------------------------------------------------------------


@dataclass
class Way:
    """One way to the logits."""

    name: str
    run: Callable[[list[str]], tuple[float, list[float]]]
    every: int = 1
    """It takes part in every so many rounds."""
    rates: dict[int, float] = field(default_factory=dict)
    """Texts a second, by round."""
    apart: float = 0.0
    """Largest difference from the loop that takes one text at a time."""


def compare(ways: list[Way], rounds: int, count: int) -> None:
    """Rounds of all ways in turn; the first round warms up and is not counted."""
    for number in range(rounds + 1):
        texts = mixed_texts(count, seed=number)
        found: dict[str, list[float]] = {}
        for way in ways if number % 2 else reversed(ways):
            if number % way.every == 0:
                seconds, found[way.name] = way.run(texts)
                if number:
                    way.rates[number] = count / seconds
        expected = found.get(ONE_BY_ONE)
        for way in ways:
            if expected and way.name in found:
                way.apart = max(way.apart, *(abs(a - b) for a, b in zip(found[way.name], expected, strict=True)))


def measure(quick: bool) -> dict[str, Any]:
    """Starts all, compares, ends all."""
    rounds, every, count = (1, 1, 64) if quick else (45, 5, 384)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        loops = Loops(folder)
        loops.wait_ready()
        servers = {
            engine: Server(engine, folder, Path(name, f"{engine}.log"))
            for engine in (["plaudit"] if quick else ["plaudit", "vllm"])
        }
        try:
            for server in servers.values():
                server.wait_ready()
            ways = [
                Way(ONE_BY_ONE, lambda texts: loops.run(1, texts), every),
                Way("loop, batches", lambda texts: loops.run(LOOP_BATCH, texts), every),
                *(
                    Way("model_server" if engine == "plaudit" else engine, server.run)
                    for engine, server in servers.items()
                ),
            ]
            compare(ways, rounds, count)
        finally:
            for one in (loops, *servers.values()):
                one.close()
    return report(ways, count)


def report(ways: list[Way], count: int) -> dict[str, Any]:
    """The figures, and whether they reach the goals."""
    rates = {way.name: way.rates for way in ways}
    own = rates["model_server"]
    times = {
        name: statistics.median(own[number] / other for number, other in others.items())
        for name, others in rates.items()
    }
    lengths = sorted(len(text) for text in mixed_texts(count, seed=1))
    return {
        "sequences_per_s": {name: statistics.median(of_rounds.values()) for name, of_rounds in rates.items()},
        "rates": rates,
        "logits_apart": {way.name: way.apart for way in ways},
        "tokens": {"mean": sum(lengths) / count, "median": lengths[count // 2], "longest": lengths[-1]},
        "times": times,
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
    }


def main() -> int:
    """Prints the table, and goals that are missed; exit code 1 when logits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="few texts, no vLLM, no goals")
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.loop:
        loop_process(arguments.loop)
        return 0
    found = measure(arguments.quick)
    tokens, times = found["tokens"], found["times"]
    print(f"tokens of a text: median {tokens['median']}, mean {tokens['mean']:.0f}, longest {tokens['longest']}")
    print(f"{'':<18}{'sequences/s':>12}{'model_server is':>18}{'logits apart':>14}")
    for name, rate in found["sequences_per_s"].items():
        print(f"{name:<18}{rate:>12.0f}{times[name]:>16.2f} x{found['logits_apart'][name]:>14.1e}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    if max(found["logits_apart"].values()) > SAME:
        print(f"logits differ by more than {SAME}")
        return 1
    if not arguments.quick and (times["loop, batches"] < LOOP_GOAL or times["vllm"] < VLLM_GOAL):
        print(f"goal missed: {LOOP_GOAL} x the loop of batches, {VLLM_GOAL} x vLLM")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
