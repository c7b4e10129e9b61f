"""Find the service that an adapter uses: by arguments, or by the environment of the trainer's processes."""

from __future__ import annotations

import functools
import os

from plaudit_client.blocking import SyncRewardClient
from plaudit_client.client import RewardClient

URL, TOKEN, CA_FILE, TIMEOUT = "PLAUDIT_URL", "PLAUDIT_TOKEN", "PLAUDIT_CA_FILE", "PLAUDIT_TIMEOUT_SECONDS"


def client(url: str = "", token: str = "", timeout_s: float = 0.0) -> RewardClient:
    """Return this process's client of a service; calls with equal arguments share it.

    Args:
        url: of the service; empty: ``PLAUDIT_URL``.
        token: of the service; empty: ``PLAUDIT_TOKEN``.
        timeout_s: seconds that a sample waits for its result; 0: ``PLAUDIT_TIMEOUT_SECONDS``, or 1,800.

    Raises:
        ValueError: there is no URL, or it is not one.
    """
    return _client(*_service(url, token, timeout_s))


def blocking_client(url: str = "", token: str = "", timeout_s: float = 0.0) -> SyncRewardClient:
    """Return this process's client for callers without an event loop; see ``client``."""
    return _blocking_client(*_service(url, token, timeout_s))


def _service(url: str, token: str, timeout_s: float) -> tuple[str, str, float, str]:
    url = url or os.environ.get(URL, "")
    if not url:
        raise ValueError(
            f"no reward service: give url, or set {URL} (and {TOKEN}) in the environment of the processes that score; "
            "runs/<run>/service.json of the service has both"
        )
    timeout_s = timeout_s or float(os.environ.get(TIMEOUT, "1800"))
    return url, token or os.environ.get(TOKEN, ""), timeout_s, os.environ.get(CA_FILE, "")


@functools.cache
def _client(url: str, token: str, timeout_s: float, ca_file: str) -> RewardClient:
    return RewardClient(url, token, timeout_s=timeout_s, ca_file=ca_file)


@functools.cache
def _blocking_client(url: str, token: str, timeout_s: float, ca_file: str) -> SyncRewardClient:
    return SyncRewardClient(url, token, timeout_s=timeout_s, ca_file=ca_file)
