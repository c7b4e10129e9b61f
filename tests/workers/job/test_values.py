"""What fields mean as numbers and names."""

import pytest

from plaudit_job.spec.section import SecretKey
from plaudit_job.spec.transport import ManagedRedisSpec


@pytest.mark.parametrize(
    ("memory", "max_memory_bytes"),
    [
        ("1000", 600),
        ("1k", 600),
        ("4Gi", int(4 * 2**30 * 0.6)),
        ("1.5Mi", int(1.5 * 2**20 * 0.6)),
        ("2G", 1_200_000_000),
    ],
)
def test_redis_may_use_60_percent_of_its_memory(memory: str, max_memory_bytes: int) -> None:
    assert ManagedRedisSpec(memory=memory).max_memory_bytes == max_memory_bytes


@pytest.mark.parametrize(
    ("name", "key", "variable"),
    [
        ("judge", "token", "PLAUDIT_SECRET_JUDGE_TOKEN"),
        ("my-redis.v2", "pass_word", "PLAUDIT_SECRET_MY_REDIS_V2_PASS_WORD"),
    ],
)
def test_a_secret_is_an_environment_variable_under_plaudit_run(name: str, key: str, variable: str) -> None:
    assert SecretKey(name=name, key=key).variable == variable
