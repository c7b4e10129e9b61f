"""A run with every verdict and outcome in it, the real service over it, and a real Chromium, once a session.

Chromium is driven over its own DevTools protocol: no driver to install beside it, and every request and every line of
its console can be seen.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from websockets.sync.client import ClientConnection, connect

from event_entries import encode_event
from plaudit_metrics.service.serve import serve
from plaudit_metrics.service.settings import ServiceSettings
from plaudit_metrics.sources.stream import EventRecord
from plaudit_metrics.statistics.steps import step_record
from plaudit_wire.names import CONSUMER_GROUPS, Names
from plaudit_wire.records import (
    LIVE_WITHIN_S,
    GroupRecord,
    SampleRecord,
    ScorerRecord,
    StepRecord,
    WaitRecord,
    WorkerRecord,
)
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.redis import RedisServer, free_port
from stage_records import build_group, build_sample
from stored_conversations import write_conversations

OPENED = 1_780_000_000.0
RUN = "digits-page"
GROUPS, SIZE = 6, 4
SHAPES: dict[str, dict[str, float]] = {
    "generation": {"generation": 8.0, "score": 1.2},
    "reward": {"generation": 2.0, "score": 7.0},
    "reward-queue": {"generation": 2.0, "sample_queue": 6.0, "score": 1.0},
    "limiter": {"generation": 2.0, "limiter": 6.0, "score": 1.0},
    "group-scorer": {"generation": 2.0, "score": 1.0, "group_scorer": 6.0},
    "straggler": {"generation": 1.5, "score": 1.0, "straggler": 9.0},
    "trainer": {"generation": 0.6, "score": 0.3, "update": 14.0},
    "balanced": {"generation": 4.0, "score": 3.8},
}
"""Seconds in the stages of a step that has this verdict."""
ORDER = (*SHAPES, "generation", "generation", "balanced", "reward", "limiter", "reward", "reward-queue", "reward")
FAILURES = ("data_error", "infra_error", "timeout", "skipped", "poison", "given_up")
MARKUP = "<img src=x onerror=\"document.title='broken out'\"><script>document.title='broken out'</script>"


KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "Home": 36, "End": 35, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}
AXE = Path(str(distribution("axe-core-python").locate_file("axe_core_python/axe.min.js")))


class RunBuilder:
    """Makes the records of one step after the other."""

    def __init__(self) -> None:
        self._random = random.Random(7)
        self._now = OPENED
        self._failures = itertools.cycle(FAILURES)
        self.steps: list[tuple[StepRecord, list[SampleRecord], list[GroupRecord]]] = []

    def add(self, verdict: str) -> list[EventRecord]:
        """One more step with this verdict; returns its events."""
        number, shape = len(self.steps) + 1, SHAPES[verdict]
        samples, groups = [], []
        for each in range(GROUPS):
            of_group = [self._draw(number, each, index, shape) for index in range(SIZE)]
            samples += of_group
            groups.append(
                build_group(
                    of_group, group_scorer=shape.get("group_scorer", 0.0), ready_queue=0.2, reason=MARKUP, step=number
                )
            )
        waited_until = max(group.ready or 0.0 for group in groups)
        closed = waited_until + shape.get("update", 2.0 + self._random.random())
        record = step_record(
            number,
            1,
            samples,
            groups=groups,
            waits=[WaitRecord(self._now, waited_until, [group.group for group in groups])],
            opened=self._now,
            closed=closed,
            update_s=closed - waited_until,
            trainer_version=number,
        )
        assert record.verdict == verdict, f"step {number} was to be {verdict} and is {record.verdict}"
        self._now = closed
        self.steps.append((record, samples, groups))
        return [*samples, *groups, record]

    def _draw(self, step: int, group: int, index: int, shape: dict[str, float]) -> SampleRecord:
        def about(seconds: float) -> float:
            return seconds * self._random.uniform(0.85, 1.05)

        stages = {name: about(seconds) for name, seconds in shape.items() if name in SAMPLE_SECONDS}
        if group == GROUPS - 1 and index == 0:
            stages["score"] += shape.get("straggler", 0.0)
        fails = self._random.random() < 0.05 + 0.02 * (step % 3)
        outcome = next(self._failures) if fails else "scored"
        value = min(1.0, max(0.0, 0.25 + 0.03 * step + self._random.gauss(0, 0.15)))
        judge = ScorerRecord(
            outcome,
            None if fails else value,
            f"said {MARKUP}",
            limiter_s=stages.get("limiter", 0.0),
            retry_s=0.3 if fails else 0.0,
            call_s=stages["score"] * 0.9,
            attempts=3 if fails else 1,
        )
        scorers = {"judge": judge, "exact-match": ScorerRecord("scored", float(value > 0.5), call_s=0.004)}
        made: SampleRecord = build_sample(
            f"t-{(step - 1) * GROUPS + group}-1.0",
            index,
            admitted=self._now,
            rollout_queue=0.05,
            engine_queue=about(0.2),
            tools=about(0.15),
            commit=0.02,
            retry=0.3 if fails else 0.0,
            redelivery=0.8 if outcome == "poison" else 0.0,
            outcome=outcome,
            value=value,
            version=max(step - 1 - self._random.choice((0, 0, 1, 2)), 0),
            step=step,
            scorers=scorers,
            **stages,
        )
        assert made.generation is not None
        place = (group * SIZE + index) % 4
        return msgspec.structs.replace(
            made,
            scoring=msgspec.structs.replace(
                made.scoring, worker=f"reward-{place % 3}", reason=MARKUP if fails else None
            ),
            generation=msgspec.structs.replace(made.generation, worker=f"rollout-{place % 2}"),
        )


SAMPLE_SECONDS = {"generation", "sample_queue", "limiter", "score"}


@pytest.fixture(scope="session")
def built_run() -> RunBuilder:
    """Steps with every verdict and outcome, as records."""
    builder = RunBuilder()
    for verdict in ORDER:
        builder.add(verdict)
    return builder


@dataclass
class Site:
    """The service over a run in Redis."""

    url: str
    redis: Redis
    keys: Names
    builder: RunBuilder
    stop: Callable[[], None]

    def publish(self, records: Sequence[EventRecord]) -> None:
        """Sends events."""
        for record in records:
            self.redis.xadd(self.keys.events, encode_event(record))

    def queue(self, stream: str, count: int) -> None:
        """Puts work into a stream, of which one entry is taken."""
        for _ in range(count):
            self.redis.xadd(self.keys.stream(stream), {b"id": b"x"})
        self.redis.xreadgroup(CONSUMER_GROUPS[stream], "worker", {self.keys.stream(stream): ">"}, count=1)


def open_site(redis_server: RedisServer, run: str, builder: RunBuilder, folder: Path | None = None) -> Site:
    """Starts a service in a thread of its own."""
    redis = Redis.from_url(redis_server.url, password=redis_server.password, protocol=2)
    keys = Names(run)
    for stream, group in CONSUMER_GROUPS.items():
        redis.xgroup_create(keys.stream(stream), group, mkstream=True)
    workers = (
        *(WorkerRecord(f"rollout-{n}", "rollout", 8, 6 - 6 * n, version="1.16") for n in range(2)),
        *(WorkerRecord(f"reward-{n}", "reward", 16, 12 - 5 * n, ready=n < 2) for n in range(3)),
        WorkerRecord("trainer-0", "trainer", 1, 1),
    )
    heard = time.time()
    for worker in workers:
        redis.hset(keys.worker_records, worker.worker, msgspec.msgpack.encode(worker))
        redis.zadd(keys.workers, {worker.worker: heard})
    port = free_port()
    settings = ServiceSettings(run, RedisAddress(redis_server.url, redis_server.password), port=port, run_folder=folder)
    loop, stopping = asyncio.new_event_loop(), asyncio.Event()

    async def beat() -> None:
        while True:
            await asyncio.sleep(LIVE_WITHIN_S / 4)
            with contextlib.suppress(RedisConnectionError):  # some tests stop Redis
                redis.zadd(keys.workers, {worker.worker: time.time() for worker in workers}, xx=True)

    async def serve_workers() -> None:
        beating = asyncio.create_task(beat())
        await serve(settings, stopping)
        beating.cancel()

    def run_service() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve_workers())
        loop.close()

    thread = threading.Thread(target=run_service)
    thread.start()

    def stop() -> None:
        if thread.is_alive():
            loop.call_soon_threadsafe(stopping.set)
            thread.join(20)
        redis.close()

    site = Site(f"http://127.0.0.1:{port}/", redis, keys, builder, stop)
    site.publish([event for record, samples, groups in builder.steps for event in (*samples, *groups, record)])
    return site


@pytest.fixture
def make_site(redis_server: RedisServer, run_name: str) -> Iterator[Callable[..., Site]]:
    """``make_site(["reward", …])``: a service of this test's own, over steps with these verdicts."""
    opened: list[Site] = []

    def make(verdicts: Sequence[str], folder: Path | None = None, redis: RedisServer = redis_server) -> Site:
        builder = RunBuilder()
        for verdict in verdicts:
            builder.add(verdict)
        opened.append(open_site(redis, run_name, builder, folder))
        return opened[-1]

    yield make
    for each in opened:
        each.stop()


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with stored conversations of six steps."""
    return write_conversations(tmp_path_factory.mktemp("runs") / RUN)


@pytest.fixture(scope="session")
def site(redis_server: RedisServer, built_run: RunBuilder, conversations: Path) -> Iterator[Site]:
    """The service over the built run; tests only read from it."""
    opened = open_site(redis_server, RUN, built_run, conversations)
    opened.queue("samples", 9)
    opened.queue("prompts", 3)
    yield opened
    opened.stop()


@dataclass
class Tab:
    """One tab of the browser."""

    connection: ClientConnection
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of the console, exceptions, and what the content security policy refused."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the DevTools protocol."""
        number = next(self._numbers)
        self.connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.connection.recv(timeout=120))
            if message.get("id") == number:
                if "navigated" in message.get("error", {}).get("message", ""):  # the page before: ask the next one
                    return self.send(method, **parameters)
                assert "error" not in message, (method, message["error"])
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        about = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif message.get("method") == "Runtime.consoleAPICalled" and about["type"] in {"error", "warning", "assert"}:
            self.complaints.append(str(about["args"]))
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and about["entry"]["level"] in {"error", "warning"}:
            self.complaints.append(about["entry"]["text"] + " " + about["entry"].get("url", ""))

    def hosts(self) -> set[str]:
        """Whom the page has asked for something."""
        return {urlsplit(url).netloc for url in self.requests if urlsplit(url).scheme != "data"}

    def look_like(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """Sets the size of the screen and what the system prefers."""
        phone = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Goes to an address."""
        self.send("Page.navigate", url=url)

    def go(self, url: str) -> None:
        """Shows a view anew, as a user finds it who has pointed at nothing; loads only a page that is not loaded."""
        self.complaints.clear()
        self.look_like(1280, 900)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)
        page, _, view = url.partition("#")
        if self.ask("location.href.split('#')[0]") == page:
            change = f"location.hash = {view!r}"
            self.ask(
                "document.getElementById('content').replaceChildren();"
                f"location.hash === {'#' + view!r} ? dispatchEvent(new HashChangeEvent('hashchange')) : {change}"
            )
        else:
            self.open(url)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise's when it is kept."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition: str, within_s: float = 120.0) -> None:
        """Waits for a JavaScript condition."""
        deadline = time.monotonic() + within_s
        while not self.ask(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never: {condition}; {self.complaints}"
            time.sleep(0.03)

    def text(self, selector: str) -> str:
        """What stands in the first element of a selector."""
        return str(self.ask(f"document.querySelector({json.dumps(selector)}).innerText"))

    def point(self, selector: str, across: float = 0.5, down: float = 0.5, *, click: bool = False) -> None:
        """Moves the mouse to a place inside an element, given in shares of its size."""
        quoted = json.dumps(selector)
        self.ask(f"document.querySelector({quoted}).scrollIntoView({{block: 'center'}})")
        box = self.ask(f"document.querySelector({quoted}).getBoundingClientRect().toJSON()")
        place = {"x": box["left"] + across * box["width"], "y": box["top"] + down * box["height"]}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **place)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def press(self, key: str) -> None:
        """Presses a key."""
        about: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        if key == "Enter":
            about["text"] = "\r"
        self.send("Input.dispatchKeyEvent", type="keyDown" if key == "Enter" else "rawKeyDown", **about)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def axe(self) -> list[str]:
        """What axe-core finds wrong: WCAG 2.1, A and AA, and best practices."""
        self.ask(AXE.read_text() + "; 0")
        found = self.ask("axe.run(document, {resultTypes: ['violations']}).then(({violations}) => violations)")
        return [f"{each['id']}: {node['html']} {node['failureSummary']}" for each in found for node in each["nodes"]]

    def picture(self, height: int) -> bytes:
        """A PNG of the page from its top."""
        width = self.ask("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a headless Chromium listens for the DevTools protocol."""
    program = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if program is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium; make test does that where it may)")
    profile = tmp_path_factory.mktemp("chromium")
    arguments = [
        "--headless=new",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ]
    if os.geteuid() == 0:
        arguments += ["--no-sandbox", "--disable-dev-shm-usage"]
    process = subprocess.Popen(
        [program, *arguments, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{listening(profile / 'DevToolsActivePort', process)}"
    finally:
        process.terminate()
        process.wait(20)


def listening(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text().strip()):
        assert process.poll() is None, "Chromium ended at once"
        assert time.monotonic() < deadline, "Chromium does not listen"
        time.sleep(0.05)
    return int(file.read_text().split()[0])


@contextlib.contextmanager
def opened_tab(chromium: str) -> Iterator[Tab]:
    """A new tab, 1280 pixels wide and light."""
    request = urllib.request.Request(f"{chromium}/json/new?about:blank", method="PUT")
    with urllib.request.urlopen(request) as answer:
        target = json.load(answer)
    with connect(target["webSocketDebuggerUrl"], max_size=None, ping_interval=None) as connection:  # it may lie idle
        opened = Tab(connection)
        for domain in ("Page", "Runtime", "Network", "Log"):
            opened.send(f"{domain}.enable")
        opened.look_like(1280, 900)
        opened.send("Network.setCacheDisabled", cacheDisabled=True)
        yield opened
        opened.send("Page.close")


@pytest.fixture
def tab(chromium: str) -> Iterator[Tab]:
    """A tab of this test's own."""
    with opened_tab(chromium) as opened:
        yield opened


@pytest.fixture(scope="module")
def kept_tab(chromium: str) -> Iterator[Tab]:
    """A tab for all tests that look at one page: each shows its view with ``go``, and the first loads the page."""
    with opened_tab(chromium) as opened:
        yield opened
