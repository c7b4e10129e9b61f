"""The interface of the local sandbox and of Sandbox Fusion: both run test cases."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from plaudit_reward.code.cases import Case
from plaudit_reward.code.sandbox.limits import ProgramLimits
from plaudit_reward.code.sandbox.messages import Ending
from plaudit_reward.code.timer import SampleTimer


class CaseResult(NamedTuple):
    """The result of one test case."""

    passed: bool
    ending: Ending
    reason: str = ""

    def failure(self) -> str:
        """Return why the case did not pass, as text that can be encoded whatever the program raised."""
        how = "wrong answer" if self.ending == "finished" else self.ending
        reason = self.reason.encode("utf-8", "replace").decode()
        return f"{how}: {reason}" if reason else how


class Backend(Protocol):
    """Run test cases, many at a time."""

    waits_for: Literal["process", "limit"]
    """What a test case waits for before it begins."""
    num_samples: int
    """How many samples it can work on at a time."""

    async def open(self) -> None:
        """Start its processes.

        Raises:
            ConfigurationError: it cannot work on this machine.
        """
        ...

    def program(self, response: str) -> str | None:
        """Return the program in a model's response; None when there is none."""
        ...

    async def run(
        self, program: str, function: str | None, case: Case, limits: ProgramLimits, timer: SampleTimer
    ) -> CaseResult:
        """Run one test case.

        Args:
            function: to call, or None for a program that reads and prints.
            timer: of the sample; begun and ended around everything that runs the program.

        Raises:
            DataError: the case cannot be judged.
            InfrastructureError: no program can be run at present.
        """
        ...

    def blames_program(self, num_done: int) -> bool:
        """Return True when a sample whose time is up, with ``num_done`` cases done, has used that time itself."""
        ...

    async def close(self) -> None:
        """End processes and connections."""
        ...
