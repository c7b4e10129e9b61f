"""Options of code rules in a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from plaudit_reward.code.sandbox.limits import ProgramLimits
from plaudit_reward.errors import ConfigurationError

_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_AMOUNT = re.compile(r"([0-9]+)(k|M|G|Ki|Mi|Gi|)")
_VERLS_NUM_CASES = 10


class CodeOptions(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Options of the rule ``code``; names are camelCase in the job."""

    time_seconds: float = 10.0
    """Seconds for one test case."""
    memory: str = "1Gi"
    """For one test case, on top of what Python itself needs."""
    output: str = "16Mi"
    """The most that one test case may print."""
    continuous: bool | None = None
    """True: the score is the share of test cases that pass; false: 1 when all pass, else 0. Default: verl's choice,
    which is the share, but for functions in the local sandbox: ``prime_code`` loses their name when it scores
    single test cases, so they get all or nothing."""
    cases: int | None = None
    """How many test cases count, from the first on; 0: all. Default: where the share counts 10 (verl's number), else
    all."""
    as_script: bool = False
    """Run programs as ``python program.py`` does. Default: as verl's ``prime_code`` does, in which correct programs
    fail that call ``exit()``, read ``sys.stdin.buffer``, use ``global``, or import in unusual forms."""
    url: str | None = None
    """A Sandbox Fusion server. Default: the local sandbox."""
    concurrency: int = 64
    """Concurrent requests of each worker to that server."""
    allow_without_landlock: bool = False
    """Run programs also where the kernel has no Landlock; they cannot open any file there."""

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self:
        """Read them from the job; raise ``ConfigurationError`` for a wrong name or value."""
        try:
            options = msgspec.convert(dict(arguments), cls)
        except msgspec.ValidationError as error:
            names = ", ".join(cls.__struct_encode_fields__)
            raise ConfigurationError(f"{error}; arguments are {names}") from error
        for name, value, right in (
            ("timeSeconds", options.time_seconds, options.time_seconds > 0),
            ("cases", options.cases, options.cases is None or options.cases >= 0),
            ("concurrency", options.concurrency, options.concurrency > 0),
            ("url", options.url, options.url is None or options.url.startswith(("http://", "https://"))),
        ):
            if not right:
                raise ConfigurationError(f"{name} is {value!r}; {_REMEDIES[name]}")
        options.limits()
        return options

    def limits(self) -> ProgramLimits:
        """Return the limits of one test case."""
        return ProgramLimits(self.time_seconds, _bytes("memory", self.memory), _bytes("output", self.output))

    def gives_shares(self, *, functions: bool) -> bool:
        """Return True when the share of passed test cases is the score, for functions or for programs."""
        return self.continuous if self.continuous is not None else not functions or self.url is not None

    def num_counted(self, num_cases: int, *, shares: bool) -> int:
        """Return how many of a row's test cases count."""
        default = _VERLS_NUM_CASES if shares else 0
        return min((default if self.cases is None else self.cases) or num_cases, num_cases)


_REMEDIES = {
    "timeSeconds": "give seconds above 0",
    "cases": "give a number of test cases, or 0 for all",
    "concurrency": "give at least 1",
    "url": "write it like http://sandbox:8080/run_code, or leave it out for the local sandbox",
}


def _bytes(name: str, amount: str) -> int:
    found = _AMOUNT.fullmatch(amount)
    if found is None or int(found[1]) == 0:
        raise ConfigurationError(f"{name} is {amount!r}; write it like 512Mi or 1Gi")
    return int(found[1]) * _FACTORS[found[2]]
