"""The rules that a job can name, and the arguments of each: ``rule`` and ``ruleArguments`` of a scorer.

Rules themselves are functions in ``plaudit_reward.rules``. A rule's arguments are the fields of its class here, in
camelCase in a job; its function takes the same ones as keyword arguments, with the same defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo

from plaudit_wire.errors import ConfigurationError

_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_AMOUNT = re.compile(r"([0-9]+)(k|M|G|Ki|Mi|Gi|)")
_VERLS_NUM_CASES = 10
_Seconds = Annotated[float, Meta(gt=0)]


class RuleArguments(msgspec.Struct, frozen=True, rename="camel"):
    """The arguments of a rule. This class itself is for rules that have none."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Any:
        """Return the keyword arguments of the rule's function: those that a job gives, the others have defaults.

        Raise ``ConfigurationError`` if they do not fit; the message names the argument and the remedy.
        """
        fields = {field.encode_name: field for field in msgspec.structs.fields(cls)}
        unknown = sorted(given.keys() - fields.keys())
        if unknown:
            known = f"they are {', '.join(fields)}" if fields else "it has none"
            raise ConfigurationError(f"there is no argument {unknown[0]!r}: {known}")
        missing = [name for name, field in fields.items() if field.required and name not in given]
        if missing:
            raise ConfigurationError(f"{missing[0]} is missing: give it a value")
        arguments = {fields[name].name: _converted(fields[name], given[name]) for name in given}
        cls(**arguments).check()
        return arguments

    def check(self) -> None:
        """Raise ``ConfigurationError`` for arguments that contradict each other."""


class FormatArguments(RuleArguments, frozen=True):
    """The arguments of ``format``."""

    pattern: str
    match: Literal["full", "start", "anywhere"] = "full"

    def check(self) -> None:
        """Refuse a pattern that is not a regular expression."""
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigurationError(
                f"pattern {self.pattern!r} is not a regular expression: {error}. Fix it; in YAML, put it in single "
                "quotes"
            ) from error


class Geo3kArguments(RuleArguments, frozen=True):
    """The arguments of ``geo3k``."""

    boxed: bool = True
    format_score: Annotated[float, Meta(ge=0, le=1)] = 0.1
    limit_seconds: _Seconds = 10.0


class Gsm8kArguments(RuleArguments, frozen=True):
    """The arguments of ``gsm8k`` and ``gsm8k_flexible``."""

    numeric: bool = False


class MathArguments(RuleArguments, frozen=True):
    """The arguments of ``math``."""

    limit_seconds: _Seconds = 10.0


class MathDapoArguments(RuleArguments, frozen=True):
    """The arguments of ``math_dapo``."""

    strict_boxed: bool = False
    normalize_boxed: bool = False


class MathRewardArguments(RuleArguments, frozen=True):
    """The arguments of ``math_reward``."""

    last_box_wins: bool = False


class MathVerifyArguments(RuleArguments, frozen=True):
    """The arguments of ``math_verify``."""

    limit_seconds: _Seconds = 30.0
    strict: bool = True
    float_rounding: Annotated[int, Meta(ge=0)] = 6
    precision: Annotated[int, Meta(ge=1)] = 15
    units: bool = True
    last_box_wins: bool = False


class OverlongArguments(RuleArguments, frozen=True):
    """The arguments of ``overlong``."""

    buffer_tokens: Annotated[int, Meta(ge=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    penalty_factor: Annotated[float, Meta(ge=0)] = 1.0

    def check(self) -> None:
        """Refuse a buffer that is longer than the longest response."""
        if self.max_tokens is not None and self.max_tokens < self.buffer_tokens:
            raise ConfigurationError(
                f"bufferTokens is {self.buffer_tokens}, more than maxTokens, {self.max_tokens}: set bufferTokens to at "
                "most maxTokens"
            )


class PrimeMathArguments(RuleArguments, frozen=True):
    """The arguments of ``prime_math``."""

    symbolic: bool = False
    percentages: bool = True
    tolerance: Annotated[float, Meta(ge=0)] = 1e-4
    last_box_wins: bool = False
    limit_seconds: _Seconds = 10.0


class SearchR1Arguments(RuleArguments, frozen=True):
    """The arguments of ``search_r1_like_qa_em``."""

    substring: bool = False
    careful: bool = False


class CodeOptions(RuleArguments, frozen=True, forbid_unknown_fields=True):
    """The options of ``code``."""

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
    tolerance: float | None = None
    """Compare printed text word by word, and results as JSON (tuples are lists, keys are text); numbers that are not
    both integers may differ by this times ``max(1, |expected|)``. Default: as verl compares."""
    as_script: bool = False
    """Run programs as ``python program.py`` does. Default: as verl's ``prime_code`` does, in which correct programs
    fail that call ``exit()``, use ``global``, or import in unusual forms."""
    url: str | None = None
    """A Sandbox Fusion server. Default: the local sandbox."""
    concurrency: int = 64
    """Concurrent requests of each worker to that server."""
    allow_without_landlock: bool = False
    """Run programs also where the kernel has no Landlock; they cannot open any file there."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Return the options; see ``RuleArguments.read``."""
        try:
            options = msgspec.convert(dict(given), cls)
        except msgspec.ValidationError as error:
            names = ", ".join(cls.__struct_encode_fields__)
            raise ConfigurationError(f"{error}; arguments are {names}") from error
        options.check()
        return options

    def check(self) -> None:
        """Refuse values out of their range."""
        is_url = self.url is None or self.url.startswith(("http://", "https://"))
        url_remedy = "write it like http://sandbox:8080/run_code, or leave it out for the local sandbox"
        for name, value, right, remedy in (
            ("timeSeconds", self.time_seconds, self.time_seconds > 0, "give seconds above 0"),
            ("cases", self.cases, (self.cases or 0) >= 0, "give a number of test cases, or 0 for all"),
            ("tolerance", self.tolerance, 0 <= (self.tolerance or 0) < 1, "give a number from 0 to below 1"),
            ("concurrency", self.concurrency, self.concurrency > 0, "give at least 1"),
            ("url", self.url, is_url, url_remedy),
        ):
            if not right:
                raise ConfigurationError(f"{name} is {value!r}; {remedy}")
        _bytes("memory", self.memory)
        _bytes("output", self.output)

    @property
    def memory_bytes(self) -> int:
        """Return the memory of one test case."""
        return _bytes("memory", self.memory)

    @property
    def output_bytes(self) -> int:
        """Return the most that one test case may print."""
        return _bytes("output", self.output)

    def gives_shares(self, *, functions: bool) -> bool:
        """Return True when the share of passed test cases is the score, for functions or for programs."""
        return self.continuous if self.continuous is not None else not functions or self.url is not None

    def num_counted(self, num_cases: int, *, shares: bool) -> int:
        """Return how many of a row's test cases count."""
        default = _VERLS_NUM_CASES if shares else 0
        return min((default if self.cases is None else self.cases) or num_cases, num_cases)


RULE_ARGUMENTS: dict[str, type[RuleArguments]] = {
    "code": CodeOptions,
    "format": FormatArguments,
    "geo3k": Geo3kArguments,
    "gsm8k": Gsm8kArguments,
    "gsm8k_flexible": Gsm8kArguments,
    "math": MathArguments,
    "math_dapo": MathDapoArguments,
    "math_reward": MathRewardArguments,
    "math_verify": MathVerifyArguments,
    "overlong": OverlongArguments,
    "prime_math": PrimeMathArguments,
    "search_r1_like_qa_em": SearchR1Arguments,
}
"""Arguments by the name in ``rule:``. ``plaudit_reward.rules.scorer.RULES`` has the rules of these names."""


def read_arguments(rule: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by rule name: those of ``rule``; without one, those that ``given`` has for each rule.

    Raise ``ConfigurationError`` if the rule or an argument does not exist.
    """
    by_rule = {rule: given} if rule is not None else given
    return {name: _read(name, arguments) for name, arguments in by_rule.items()}


def _read(name: str, given: Any) -> Any:
    if name not in RULE_ARGUMENTS:
        raise ConfigurationError(f"there is no rule {name!r}; rules are {', '.join(sorted(RULE_ARGUMENTS))}")
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{name} is {given!r}: without rule, give each rule's arguments by its name")
    try:
        return RULE_ARGUMENTS[name].read(given)
    except ConfigurationError as error:
        raise ConfigurationError(f"rule {name}: {error}") from error


def _converted(field: FieldInfo, value: Any) -> Any:
    try:
        return msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{field.encode_name} is {value!r}: {str(error).lower()}") from error


def _bytes(name: str, amount: str) -> int:
    found = _AMOUNT.fullmatch(amount)
    if found is None or int(found[1]) == 0:
        raise ConfigurationError(f"{name} is {amount!r}; write it like 512Mi or 1Gi")
    return int(found[1]) * _FACTORS[found[2]]
