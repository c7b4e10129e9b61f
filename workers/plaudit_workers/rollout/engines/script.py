"""Define the script of a scripted engine: distributions of samples' latency and length. Read by ``scripted``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from plaudit_wire.errors import RefusedError


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="constant"):
    """Always draw ``value``."""

    value: float

    def draw(self, random: np.random.Generator) -> float:
        """Draw one value."""
        return self.value


class Uniform(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"):
    """Draw uniformly between ``low`` and ``high``."""

    low: float
    high: float

    def draw(self, random: np.random.Generator) -> float:
        """Draw one value."""
        return float(random.uniform(self.low, self.high))


class Exponential(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="exponential"):
    """Draw from the exponential distribution with this ``mean``."""

    mean: float

    def draw(self, random: np.random.Generator) -> float:
        """Draw one value."""
        return float(random.exponential(self.mean))


class LogNormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """Draw log-normally: half below ``median``; ``sigma`` is the logarithm's standard deviation (1 has a long tail)."""

    median: float
    sigma: float

    def draw(self, random: np.random.Generator) -> float:
        """Draw one value."""
        return float(self.median * math.exp(self.sigma * random.standard_normal()))


Distribution = Constant | Uniform | Exponential | LogNormal


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Hold the fields of ``engine.arguments``."""

    latency_seconds: Distribution = Constant(0.05)
    """Seconds from a sample's start to its last token."""
    response_tokens: Distribution = Constant(16)
    """Length before ``max_tokens`` cuts it; rounded, at least 1."""
    vocabulary_size: int = 16
    load_seconds: float = 0.0
    """Seconds that a switch of weights takes; running samples continue meanwhile."""
    turns: list[str] = []
    """Texts to play instead of random tokens: the n-th turn of a sample gets the n-th text, later turns the last one.
    With the model's tokenizer, so that tool calls can be played."""

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Script:
        """Read ``engine.arguments``.

        Raises:
            RefusedError: an unknown name or a wrong type.
        """
        try:
            return msgspec.convert(dict(arguments), cls)
        except msgspec.ValidationError as error:
            raise RefusedError(f"spec.rollout.engine.arguments of the scripted engine: {error}") from error
