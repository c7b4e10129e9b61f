"""A kind of scorer or loss is named in one table and made in another; all else follows from the first.

Here each gets a new one while the test runs. What a kind of scorer has to touch: its row and its section in the
specification, its maker and the maker's entry, what scores, its page and its tests. A loss: its row, its function and
the function's entry, its page and its tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from builders import job_document
from plaudit_job.checks import without_effect
from plaudit_job.load import parse_job
from plaudit_job.problem import JobError
from plaudit_job.reference import reference
from plaudit_job.spec.algorithm import LOSS_KINDS, LossSpec, LossTraits
from plaudit_job.spec.rewards import KINDS, KindTraits
from plaudit_operator.crd import DEFINITIONS
from plaudit_reward.scorer import Attempt, Score
from plaudit_wire.records import Sample
from plaudit_workers.service.build import MAKERS, build_pipeline
from plaudit_workers.training.model.losses import LOSSES, TokenInputs, TokenLosses, choose_loss, policy_loss

JOB = job_document(
    "new",
    model={"source": "m"},
    data={"train": {"path": "t.parquet"}},
    algorithm={"steps": 1},
    rollout={},
    reward={"scorers": [{"name": "first", "kind": "length"}]},
    trainer={},
)


class LengthScorer:
    """Scores a response by its letters."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def open(self) -> None: ...

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        return Score.scored(float(len(sample.response)))

    def room(self) -> int:
        return 1

    async def close(self) -> None: ...


@pytest.fixture
def scorer_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "length", KindTraits("the letters of the response", ("cache",)))
    monkeypatch.setitem(MAKERS, "length", lambda scorer, context: LengthScorer(scorer.name))


@pytest.fixture
def loss_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSS_KINDS, "plain", LossTraits("the plain policy gradient"))
    monkeypatch.setitem(LOSSES, "plain", plain)


def plain(tokens: TokenInputs, anchor: torch.Tensor, settings: LossSpec) -> TokenLosses:
    nowhere = torch.zeros_like(tokens.logprobs, dtype=torch.bool)
    return TokenLosses(-tokens.advantages * tokens.logprobs, nowhere, nowhere)


def job_with(**algorithm: Any) -> dict[str, Any]:
    spec: dict[str, Any] = JOB["spec"]  # type: ignore[assignment]
    scorers = {"scorers": [{"name": "first", "kind": "rule"}]}
    return {**JOB, "spec": {**spec, "algorithm": {"steps": 1, **algorithm}, "reward": scorers}}


async def test_a_new_kind_of_scorer_validates_and_scores(scorer_kind: None) -> None:
    reward = parse_job(JOB).spec.reward
    pipeline = await build_pipeline(reward, "reward-0")
    try:
        scored = await pipeline.score(Sample("g", 0, "d", "p", "seven77"))
    finally:
        await pipeline.close()
    assert scored.value == 7.0


def test_a_new_kind_of_scorer_has_its_own_fields(scorer_kind: None) -> None:
    scorer = {"name": "first", "kind": "length"}
    spec: dict[str, Any] = JOB["spec"]  # type: ignore[assignment]

    def with_scorer(**fields: Any) -> dict[str, Any]:
        return {**JOB, "spec": {**spec, "reward": {"scorers": [{**scorer, **fields}]}}}

    assert parse_job(with_scorer(cache={})).spec.reward.scorers[0].cache
    with pytest.raises(JobError, match="applies to kind judge or http only, but this scorer has kind length"):
        parse_job(with_scorer(limits={"concurrency": 1}))
    with pytest.raises(JobError, match="kind length scores one sample at a time"):
        parse_job(with_scorer(scope="group"))


def test_a_kind_is_refused_until_it_is_in_the_table() -> None:
    with pytest.raises(JobError, match=r"kind: 'length' is not supported. Give 'rule', 'python',.* or 'verifier'"):
        parse_job(JOB)
    with pytest.raises(JobError, match=r"kind: 'plain' is not supported. Give 'ppo', 'gspo', .* or 'python'"):
        parse_job(job_with(loss={"kind": "plain"}))


def test_a_new_loss_validates_and_is_computed(loss_kind: None) -> None:
    settings = parse_job(job_with(loss={"kind": "plain", "correction": "none"})).spec.algorithm.loss
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    tokens = TokenInputs(
        logprobs=logprobs,
        proximal=logprobs.detach(),
        behaviour=logprobs.detach(),
        advantages=torch.tensor([1.0, -1.0, 2.0]),
        weights=torch.full((3,), 1 / 3),
        lengths=torch.tensor([2, 1]),
    )
    assert choose_loss(settings) is plain
    total = policy_loss(tokens, settings).total
    total.backward()
    assert total.item() == pytest.approx((1.0 - 2.0 + 1.0) / 3)
    torch.testing.assert_close(logprobs.grad, -tokens.advantages / 3)


def test_a_new_loss_without_a_dual_clip_says_so(loss_kind: None) -> None:
    loss = {"kind": "plain", "correction": "none", "clipRatioC": 4}
    (note,) = without_effect(parse_job(job_with(loss=loss)))
    assert str(note).startswith("spec.algorithm.loss.clipRatioC: kind plain has no dual clip: 4 changes nothing")
    assert str(note).endswith("set kind to ppo or dppo")


def test_generated_files_list_new_kinds(scorer_kind: None, loss_kind: None) -> None:
    page = reference()
    for value, meaning in (("length", "the letters of the response"), ("plain", "the plain policy gradient")):
        assert f"· `{value}` |" in page
        assert f"`{value}`: {meaning}" in page
    assert all("`length`: the letters" in str(definition()) for definition in DEFINITIONS.values())
