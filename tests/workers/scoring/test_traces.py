"""User functions and reward models get the trace of the sample that they score."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from plaudit_wire.logs import sample_ids, traceparent
from plaudit_wire.records import Sample
from plaudit_workers.service.build import BuildContext, build_pipeline

RUN = "demo"
Make = Callable[..., Any]
READS = """\
import {pause}, os, time
from opentelemetry import trace
from plaudit_reward.functions.result import current_traceparent

{define} compute_score(data_source, solution_str, ground_truth, extra_info=None):
    {wait}
    context = trace.get_current_span().get_span_context()
    return {{
        "score": 1.0,
        "current": current_traceparent(),
        "environment": os.environ.get("TRACEPARENT", ""),
        "trace": f"{{context.trace_id:032x}}",
        "kept": str(context.trace_flags.sampled),
    }}
"""
FORMS = {
    "process": READS.format(define="def", pause="time", wait="time.sleep(0.01)"),
    "thread": READS.format(define="def", pause="time", wait="time.sleep(0.01)"),
    "inline": READS.format(define="async def", pause="asyncio", wait="await asyncio.sleep(0.01)"),
}


def sample(index: int) -> Sample:
    return Sample("t-0-1.0", index, "digits", "2 + 2?", "4")


async def read(reward: Any, share: float | None) -> list[Mapping[str, float | str]]:
    """What the function read for each of eight samples that are scored together."""
    pipeline = await build_pipeline(reward, "reward-0", BuildContext(reward, "reward-0", run=RUN, traced_share=share))
    try:
        results = await asyncio.gather(*(pipeline.score(sample(index)) for index in range(8)))
    finally:
        await pipeline.close()
    return [result.scorers["mine"].extra for result in results]


@pytest.fixture
def reward(make_reward: Make) -> Callable[[str], Any]:
    """A job's section with a function that returns what it reads."""

    def make(isolation: str) -> Any:
        scorer = {"name": "mine", "function": "compute_score", "isolation": isolation}
        return make_reward([scorer], FORMS[isolation])

    return make


@pytest.mark.parametrize("isolation", FORMS)
async def test_a_function_reads_the_trace_of_its_own_sample(reward: Callable[[str], Any], isolation: str) -> None:
    for index, extra in enumerate(await read(reward(isolation), 1.0)):
        wanted = traceparent(RUN, sample(index).group, index)
        assert extra["current"] == wanted
        assert extra["environment"] == (wanted if isolation == "process" else "")
        assert extra["trace"] == f"{sample_ids(RUN, sample(index).group, index)[0]:032x}"
        assert extra["kept"] == "True"


async def test_spans_of_a_function_are_kept_only_for_the_traced_share(reward: Callable[[str], Any]) -> None:
    assert {extra["kept"] for extra in await read(reward("inline"), 0.0)} == {"False"}


@pytest.mark.parametrize("isolation", FORMS)
async def test_a_function_reads_nothing_where_nothing_is_traced(reward: Callable[[str], Any], isolation: str) -> None:
    for extra in await read(reward(isolation), None):
        assert (extra["current"], extra["environment"], extra["trace"]) == ("", "", "0" * 32)


class RewardModel(BaseHTTPRequestHandler):
    """Is healthy, gives each response 1.5, and keeps the headers of the requests."""

    seen: ClassVar[list[Message]] = []

    def do_GET(self) -> None:
        self._respond(b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append(self.headers)
        self._respond(b'{"data": [{"probs": [1.5]}]}')

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _respond(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


async def test_a_reward_model_receives_the_trace_of_its_sample(make_reward: Make) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), RewardModel)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    reward = make_reward([{"name": "rm", "kind": "model", "model": {"source": "/model"}}])
    servers = {"rm": [f"http://127.0.0.1:{server.server_port}"]}
    context = BuildContext(reward, "reward-0", run=RUN, model_servers=servers)
    try:
        for share in (1.0, None):
            pipeline = await build_pipeline(reward, "reward-0", replace(context, traced_share=share))
            assert (await pipeline.score(sample(3))).value == 1.5
            await pipeline.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    traced, untraced = RewardModel.seen
    assert traced["traceparent"] == traceparent(RUN, "t-0-1.0", 3)
    assert untraced["traceparent"] is None
