"""Keep sessions of NeMo Gym's resources servers: ``/seed_session`` opens one, its cookies name it in ``/verify``."""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie

from multidict import MultiMapping
from yarl import URL

NO_SESSIONS = frozenset({404, 405})
"""Statuses of a server without the route: it verifies without a session."""
_SEED, _VERIFY = "seed_session", "verify"


def seed_url(url: str) -> str:
    """Return the route that opens a session, beside the route ``/verify``; empty for another route."""
    address = URL(url)
    return str(address.with_name(_SEED)) if address.name == _VERIFY else ""


def cookie_header(headers: MultiMapping[str]) -> dict[str, str]:
    """Return the header that sends a response's cookies (any number of ``Set-Cookie``) back; empty without cookies."""
    cookies: dict[str, str] = {}
    for line in headers.getall("Set-Cookie", []):
        try:
            cookies |= {name: morsel.coded_value for name, morsel in SimpleCookie(line).items()}
        except CookieError:
            continue  # a cookie that cannot be sent back
    return {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())} if cookies else {}
