"""Exceptions of user functions: a broken service is told from a broken sample by their type."""

from __future__ import annotations

import socket
import urllib.error
from email.message import Message

import httpx
import pytest
import redis

from plaudit_reward.functions.function import failed_score, is_infrastructure
from plaudit_wire.errors import InfrastructureError


class _StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status_code = status


def _like(module: str, name: str) -> Exception:
    """An exception of a library that need not be installed."""
    kind = type(name, (Exception,), {"__module__": module})
    derived = type("Derived", (kind,), {"__module__": "users_own"})
    return derived("away")  # type: ignore[no-any-return]


SERVICE = [
    ConnectionRefusedError("refused"),
    TimeoutError(),
    MemoryError(),
    InfrastructureError("away"),
    httpx.ConnectError("refused"),
    httpx.ReadTimeout("slow"),
    redis.ConnectionError("gone"),
    _StatusError(500),
    _StatusError(503),
    _StatusError(429),
    urllib.error.URLError(ConnectionRefusedError("refused")),
    socket.gaierror(-3, "no such name"),
    _like("requests.exceptions", "ConnectionError"),
    _like("requests.exceptions", "Timeout"),
    _like("openai", "APIConnectionError"),
    _like("openai._exceptions", "RateLimitError"),
    _like("aiohttp.client_exceptions", "ClientConnectionError"),
]


class _SecretiveError(Exception):
    """Has nothing to read: not even its class."""

    def __getattribute__(self, name: str) -> object:
        raise SystemExit(name)


class _FragileError(Exception):
    """As some clients' errors: a property raises where there was no answer."""

    @property
    def response(self) -> object:
        raise RuntimeError("there is no response")


_Uncomparable = type("_Uncomparable", (int,), {"__ge__": None})
_OddError = type("_OddError", (Exception,), {"status_code": _Uncomparable(500)})
SAMPLE = [
    urllib.error.HTTPError("http://x", 404, "none", Message(), None),
    ValueError("x"),
    KeyError("k"),
    _StatusError(400),
    _StatusError(404),
    RecursionError(),
    SystemExit(1),
]


@pytest.mark.parametrize("error", SERVICE, ids=lambda error: type(error).__mro__[1].__name__ + str(error))
def test_failures_of_a_service_may_be_tried_again(error: BaseException) -> None:
    assert is_infrastructure(error)
    assert failed_score(error, "r.py").outcome == "infra_error"


@pytest.mark.parametrize("error", SAMPLE, ids=repr)
def test_failures_of_a_sample_are_final(error: BaseException) -> None:
    assert not is_infrastructure(error)
    assert failed_score(error, "r.py").outcome == "data_error"


@pytest.mark.parametrize("kind", [_SecretiveError, _FragileError, _OddError])
def test_an_error_whose_own_code_fails_is_its_samples(kind: type[Exception]) -> None:
    score = failed_score(kind(), "r.py")
    assert (score.outcome, (score.reason or "").partition(":")[0]) == ("data_error", kind.__name__)


def test_the_reason_names_the_line_of_the_users_file() -> None:
    try:
        raise ValueError("odd answer")
    except ValueError as error:
        score = failed_score(error, __file__)
    assert (score.reason or "").startswith("ValueError: odd answer (")
    assert "in test_the_reason_names_the_line_of_the_users_file" in (score.reason or "")
