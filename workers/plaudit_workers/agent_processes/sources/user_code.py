"""Call users' code, and put into words what it raises. Runs in the processes of samples."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

MOST_CHARACTERS = 1 << 20
"""Longer texts are cut here; the agent's own limit is far below."""


async def run_user_code(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a plain function in a thread, an async one on the event loop."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    result, error = await asyncio.to_thread(_called, function, arguments, named)
    if error is not None:
        raise error
    return await result if inspect.isawaitable(result) else result


def error_text(error: BaseException) -> str:
    """Return the type and the message of an exception, whose own methods may raise."""
    try:
        return plain_text(f"{type(error).__name__}: {error}")
    except BaseException:  # the user's code
        return str(type.__getattribute__(type(error), "__name__"))


def plain_text(text: str) -> str:
    """Cut a text, which may be of a subclass of the user's; replace what UTF-8 cannot encode."""
    return str.encode(str.__getitem__(text, slice(MOST_CHARACTERS)), errors="replace").decode()


def _called(
    function: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]
) -> tuple[Any, BaseException | None]:
    """Return what a function returned or raised: with a StopIteration, a future of asyncio would never end."""
    try:
        return function(*arguments, **named), None
    except BaseException as error:  # the user's code: sys.exit and the like included
        return None, error
