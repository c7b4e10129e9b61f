"""Answers across threads. Used by ``vllm_engine`` and ``vllm_loop``."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def settle(future: Future[T], result: T | None = None, *, error: Exception | None = None) -> None:
    """Gives a future its result or error, unless whoever waited for it has given up or was answered before."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)  # type: ignore[arg-type]
