"""Let only callers read ``/metrics`` whom the API server allows to: TokenReview, then SubjectAccessReview.

The rules are those of the controllers that kubebuilder scaffolds: the caller sends its service account's token, and
RBAC decides over the verb ``get`` of the URL ``/metrics`` (``nonResourceURLs``).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

_KNOWN_FOR_S = 60.0
_MOST_KNOWN = 256
_OF_CALLERS = "/apis/authentication.k8s.io/v1/tokenreviews"
_OF_ACCESS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

Review = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Posts a review to a path of the API server and returns it with its ``status``. Raises ``KubeError``."""


class MetricsAccess:
    """Decide on tokens, and keep each decision for a minute. Thread-safe.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, review: Review, clock: Callable[[], float] = time.monotonic) -> None:
        self._review = review
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()

    def allows(self, token: str) -> bool:
        """Return True if a token's owner may read ``/metrics``; raise ``KubeError`` without an answer."""
        key, now = hashlib.sha256(token.encode()).digest(), self._clock()
        with self._lock:
            at, allowed = self._known.get(key, (float("-inf"), False))
        if now - at < _KNOWN_FOR_S:
            return allowed
        allowed = self._ask(token)
        with self._lock:
            self._known[key] = now, allowed
            self._known.move_to_end(key)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return allowed

    def _ask(self, token: str) -> bool:
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        caller = self._review(_OF_CALLERS, review).get("status") or {}
        if not caller.get("authenticated"):
            return False
        user = caller.get("user") or {}
        spec = {"user": user.get("username", ""), "groups": user.get("groups") or [], "uid": user.get("uid", "")}
        spec["nonResourceAttributes"] = {"path": "/metrics", "verb": "get"}
        access = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        return bool((self._review(_OF_ACCESS, access).get("status") or {}).get("allowed"))
