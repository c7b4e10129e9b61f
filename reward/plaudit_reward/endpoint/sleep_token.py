"""Make the token of the routes that free a server's GPU: known to the process that started the server only."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

SLEEP_TOKEN_VARIABLE = "PLAUDIT_MODEL_SERVER_SLEEP_TOKEN"  # noqa: S105  # the variable's name
"""Environment variable of a server: the token of ``/sleep`` and ``/wake_up``; unset or empty: it has no such routes."""


def is_permitted(headers: Mapping[str, str], token: str) -> bool:
    """Return True if a request carries ``token``; False for every request where there is none."""
    sent = headers.get("authorization", "").removeprefix("Bearer ")
    return bool(token) and hmac.compare_digest(sent.encode(), token.encode())
