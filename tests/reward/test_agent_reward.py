"""Conversations as scorers see them: verl's extra_info, TRL's messages, rules, and the agent's own reward."""

from __future__ import annotations

import pytest

from plaudit_reward.functions.forms import trl_columns
from plaudit_reward.functions.function import UserFunction
from plaudit_reward.functions.result import Target
from plaudit_reward.rules.scorer import RuleScorer
from plaudit_reward.scorer import Attempt, agent_reward
from plaudit_wire.records import AgentReward, Sample
from reward_samples import make_sample

COMPLETION = [
    {"role": "assistant", "content": "I guess #### 1", "tool_calls": []},
    {"role": "tool", "content": "42"},
    {"role": "tool", "content": "43"},
    {"role": "assistant", "content": "So it is #### 42"},
]


@pytest.fixture
def conversation() -> Sample:
    return make_sample(
        "I guess #### 1 42 43 So it is #### 42",
        messages=[{"role": "user", "content": "6 * 7?"}],
        ground_truth="42",
        completion=COMPLETION,
        tool_rewards=[0.5],
        turn_rewards=[0.1, 0.2],
    )


def test_verls_functions_read_turns_and_rewards_in_extra_info(conversation: Sample, tmp_path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(solution_str, extra_info): return {'score': 1.0, 'seen': repr(extra_info)}")
    function = UserFunction(Target(str(path), "compute_score"))
    function.prepare()
    seen = function.call([conversation], None)["seen"]
    assert eval(seen) == {
        "num_turns": 4,
        "rollout_reward_scores": {},
        "turn_scores": [0.1, 0.2],
        "tool_rewards": [0.5],
    }


def test_trls_functions_read_the_whole_conversation(conversation: Sample) -> None:
    assert trl_columns([conversation])["completions"] == [COMPLETION]


async def test_rules_read_the_last_turn(conversation: Sample) -> None:
    scorer = RuleScorer("rule", "gsm8k")
    await scorer.open()
    try:
        assert (await scorer.score(conversation, Attempt(5.0))).value == 1.0
    finally:
        await scorer.close()


@pytest.mark.parametrize(
    ("reward", "outcome", "value"),
    [
        (AgentReward("scored", 0.75), "scored", 0.75),
        (AgentReward("scored", 0.0), "scored", 0.0),
        (AgentReward("infra_error", reason="the environment is gone"), "infra_error", None),
        (AgentReward("scored", float("nan")), "data_error", None),
        (None, "skipped", None),
    ],
)
async def test_an_agents_reward_is_typed_and_its_absence_is_no_zero(reward, outcome, value) -> None:
    score = agent_reward(make_sample(agent_reward=reward))
    assert (score.outcome, score.value) == (outcome, value)
