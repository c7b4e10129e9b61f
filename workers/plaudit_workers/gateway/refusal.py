"""The errors that a gateway answers with. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RefusedRequestError(Exception):
    """A request that the gateway does not serve.

    Attributes:
        kind: for programs: ``invalid_sample``, ``unauthorized``, ``busy``, ….
        samples: by position in the request, what is wrong with each; the others were not refused.
        retry_after_s: seconds after which the same request may succeed; None: it will not.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        samples: Mapping[int, str] | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.samples = samples or {}
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        error: dict[str, Any] = {"type": self.kind, "message": str(self)}
        if self.samples:
            error["samples"] = {str(position): message for position, message in self.samples.items()}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Return the headers of the answer."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})
