"""Hold a whole HTTP response, and read from it what every caller needs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import msgspec
from multidict import MultiMapping

_LONGEST_RETRY_AFTER_S = 3600.0
_MAX_EXCERPT_CHARACTERS = 300
_REDACTED = "***"


@dataclass(frozen=True)
class Response:
    """A status, its headers and the whole body."""

    status: int
    headers: MultiMapping[str]
    """Names in any case."""
    body: bytes


def error_message(body: bytes, secret: str = "") -> str:
    """Return the server's own explanation of an error, short and on one line.

    Looks for OpenAI's and vLLM's ``error.message`` and FastAPI's ``detail``; falls back to the body's text.

    Args:
        secret: replaced by ``***`` wherever the server repeats it; empty: none.
    """
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return excerpt(body, secret)
    if isinstance(content, dict):
        error = content.get("error", content)
        for holder in (error, content):
            for name in ("message", "detail"):
                if isinstance(holder, dict) and isinstance(holder.get(name), str):
                    return one_line(holder[name], secret)
        if isinstance(error, str):
            return one_line(error, secret)
    return excerpt(body, secret)


def excerpt(body: bytes, secret: str = "") -> str:
    """Return the beginning of a body as one line, without ``secret``."""
    return one_line(body.decode(errors="replace"), secret)


def one_line(text: str, secret: str = "") -> str:
    """Return the beginning of a text as one line, without ``secret``."""
    if secret:
        text = text.replace(secret, _REDACTED)
    return " ".join(text.split())[:_MAX_EXCERPT_CHARACTERS]


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that ``Retry-After`` asks for, at most an hour; None without a usable value.

    Reads seconds and dates. A date is compared with the response's own ``Date``, so that a wrong clock on either side
    does no harm.

    Args:
        headers: of the response; names in lower case, or a mapping that ignores case.
    """
    text = headers.get("retry-after", "").strip()
    try:
        return _bounded(float(text))
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None
    try:
        now = parsedate_to_datetime(headers.get("date", "")).timestamp()
    except ValueError:
        now = time.time()
    return _bounded(until - now)


def _bounded(seconds: float) -> float | None:
    return min(max(0.0, seconds), _LONGEST_RETRY_AFTER_S) if seconds == seconds else None
