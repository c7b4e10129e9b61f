"""PromQL that the panels of a run share. Every query selects the chosen runs."""

from __future__ import annotations

from plaudit_metrics.dashboards.panels import OF_RUN


def rate(name: str, by: str = "", where: str = "") -> str:
    """Return the rate of a counter, summed over all labels but ``by``."""
    return f"sum by ({by}) (rate({name}{{{OF_RUN}{where}}}[$__rate_interval]))"


def newest(name: str, by: str = "", where: str = "") -> str:
    """Return a gauge, the largest over all labels but ``by``."""
    return f"max by ({by}) ({name}{{{OF_RUN}{where}}})"


def quantile(q: float, name: str, by: str = "") -> str:
    """Return a quantile (0 to 1) of a histogram, estimated from its buckets; absent while nothing is observed."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', labels)} > 0)"
