"""Break a circuit: stop requests to an endpoint that keeps failing, then probe it with one at a time."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from plaudit_reward.endpoint.failures import BusyError, CircuitOpenError, EndpointRefusedError
from plaudit_wire.errors import CallTimeoutError, InfrastructureError
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)

FAILURES_IN_A_ROW = 5
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0
_WHILE_PROBING_S = 1.0


class Circuit:
    """Stop one worker's requests to an endpoint that fails: the circuit is closed, open, or half open.

    ::

        closed ── 5 failures in a row, or one refusal (401, 403, 404) ──▶ open ── pause is over ──▶ half open
          ▲                                                                ▲                            │
          └──────────────────────── the probe gets a response ─────────────┼────────────────────────────┤
                                                                           └── it fails: pause doubled ─┘

    A 429 is not a failure: a busy endpoint is up. Nor is a request that fails after others, sent later or earlier, got
    a response while it was in flight: with hundreds in flight some hang at any time, and time out together.
    """

    def __init__(self, name: str, base_url: str) -> None:
        self._name = name
        self._base_url = base_url
        self._failures = 0
        self._last_failure = ""
        self._responded_at = -math.inf
        self._pause_s = 0.0
        self._probe_at: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Return True while requests are stopped, or only probes are sent."""
        return self._probe_at is not None

    @property
    def probe_due(self) -> bool:
        """Return True when it is half open and no probe is in flight."""
        return self._probe_at is not None and not self._probing and time.monotonic() >= self._probe_at

    def check(self) -> None:
        """Raise ``CircuitOpenError`` while requests are stopped."""
        if self._probe_at is None or self.probe_due:
            return
        wait_s = max(0.0, _WHILE_PROBING_S if self._probing else self._probe_at - time.monotonic())
        raise CircuitOpenError(f"{self._reason()}; next try in {wait_s:.0f} s", retry_after_s=wait_s)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Record the result of one request, which the block sends; raises ``CircuitOpenError`` as ``check`` does."""
        self.check()
        probe = self._probe_at is not None
        self._probing = probe
        sent_at = time.monotonic()
        try:
            yield
        except EndpointRefusedError as error:
            self._failed(str(error), probe, at_once=True)
            raise
        except BusyError:
            self._responded()
            raise
        except (InfrastructureError, CallTimeoutError) as error:
            if probe or self._responded_at <= sent_at:
                self._failed(str(error), probe)
            raise
        except Exception:
            self._responded()
            raise
        else:
            self._responded()
        finally:
            if probe:
                self._probing = False

    def _responded(self) -> None:
        if self._probe_at is not None:
            logger.warning("endpoint responds again", scorer=self._name, url=self._base_url)
        self._failures, self._pause_s, self._probe_at, self._responded_at = 0, 0.0, None, time.monotonic()

    def _failed(self, reason: str, probe: bool, *, at_once: bool = False) -> None:
        self._failures += 1
        if self._probe_at is not None and not probe:
            return  # the request was sent before the circuit opened
        if not probe and not at_once and self._failures < FAILURES_IN_A_ROW:
            return
        self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 2 or _FIRST_PAUSE_S)
        # Workers that saw the same outage must not come back together.
        self._probe_at = time.monotonic() + random.uniform(0.75, 1.0) * self._pause_s
        self._last_failure = reason
        fields = {"scorer": self._name, "reason": self._reason(), "pause_s": round(self._pause_s, 1)}
        logger.warning("endpoint fails; requests to it stop", **fields)

    def _reason(self) -> str:
        if self._failures > 1:
            return f"endpoint {self._base_url}: {self._failures} failures in a row (last: {self._last_failure})"
        return f"endpoint {self._base_url}: {self._last_failure}"
