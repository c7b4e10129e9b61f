"""Real trainers with rewards from a service that is killed in the middle: no score lost, none invented."""

from __future__ import annotations

from typing import Any

import pytest


def test_trl_trains_with_rewards_from_a_service_of_which_some_are_missing(trainer: Any) -> None:
    report = trainer.run("trl", "trl_grpo.py", kill_after=2)
    assert report["wrong"] == 0
    assert report["failed"] > 0
    assert report["scored"] + report["failed"] == 160
    assert report["steps"] == 8
    assert report["same_means"]


@pytest.mark.parametrize("way", ["function", "manager"])
def test_verl_scores_a_thousand_samples(way: str, trainer: Any) -> None:
    report = trainer.run("verl", "verl_loop.py", way, kill_after=100)
    assert report == {"scored": 950, "failed": 50, "wrong": 0, "kinds_of_columns": 1}


def test_verifiers_evaluates_an_environment_with_the_service_as_its_reward(trainer: Any) -> None:
    assert trainer.run("verifiers", "verifiers_eval.py", kill_after=20) == {"scored": 95, "failed": 5, "wrong": 0}


def test_environments_of_skyrl_gym_step_in_threads(trainer: Any) -> None:
    assert trainer.run("skyrl", "skyrl_steps.py", kill_after=40) == {"scored": 190, "failed": 10, "wrong": 0}


def test_groups_of_tinker_cookbook_are_rolled_out_by_its_own_loop(trainer: Any) -> None:
    assert trainer.run("tinker", "tinker_rollouts.py", kill_after=10) == {"scored": 188, "failed": 12, "wrong": 0}


def test_a_resources_server_of_nemo_gym_verifies_rows(trainer: Any) -> None:
    assert trainer.run("nemo-gym", "nemo_gym_verify.py", kill_after=30) == {"scored": 95, "failed": 5, "wrong": 0}


def test_groups_of_areal_are_run_by_its_own_workflows(trainer: Any) -> None:
    assert trainer.run("trl", "areal_episodes.py", kill_after=10) == {"scored": 188, "failed": 12, "wrong": 0}


def test_agent_lightnings_own_manager_asks_its_hook_for_rewards(trainer: Any) -> None:
    found = trainer.run("agentlightning", "agentlightning_rollouts.py", kill_after=30)
    assert found == {"scored": 95, "failed": 5, "wrong": 0}


def test_openrlhf_and_slime_get_their_answers_by_url_alone(trainer: Any) -> None:
    assert trainer.run("trl", "openrlhf_client.py", kill_after=30) == {"scored": 190, "failed": 10, "wrong": 0}


def test_groups_are_scored_by_the_client_of_the_open_reward_standard(trainer: Any) -> None:
    assert trainer.run("open-reward", "open_reward_groups.py", kill_after=20) == {
        "scored": 188,
        "failed": 12,
        "wrong": 0,
    }
