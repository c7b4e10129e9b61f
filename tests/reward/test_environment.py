"""The variables that the processes of user functions get."""

import os

import pytest

from plaudit_reward.functions.function import function_environment


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "WANDB_API_KEY", "PGPASSWORD"])
def test_keys_of_the_worker_stay_with_it_unless_they_are_named(name: str) -> None:
    assert function_environment({name: "secret"}) == {}
    further = {"PLAUDIT_FUNCTION_ENVIRONMENT": f"OTHER, {name}"}
    assert function_environment({name: "secret", **further}) == {name: "secret"}


def test_variables_of_python_and_numerical_libraries_are_passed_on() -> None:
    needed = {"PATH": "/bin", "LC_ALL": "C", "PYTHONPATH": "/code", "OMP_NUM_THREADS": "1", "HF_HOME": "/models"}
    assert function_environment(needed) == needed
    assert function_environment(os.environ)["PATH"] == os.environ["PATH"]


def test_the_passwords_of_the_job_cannot_be_named() -> None:
    environment = {"PLAUDIT_FUNCTION_ENVIRONMENT": "*", "PLAUDIT_REDIS_PASSWORD": "a", "PLAUDIT_SECRET_JUDGE_KEY": "b"}
    assert function_environment(environment) == {"PLAUDIT_FUNCTION_ENVIRONMENT": "*"}
