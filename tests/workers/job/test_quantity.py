"""Quantities as Kubernetes writes them."""

from __future__ import annotations

from decimal import Decimal

import pytest

from plaudit_job.spec.pod import quantity


@pytest.mark.parametrize(
    ("written", "number"),
    [("500m", "0.5"), (2, "2"), (0.5, "0.5"), ("1.5Gi", "1610612736"), ("2k", "2000"), ("1e3", "1000"), (".5", "0.5")],
)
def test_a_quantity_is_a_number(written: object, number: str):
    assert quantity(written) == Decimal(number)


@pytest.mark.parametrize("written", ["", "much", "1 Gi", "-1", "1GiB", "٣", "1e99999999"])
def test_an_invalid_quantity_is_rejected_with_its_value(written: str):
    with pytest.raises(ValueError, match="is no quantity"):
        quantity(written)
