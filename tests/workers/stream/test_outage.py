"""An outage of Redis: unreachable, too slow, or refusing commands for now. Everything else is raised."""

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from plaudit_wire.redis import Outages, PassingRefusalError


async def test_a_call_is_repeated_until_it_is_answered() -> None:
    answers = iter([RedisConnectionError("gone"), TimeoutError("slow"), PassingRefusalError("READONLY"), "here"])

    async def call() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await Outages("redis://here").retry_through_outage(call) == "here"


async def test_an_error_that_is_no_outage_is_raised() -> None:
    async def call() -> str:
        raise ResponseError("WRONGTYPE")

    with pytest.raises(ResponseError):
        await Outages("redis://here").retry_through_outage(call)
