"""Hundreds of judge calls in flight: ``plaudit score`` beside plain HTTP clients, against a server of its own process.

Two kinds of load in one run, each at 32, 128, 512 and 2,048 requests in flight:

- *steady*: every answer takes 0.2 s. ``plaudit score`` with one judge, with one reward model, and two plain clients
  that send the same requests and throw the answers away: aiohttp, and the ``openai`` package where it is installed.
- *faulty*: answers take 0.05-2 s; 5 % of the samples first get a 429 with ``Retry-After``, 1 % no answer at all, 1 % a
  cut connection. Every sample must be scored, and no sample may be asked twice because of its neighbours.

*wall / bound*: the bound is the time that the server's own delays need with so many requests in flight (a sample that
waits for ``Retry-After`` or for its time limit keeps its place). *CPU*: of the client's process, after its imports, a
sample. *delay*: how late the client's event loop runs a timer, the 99th percentile of one every 10 ms.

    python benchmarks/judge_load.py [--in-flight N …] [--clients NAME …] [--json FILE] [--quick]

``--quick``: 64 in flight, few samples, for tests.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

IN_FLIGHT = (32, 128, 512, 2048)
STEADY_S = 0.2
SLOWEST_S = 2.0
RETRY_AFTER_S = 1
TIME_LIMIT_S = 5
TICK_S = 0.01
COMPLETION = json.dumps(
    {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "judge",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "score: 1"}, "finish_reason": "stop"},
        ],
        "usage": {"prompt_tokens": 20, "completion_tokens": 4, "total_tokens": 24},
    }
).encode()
CLASSIFICATION = json.dumps(
    {"id": "1", "object": "list", "created": 1, "model": "m", "data": [{"index": 0, "probs": [1.0]}]}
).encode()


# --- the server ------------------------------------------------------------------------------------------------------


class Server:
    """Answers by the number in each request (``#17#``), the same in every run.

    Args:
        faulty: see the module's docstring; else every answer takes ``STEADY_S``.
    """

    def __init__(self, faulty: bool) -> None:
        self.faulty = faulty
        self.asked: Counter[int] = Counter()
        self.faults: set[int] = set()
        self.place_s = 0.0
        """Seconds for which samples keep a place, summed."""
        self.most_at_a_time = self.at_a_time = 0

    def plan(self, number: int) -> tuple[str, float]:
        """Return what the next request of a sample gets, and after how many seconds."""
        first = self.asked[number] == 0
        self.asked[number] += 1
        if not self.faulty:
            return "answer", STEADY_S
        draw = random.Random(number)
        fault, delay_s = draw.random(), draw.uniform(0.05, SLOWEST_S)
        if first and fault < 0.07:
            self.faults.add(number)
            return ("busy", delay_s) if fault < 0.05 else ("hang", TIME_LIMIT_S) if fault < 0.06 else ("cut", delay_s)
        return "answer", delay_s

    def report(self) -> dict[str, Any]:
        """Return what the server saw."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "requests": self.asked.total(),
            "innocents_asked_again": sum(
                count > 1 for number, count in self.asked.items() if number not in self.faults
            ),
            "faults": len(self.faults),
            "place_s": self.place_s,
            "most_at_a_time": self.most_at_a_time,
            "cpu_s": usage.ru_utime + usage.ru_stime,
        }


class Connection(asyncio.Protocol):
    """One connection: requests one after the other."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        """Plan an answer once a request is whole."""
        received = self._received = self._received + data
        head, end, body = received.partition(b"\r\n\r\n")
        if not end:
            return
        _, found, rest = head.lower().partition(b"content-length:")
        if len(body) < (int(rest.split(b"\r", 1)[0]) if found else 0):
            return
        self._received = b""
        if head.startswith(b"GET"):  # /health
            self._write(200, b"")
            return
        kind, delay_s = self._server.plan(int(body.split(b"#", 2)[1]))
        server = self._server
        server.place_s += delay_s + RETRY_AFTER_S * (kind == "busy")
        server.at_a_time += 1
        server.most_at_a_time = max(server.most_at_a_time, server.at_a_time)
        answer = CLASSIFICATION if b"/classify" in head else COMPLETION
        asyncio.get_running_loop().call_later(delay_s, self._end, kind, answer)

    def _end(self, kind: str, answer: bytes) -> None:
        self._server.at_a_time -= 1
        if kind == "answer":
            self._write(200, answer)
        elif kind == "busy":
            self._write(429, b"{}", f"retry-after: {RETRY_AFTER_S}\r\n")
        elif kind == "cut":
            self._transport.abort()

    def _write(self, status: int, body: bytes, headers: str = "") -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        self._transport.write(head.encode() + body)


async def serve(faulty: bool) -> None:
    """Print the port, serve until standard input ends, print the report."""
    server = Server(faulty)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: Connection(server), "127.0.0.1", 0, backlog=4096)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps(server.report()), flush=True)


# --- the clients -----------------------------------------------------------------------------------------------------


class DelayedTimers(asyncio.DefaultEventLoopPolicy):
    """Event loops that measure how late they run a timer."""

    delays_s: ClassVar[list[float]] = []

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Create a loop and start its timer."""
        loop = super().new_event_loop()

        def tick(due_s: float) -> None:
            self.delays_s.append(loop.time() - due_s)
            loop.call_later(TICK_S, tick, loop.time() + TICK_S)

        loop.call_later(TICK_S, tick, loop.time() + TICK_S)
        return loop


def run_score(given: dict[str, Any]) -> None:
    """``plaudit score``."""
    from plaudit_workers.commands.score import score

    with measured():
        score(argparse.Namespace(job=Path(given["job"]), input=Path(given["input"]), output=Path(given["output"])))


def run_aiohttp(given: dict[str, Any]) -> None:
    """A loop around aiohttp."""
    import aiohttp

    async def main() -> None:
        connector = aiohttp.TCPConnector(limit=given["in_flight"])
        async with aiohttp.ClientSession(connector=connector) as session:

            async def work(numbers: Iterator[int]) -> None:
                for number in numbers:
                    async with session.post(f"{given['url']}/v1/chat/completions", data=body(number)) as response:
                        await response.read()

            numbers = iter(range(given["samples"]))
            await asyncio.gather(*(work(numbers) for _ in range(given["in_flight"])))

    with measured():
        asyncio.run(main())


def run_openai(given: dict[str, Any]) -> None:
    """A loop around the ``openai`` package with its default settings; counts the requests that it gives up."""
    import openai

    failed = 0

    async def main() -> None:
        async with openai.AsyncOpenAI(api_key="none", base_url=f"{given['url']}/v1") as client:

            async def work(numbers: Iterator[int]) -> None:
                nonlocal failed
                for number in numbers:
                    try:
                        await client.chat.completions.create(**json.loads(body(number)))
                    except openai.APIError:
                        failed += 1

            numbers = iter(range(given["samples"]))
            await asyncio.gather(*(work(numbers) for _ in range(given["in_flight"])))

    with measured():
        asyncio.run(main())
    if failed:
        print(f"openai gave up {failed} of {given['samples']} requests", file=sys.stderr)


CLIENTS = {"judge": run_score, "model": run_score, "aiohttp": run_aiohttp, "openai": run_openai}


def texts(number: int) -> tuple[str, str]:
    """Return the prompt and the response of a sample: about 1,000 characters."""
    return f"What is #{number}# plus 2? " + "Think before you answer. " * 20, f"It is {number + 2}. " * 40


def body(number: int) -> bytes:
    """Return the request that a judge sends for a sample."""
    prompt, response = texts(number)
    content = f"Rate {response} as an answer to {prompt}"
    return json.dumps({"model": "judge", "messages": [{"role": "user", "content": content}]}).encode()


class measured:  # noqa: N801  # used like a function
    """Prints wall clock, CPU and delays of its block as JSON."""

    def __enter__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(8192, hard)), hard))
        self._before, self._began_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        wall_s, after = time.perf_counter() - self._began_s, resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = after.ru_utime - self._before.ru_utime + after.ru_stime - self._before.ru_stime
        delays_s = sorted(DelayedTimers.delays_s)
        found = {"wall_s": wall_s, "cpu_s": cpu_s, "delay_p99_s": delays_s[int(0.99 * (len(delays_s) - 1))]}
        print(json.dumps(found), flush=True)


# --- the benchmark ---------------------------------------------------------------------------------------------------

JOB = """\
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {{name: load}}
spec:
  reward:
    workers: {{maxConcurrentSamples: {in_flight}}}
    scorers:
      - {scorer}
"""
JUDGE = (
    "{{name: s, kind: judge, timeoutSeconds: {limit_s}, judge: {{baseUrl: '{url}/v1', model: judge, "
    "promptTemplate: {{path: judge.j2}}, parse: {{regex: 'score: ([0-9.]+)'}}}}}}"
)
MODEL = "{{name: s, kind: model, timeoutSeconds: {limit_s}, model: {{source: stand-in}}}}"
TEMPLATE = "Rate {{ response }} as an answer to {{ prompt }}"


def measure(client: str, in_flight: int, samples: int, *, faulty: bool = False) -> dict[str, Any]:
    """Run one client against a server of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = start("serve", {"faulty": faulty})
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        given = write_files(folder, client, in_flight, samples, url)
        environment = {**os.environ, "PLAUDIT_MODEL_SERVERS": json.dumps({"s": [url]})}
        process = start(client, given, environment)
        told = process.communicate()[0].splitlines()
        if process.returncode:
            raise SystemExit(f"{client} ended with {process.returncode}")
        seen = json.loads(server.communicate()[0].splitlines()[-1])
        output = folder / "scores.jsonl"
        outcomes = Counter(json.loads(line)["outcome"] for line in output.open()) if output.exists() else Counter()
    bound_s = max(seen["place_s"] / in_flight, SLOWEST_S if faulty else STEADY_S)
    found = json.loads(told[-1])
    return {
        "client": client,
        "in_flight": in_flight,
        "samples": samples,
        "wall_s": found["wall_s"],
        "bound_s": bound_s,
        "wall_over_bound": found["wall_s"] / bound_s,
        "cpu_ms_per_sample": 1000 * found["cpu_s"] / samples,
        "loop_delay_p99_ms": 1000 * found["delay_p99_s"],
        "outcomes": dict(outcomes),
        "server": seen,
    }


def write_files(folder: Path, client: str, in_flight: int, samples: int, url: str) -> dict[str, Any]:
    """Write the job and its samples; return what the client's process is given."""
    paths = {"job": folder / "job.yaml", "input": folder / "samples.jsonl", "output": folder / "scores.jsonl"}
    scorer = (MODEL if client == "model" else JUDGE).format(url=url, limit_s=TIME_LIMIT_S)
    paths["job"].write_text(JOB.format(in_flight=in_flight, scorer=scorer))
    (folder / "judge.j2").write_text(TEMPLATE)
    with paths["input"].open("w") as lines:
        for number in range(samples):
            prompt, response = texts(number)
            lines.write(json.dumps({"prompt": prompt, "response": response}) + "\n")
    return {"in_flight": in_flight, "samples": samples, "url": url} | {k: str(path) for k, path in paths.items()}


def start(
    role: str, given: dict[str, Any] | None = None, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start one of the processes of this benchmark."""
    command = [sys.executable, __file__, "--role", role, "--given", json.dumps(given or {})]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    print(f"\n{title}\n{'in flight':>10} {'client':10} {'samples':>8} {'wall/bound':>11} {'CPU ms':>7} {'delay ms':>9}")
    for row in rows:
        figures = f"{row['wall_over_bound']:11.2f} {row['cpu_ms_per_sample']:7.2f} {row['loop_delay_p99_ms']:9.1f}"
        print(f"{row['in_flight']:10,} {row['client']:10} {row['samples']:8,} {figures}", row["outcomes"] or "")


def main() -> None:
    """Run it and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="64 in flight, few samples")
    parser.add_argument("--in-flight", type=int, nargs="+", default=IN_FLIGHT, help="requests at a time")
    parser.add_argument(
        "--clients", nargs="+", choices=tuple(CLIENTS), default=tuple(CLIENTS), help="for the steady load"
    )
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--given", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "serve":
        asyncio.run(serve(arguments.given["faulty"]))
        return
    if arguments.role:
        asyncio.set_event_loop_policy(DelayedTimers())
        CLIENTS[arguments.role](arguments.given)
        return
    clients = [client for client in arguments.clients if client != "openai" or importlib.util.find_spec("openai")]
    steady, faulty = [], []
    for in_flight in [64] if arguments.quick else arguments.in_flight:
        for client in clients:
            # The openai package takes 20 times as long as the others where hundreds are in flight.
            rounds = 4 if client == "openai" or arguments.quick else 20 if in_flight <= 512 else 6
            steady.append(measure(client, in_flight, rounds * in_flight))
        show(f"every answer takes {STEADY_S} s", steady[-len(clients) :])
        rounds = 10 if not arguments.quick else 3
        faulty.append(measure("judge", in_flight, rounds * in_flight, faulty=True))
        show("0.05-2 s; 5 % 429, 1 % hang, 1 % cut off", faulty[-1:])
    if arguments.json:
        arguments.json.write_text(json.dumps({"steady": steady, "faulty": faulty}, indent=1))


if __name__ == "__main__":
    main()
