"""What runs test cases: the local sandbox, or a Sandbox Fusion server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from plaudit_reward.code.cases import Case
from plaudit_reward.code.sandbox.limits import Limits
from plaudit_reward.code.sandbox.messages import Ending


class CaseResult(NamedTuple):
    """What became of one test case."""

    passed: bool
    ending: Ending
    reason: str = ""

    def failure(self) -> str:
        """Why it did not pass, in words."""
        how = "wrong answer" if self.ending == "finished" else self.ending
        return f"{how}: {self.reason}" if self.reason else how


class Backend(Protocol):
    """Runs test cases, many at a time."""

    waits_for: Literal["process", "limit"]
    """What a test case waits for before it begins."""
    num_samples: int
    """How many samples it can work on at a time."""

    async def open(self) -> None:
        """Starts what it needs.

        Raises:
            ConfigurationError: it cannot work here.
        """
        ...

    def program(self, response: str) -> str | None:
        """The program in a model's response; None where there is none."""
        ...

    async def run(
        self, program: str, function: str | None, case: Case, limits: Limits, on_begin: Callable[[], None]
    ) -> CaseResult:
        """Runs one test case.

        Args:
            program: its text.
            function: to call, or None for a program that reads and prints.
            case: the test case.
            limits: of this run.
            on_begin: called when it has a place.

        Raises:
            InfrastructureError: what runs programs is broken or away.
        """
        ...

    async def close(self) -> None:
        """Ends processes and connections."""
        ...
