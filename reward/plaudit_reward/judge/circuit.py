"""A circuit breaker: an endpoint that fails again and again is left alone for a while, then asked once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from plaudit_reward.errors import CallTimeoutError, InfrastructureError
from plaudit_reward.judge.failures import BusyError, CircuitOpenError, EndpointRefusedError
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)

FAILURES_IN_A_ROW = 5
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0
_WHILE_PROBING_S = 1.0


class Circuit:
    """Closed, open, or half open: one endpoint as one worker sees it.

    ::

        closed ── 5 failures in a row, or one refusal (401, 403, 404) ──▶ open ── pause is over ──▶ half open
          ▲                                                                ▲                            │
          └──────────────────────────── the one call answers ──────────────┼────────────────────────────┤
                                                                           └── it fails: pause doubled ─┘

    A 429 is no failure: an endpoint that is busy is there.

    Args:
        name: of the judge.
        clock: monotonic seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._failures = 0
        self._reason = ""
        self._pause_s = 0.0
        self._probe_at: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether the endpoint is left alone, or only probed."""
        return self._probe_at is not None

    @property
    def probe_due(self) -> bool:
        """Whether it is half open and nobody is asking."""
        return self._probe_at is not None and not self._probing and self._clock() >= self._probe_at

    def check(self) -> None:
        """Lets pass what would be called now.

        Raises:
            CircuitOpenError: the endpoint is left alone.
        """
        if self._probe_at is None or self.probe_due:
            return
        wait_s = _WHILE_PROBING_S if self._probing else self._probe_at - self._clock()
        raise CircuitOpenError(f"the endpoint is not asked for now: {self._reason}", retry_after_s=max(0.0, wait_s))

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around one call of the endpoint: notes how it ended.

        Raises:
            CircuitOpenError: the endpoint is left alone.
        """
        self.check()
        probe = self._probe_at is not None
        self._probing = probe
        try:
            yield
        except EndpointRefusedError as error:
            self._failed(str(error), probe, at_once=True)
            raise
        except BusyError:
            self._answered()
            raise
        except (InfrastructureError, CallTimeoutError) as error:
            self._failed(str(error), probe)
            raise
        except Exception:
            self._answered()
            raise
        else:
            self._answered()
        finally:
            if probe:
                self._probing = False

    def _answered(self) -> None:
        if self._probe_at is not None:
            logger.warning("judge answers again", judge=self._name)
        self._failures, self._pause_s, self._probe_at = 0, 0.0, None

    def _failed(self, reason: str, probe: bool, *, at_once: bool = False) -> None:
        self._failures += 1
        if self._probe_at is not None and not probe:
            return  # it began before the circuit opened
        if not probe and not at_once and self._failures < FAILURES_IN_A_ROW:
            return
        self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 2 or _FIRST_PAUSE_S)
        # Workers that saw the same outage must not come back together.
        self._probe_at = self._clock() + random.uniform(0.75, 1.0) * self._pause_s
        self._reason = f"{self._failures} calls failed in a row, the last: {reason}" if self._failures > 1 else reason
        fields = {"judge": self._name, "reason": self._reason, "pause_s": round(self._pause_s, 1)}
        logger.warning("judge is not asked for now", **fields)
