"""Do what the adapters share: find the service, read rows and messages, report samples without a score.

The service is found by arguments, or by the environment of the trainer's processes.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from plaudit_client.blocking import SyncRewardClient
from plaudit_client.client import SERVICE_FILE, RewardClient
from plaudit_client.result import Result

URL, TOKEN, CA_FILE, TIMEOUT = "PLAUDIT_URL", "PLAUDIT_TOKEN", "PLAUDIT_CA_FILE", "PLAUDIT_TIMEOUT_SECONDS"


def client(url: str = "", token: str = "", timeout_s: float = 0.0) -> RewardClient:
    """Return this process's client of a service; calls with equal arguments share it.

    Args:
        url: of the service; empty: ``PLAUDIT_URL``; raises ``ValueError`` without a valid one.
        token: of the service; empty: ``PLAUDIT_TOKEN``.
        timeout_s: seconds that a sample waits for its result; 0: ``PLAUDIT_TIMEOUT_SECONDS``, or 1,800.
    """
    return _client(**_service(url, token, timeout_s))


def blocking_client(url: str = "", token: str = "", timeout_s: float = 0.0) -> SyncRewardClient:
    """Return this process's client for callers without an event loop; see ``client``."""
    return _blocking_client(**_service(url, token, timeout_s))


def _service(url: str, token: str, timeout_s: float) -> dict[str, Any]:
    url = url or os.environ.get(URL, "")
    if not url:
        raise ValueError(
            f"no reward service: give url, or set {URL} (and {TOKEN}) in the environment of the processes that score; "
            f"{SERVICE_FILE} of the service has both"
        )
    return {
        "url": url,
        "token": token or os.environ.get(TOKEN, ""),
        "timeout_s": timeout_s or _timeout_s(),
        "ca_file": os.environ.get(CA_FILE, ""),
    }


def _timeout_s() -> float:
    given = os.environ.get(TIMEOUT, "1800")
    try:
        return float(given)
    except ValueError:
        raise ValueError(f"{TIMEOUT} is {given!r}: give the seconds that a sample waits for its result") from None


_client = functools.cache(RewardClient)
_blocking_client = functools.cache(SyncRewardClient)
_LOG = logging.getLogger("plaudit_client")
_QUIET_S = 60.0


class MissingScores:
    """Warn about samples without a score, at most once a minute for each outcome. Safe for threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._warned_at: dict[str, float] = {}
        self._since: dict[str, int] = {}

    def note(self, result: Result) -> None:
        """Count a sample, and warn if it has no score and its outcome's last warning is a minute old."""
        if result.score is not None:
            return
        outcome, now = result.outcome, self._clock()
        with self._lock:
            count = self._since.get(outcome, 0) + 1
            last = self._warned_at.get(outcome)
            silent = last is not None and now - last < _QUIET_S
            self._since[outcome] = count if silent else 0
            if silent:
                return
            self._warned_at[outcome] = now
        reason = result.reason or "no reason given"
        more = f" ({count - 1} more since the last warning of this outcome)" if count > 1 else ""
        _LOG.warning("sample %s has no score: %s: %s%s", result.id, outcome, reason, more)


_OF_THIS_PROCESS = MissingScores()


def _begin_anew() -> None:
    global _OF_THIS_PROCESS
    _OF_THIS_PROCESS = MissingScores()


os.register_at_fork(after_in_child=_begin_anew)


def note(result: Result) -> Result:
    """Warn about a result without a score, at most once a minute for each outcome; return the result."""
    _OF_THIS_PROCESS.note(result)
    return result


def number(result: Result, on_failure: float | str = "raise") -> float:
    """Return a sample's score, or the number that stands for a missing one; log a warning for a missing one.

    If ``on_failure`` is ``raise``, raises ``NoScoreError`` for a sample without a score. If it is neither that nor a
    finite number, raises ``ValueError``.
    """
    note(result)
    if on_failure == "raise":
        return result.require_score()
    try:
        instead = float(on_failure)
    except ValueError:
        instead = math.nan
    if not math.isfinite(instead):
        raise ValueError(f"on_failure {on_failure!r}: give 'raise', or a finite number for samples without a score")
    return instead if result.score is None else result.score


TRUTHS = ("ground_truth", "solution", "answer", "expected_answer")
"""Columns that may hold the answer, the first with a value counts."""


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Return chat messages as dictionaries, from dictionaries or pydantic models."""
    return [
        dict(message) if isinstance(message, Mapping) else message.model_dump(mode="json", exclude_none=True)
        for message in messages
    ]


def text_of(content: Any) -> str:
    """Return the text of a message's content: a text, or a list of parts of which only texts count."""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    return ""


def ground_truth_of(row: Mapping[str, Any]) -> Any:
    """Return a row's answer: verl's ``reward_model.ground_truth``, SkyRL's ``reward_spec``, or a column for it."""
    for section in ("reward_model", "reward_spec"):
        if isinstance(row.get(section), Mapping) and "ground_truth" in row[section]:
            return row[section]["ground_truth"]
    return next((row[name] for name in TRUTHS if row.get(name) is not None), None)


def extra_info_of(row: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return a row's ``extra_info``, and its columns with a value that are not the adapter's ``own``."""
    others = {name: value for name, value in row.items() if name not in own and value is not None}
    given = row.get("extra_info")
    return {**others, **(given if isinstance(given, Mapping) else {})}
