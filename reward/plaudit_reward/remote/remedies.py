"""List the remedies when an endpoint refuses every request, by the section of the scorer that names the endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Remedies:
    """The remedies of one kind of scorer.

    Attributes:
        section: of the scorer, for errors about its other fields.
        key_field: field that names the Secret of the token.
    """

    section: str
    key_field: str
    by_status: Mapping[int, str]


HTTP = Remedies(
    "http",
    "http.apiKeySecret",
    {
        401: "check http.apiKeySecret",
        403: "check http.apiKeySecret and the key's permissions",
        404: "check http.url: it includes the route",
    },
)

_REJECTED_CALLER = (
    "service.tokenSecret must hold a token that the service accepts: a value of the Secret that its gateway reads, or "
    "'token' in its service.json. If the service was created again, its token has changed"
)

SERVICE = Remedies(
    "service",
    "service.tokenSecret",
    {
        401: _REJECTED_CALLER,
        403: "something in front of the gateway refuses the request: check service.url and network policies",
        404: "check service.url: it is the address of a gateway, without a route",
    },
)
