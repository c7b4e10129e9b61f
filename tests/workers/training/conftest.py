"""A tiny Qwen2 with its tokenizer on disk, jobs that name it, groups made to measure."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from builders import job_document, make_body, make_prompt
from plaudit_job.spec.rljob import RLJob
from plaudit_wire.messages import Prompt
from plaudit_wire.records import ScorerRecord, ScoringRecord, Stamps
from plaudit_workers.stream.groups import Group, GroupSample
from tiny_policy import make_tiny_policy

SYMBOLS = [str(digit) for digit in range(10)] + ["=", "u", "a", "<pad>", "<eos>", "<unk>"]

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 layers x 32, vocabulary 16, random weights, a tokenizer of one symbol a token."""
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = make_tiny_policy(
        SYMBOLS,
        7,
        hidden_size=32,
        intermediate_size=64,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    model.save_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


JobMaker = Callable[[dict[str, Any]], RLJob]


@pytest.fixture
def make_job(model_folder: Path) -> JobMaker:
    """A job on the tiny model; the argument is merged over its spec (camelCase)."""

    def make(spec: dict[str, Any]) -> RLJob:
        base = {
            "model": {"source": str(model_folder), "dtype": "float32"},
            "data": {"train": {"path": "train.parquet"}},
            "algorithm": {"steps": 4, "promptsPerStep": 4, "samplesPerPrompt": 4, "optimizer": {"learningRate": 1e-3}},
            "rollout": {"sampling": {"maxTokens": 8}},
            "reward": {"scorers": [{"name": "mine", "kind": "python", "python": {"path": "r.py", "function": "f"}}]},
            "trainer": {"microBatchTokens": 64},
        }
        return RLJob.model_validate(job_document(**_merged(base, spec)))

    return make


def _sample(
    prompt: Prompt, index: int, ids: Sequence[int], rng: np.random.Generator, score: float | None
) -> GroupSample:
    length = len(ids)
    logprobs = (-rng.random(length) * 2 - 1).astype("<f4")
    body = make_body(prompt, index, "".join(SYMBOLS[i] for i in ids), ids, logprobs=logprobs.tobytes())
    scoring = (
        ScoringRecord("timeout", reason="too slow")
        if score is None
        else ScoringRecord("scored", score, scorers={"mine": ScorerRecord("scored", score, call_s=0.1)})
    )
    return GroupSample(index, Stamps(1.0, 1.1, 1.5, None, 1.6, 1.7), body, "digest", scoring)


GroupMaker = Callable[..., list[Group]]


@pytest.fixture
def make_groups() -> GroupMaker:
    """Groups of random responses; ``scores[g][i]`` is sample i's score, None where it has none."""

    def make(scores: Sequence[Sequence[float | None]], seed: int = 0, longest: int = 9) -> list[Group]:
        rng = np.random.default_rng(seed)
        groups = []
        for number, own in enumerate(scores):
            name = f"t-{number}-1.0"
            prompt_ids = rng.integers(0, 13, int(rng.integers(3, 7))).astype("<i4")
            prompt = make_prompt(
                name,
                len(own),
                position=number,
                seed=number,
                prompt="12=",
                prompt_ids=prompt_ids.tobytes(),
                ground_truth="12",
            )
            samples = [
                _sample(prompt, index, rng.integers(0, 16, int(rng.integers(1, longest + 1))), rng, score)
                for index, score in enumerate(own)
            ]
            groups.append(Group(name, "ready", prompt, samples, 1, 1.0, 1.8, 1.9))
        return groups

    return make


@pytest.fixture
def small_files_only() -> Callable[[int], AbstractContextManager[None]]:
    """A block in which no file of this process may grow past so many bytes: a disk that is full, for its writer."""

    @contextmanager
    def limited(num_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited
