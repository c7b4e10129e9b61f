"""Quantities of Kubernetes as numbers: ``500m`` of a CPU, ``1.5Gi`` of memory."""

from __future__ import annotations

import re
from decimal import Decimal

_QUANTITY = re.compile(
    r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e([+-]?[0-9]{1,3})|(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?)", re.ASCII
)
_FACTORS = {"": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3")}
_FACTORS |= {unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", start=1)}
_FACTORS |= {f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)}


def quantity(value: object) -> Decimal:
    """Return a quantity as a number: ``0.5`` and ``500m`` are equal."""
    found = _QUANTITY.fullmatch(str(value))
    if found is None:
        raise ValueError(f"{value!r} is no quantity; write for example 2, 500m or 1.5Gi")
    number, exponent, unit = found.groups()
    return Decimal(number).scaleb(int(exponent)) if exponent else Decimal(number) * _FACTORS[unit or ""]
