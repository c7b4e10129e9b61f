"""What the rollout tests share: a run's streams seen from the trainer's side, a worker on a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import episodes
from builders import job_document, make_prompt
from plaudit_job.spec.rljob import RLJob
from plaudit_wire.messages import Announcement, PolicyVersion, Prompt
from plaudit_wire.redis import RedisAddress
from plaudit_workers.rollout.agents.agent import Agent, SingleTurn
from plaudit_workers.rollout.agents.session import ChatFormats
from plaudit_workers.rollout.engine import Engine
from plaudit_workers.rollout.scripted import Constant, Script, ScriptedEngine
from plaudit_workers.rollout.worker import RolloutOptions, RolloutWorker
from plaudit_workers.stream.calls import StreamLimits
from plaudit_workers.stream.consumer import ConsumerOptions
from plaudit_workers.stream.groups import Group
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport
from plaudit_workers.weights.published import weights_digest
from tiny_policy import reference_logprobs, save_tiny_model
from waiting import until

PROMPT_IDS = [4, 5, 6, 7]
QUICK = ConsumerOptions(block_s=0.05, reclaim_every_s=0.05, renew_every_s=0.1)
"""Leases as ever, but what is late by seconds is late by fractions of one."""


class Run:
    """One run as its trainer sees it."""

    def __init__(self, transport: Transport, trainer: TrainerStreams, folder: Path) -> None:
        self.transport = transport
        self.trainer = trainer
        self.folder = folder

    @classmethod
    async def begin(cls, transport: Transport, folder: Path) -> Run:
        """Takes the run over."""
        trainer = TrainerStreams(transport, StreamLimits(max_open_groups=1000))
        await trainer.take_over()
        return cls(transport, trainer, folder)

    async def announce(
        self, number: int, content: bytes = b"weights", *, digest: str | None = None, sleep: str = ""
    ) -> PolicyVersion:
        """Writes a stand-in for weights and announces it."""
        version = PolicyVersion(self.trainer.incarnation, number)
        folder = self.folder / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(content)
        digest = weights_digest(folder) if digest is None else digest
        await self.trainer.announce(Announcement(version, str(folder), digest, sleep=sleep))
        return version

    async def announce_folder(self, folder: Path, number: int) -> PolicyVersion:
        """Announces weights that lie there."""
        version = PolicyVersion(self.trainer.incarnation, number)
        digest = weights_digest(folder)
        await self.trainer.announce(Announcement(version, str(folder), digest))
        return version

    async def admit(self, group: str, n: int = 2, **changes: object) -> Prompt:
        """Admits one prompt."""
        about: dict[str, object] = {
            "min_version": PolicyVersion(self.trainer.incarnation, 0),
            "prompt": "0123",
            "prompt_ids": np.asarray(PROMPT_IDS, "<i4").tobytes(),
            "ground_truth": "0123",
        }
        prompt = make_prompt(group, n, **{**about, **changes})
        await self.trainer.admit(prompt)
        return prompt

    async def published(self, group: str, count: int, within_s: float = 20.0) -> Group:
        """The group, once ``count`` of its samples are published."""
        found: list[Group] = []

        async def enough() -> bool:
            read = await self.trainer.read(group)
            found[:] = [read] if read is not None else []
            return read is not None and sum(sample.body is not None for sample in read.samples) >= count

        await until(enough, within_s)
        return found[0]


@pytest.fixture
def play(tokenizer: Any) -> Callable[..., Any]:
    """Runs one sample with a scripted policy; returns the prompt's ids and the published body."""
    return lambda agent, *turns, **changes: episodes.play(agent, tokenizer, *turns, **changes)


@pytest.fixture(scope="module")
def chat_formats(tokenizer: Any) -> ChatFormats:
    return ChatFormats(tokenizer, {}, "hermes")


@pytest.fixture
def make_training_job() -> Callable[..., RLJob]:
    """A job that trains; the arguments replace its sections."""

    def make(**sections: dict[str, object]) -> RLJob:
        spec: dict[str, object] = {
            "model": {"source": "/models/tiny"},
            "data": {"train": {"path": "/data/train.parquet"}},
            "algorithm": {"steps": 1},
            "rollout": {},
            "reward": {"scorers": [{"name": "a", "kind": "rule", "rule": "gsm8k"}]},
            "trainer": {},
        }
        return RLJob.model_validate(job_document(**(spec | sections)))

    return make


@pytest.fixture
async def run(transport: Transport, tmp_path: Path) -> Run:
    return await Run.begin(transport, tmp_path / "weights")


@pytest.fixture
def run_class() -> type[Run]:
    """For tests that bring their own event loop."""
    return Run


@pytest.fixture
def start_worker(address: RedisAddress, run_name: str) -> Callable[..., object]:
    """``async with start_worker(engine) as (worker, stop):`` a worker with a connection of its own."""

    @asynccontextmanager
    async def start(
        engine: Engine, *, agent: Agent | None = None, name: str = "rollout-0", **changes: object
    ) -> AsyncIterator[tuple[RolloutWorker, asyncio.Event]]:
        transport = await Transport.open(address, run_name)
        options = RolloutOptions(**{"consumer": QUICK, **changes})  # type: ignore[arg-type]
        worker = RolloutWorker(name, transport, engine, agent or SingleTurn(), options)
        stop = asyncio.Event()
        task = asyncio.create_task(worker.run(stop))
        try:
            yield worker, stop
            stop.set()
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])
            await transport.close()

    return start


@pytest.fixture
def scripted() -> Callable[..., ScriptedEngine]:
    """An engine of constant latency and length."""

    def build(latency_s: float = 0.02, tokens: int = 5) -> ScriptedEngine:
        return ScriptedEngine(Script(Constant(latency_s), Constant(tokens)))

    return build


@pytest.fixture
def probe_file() -> Callable[..., None]:
    def write(folder: Path, ids: list[int], logprobs: list[float], limit: float = 0.1) -> None:
        (folder / "probe.json").write_text(json.dumps({"ids": ids, "logprobs": logprobs, "limit": limit}))

    return write


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three versions of one model: the source, and two that a trainer could have published."""
    folder = tmp_path_factory.mktemp("models")
    return [save_tiny_model(folder / f"version-{seed}", seed) for seed in range(3)]


@pytest.fixture(scope="session")
def tied_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same with the head tied to the embedding."""
    folder = tmp_path_factory.mktemp("tied")
    return [save_tiny_model(folder / f"version-{seed}", seed, tied=True) for seed in range(2)]


@pytest.fixture(scope="session")
def reference() -> Callable[..., list[float]]:
    """Transformers' log-probabilities of a response after a prompt under a folder's weights."""
    return reference_logprobs
