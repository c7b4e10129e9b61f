"""Build the engine and the agent of a job. Called by ``worker``; an engine's packages are imported only if chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.process import RefusedError
from plaudit_workers.rollout.agents.agent import Agent
from plaudit_workers.rollout.agents.custom import load_agent
from plaudit_workers.rollout.agents.single_turn import SingleTurn
from plaudit_workers.rollout.engines.protocol import Engine


def _vllm(job: RLJob) -> Engine:
    from plaudit_workers.rollout.engines.vllm_engine import VllmEngine

    return VllmEngine.from_job(job)


def _scripted(job: RLJob) -> Engine:
    from plaudit_workers.rollout.engines.script import Script
    from plaudit_workers.rollout.engines.scripted import ScriptedEngine

    rollout = job.spec.rollout
    script = Script.from_arguments(rollout.engine.arguments)
    return ScriptedEngine(script, max_concurrent_samples=rollout.engine.max_concurrent_samples)


ENGINES: dict[str, Callable[[RLJob], Engine]] = {"vllm": _vllm, "scripted": _scripted}


def _custom(job: RLJob) -> Agent:
    agent = job.spec.rollout.agent
    return load_agent(Path(agent.path), agent.class_name)


AGENTS: dict[str, Callable[[RLJob], Agent]] = {"singleTurn": lambda _: SingleTurn(), "custom": _custom}


def build_engine(job: RLJob) -> Engine:
    """Build the engine of ``spec.rollout.engine``; it is not started."""
    return ENGINES[job.spec.rollout.engine.kind](job)


def build_agent(job: RLJob) -> Agent:
    """Build the agent of ``spec.rollout.agent``.

    Raises:
        RefusedError: an unsupported kind, or a class that cannot be loaded.
    """
    kind = job.spec.rollout.agent.kind
    if kind not in AGENTS:
        raise RefusedError(f"spec.rollout.agent.kind: {kind!r} is not available yet; use {' or '.join(AGENTS)}")
    return AGENTS[kind](job)
