"""The gauges of auditors: their figures over the newest steps, as the newest closed step has them.

The metrics service reads them from the step's record, where the trainer has put them (``statistics.audits``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from plaudit_metrics.service.series.collectors import Labelled
from plaudit_metrics.statistics.audits import DRIFT_KEY, KEY
from plaudit_wire.records import StepRecord

_BOUNDS = {"": "mean", "_low": "low", "_high": "high"}


def _figures(prefix: str, step: StepRecord) -> Iterator[tuple[str, str, float]]:
    for key, value in step.statistics.items():
        if key.startswith(prefix):
            scorer, _, figure = key.removeprefix(prefix).partition("/")
            yield scorer, figure, value


def _with_bounds(prefix: str, name: str, step: StepRecord) -> Labelled:
    wanted = {f"{name}{ending}": statistic for ending, statistic in _BOUNDS.items()}
    return {(scorer, wanted[figure]): value for scorer, figure, value in _figures(prefix, step) if figure in wanted}


def _single(name: str, step: StepRecord) -> Labelled:
    return {(scorer,): value for scorer, figure, value in _figures(KEY, step) if figure == name}


_BOUNDED = {
    "value": (
        "plaudit_audit_value",
        "Mean value of an auditor over the audited samples of 20 steps; its interval",
    ),
    "reward": ("plaudit_audit_reward", "Mean reward of the same samples; its interval"),
    "gap": ("plaudit_audit_gap", "An auditor's mean over reinforced samples less its mean over the others"),
    "agreement": ("plaudit_audit_agreement", "Rank correlation of reward and auditor within groups, -1 to 1"),
}
_SINGLE = {
    "groups": ("plaudit_audit_groups", "Audited groups of 20 steps"),
    "failed": ("plaudit_audit_failed_samples", "Samples of them that an auditor gave no value"),
    "waiting": ("plaudit_audit_waiting_groups", "Drawn groups of 20 steps that are not audited yet"),
    "diverges": (
        "plaudit_audit_divergence_probability",
        "Probability that chance alone lets the reward rise and an auditor fall as seen",
    ),
}
AUDIT_GAUGES: tuple[tuple[str, str, tuple[str, ...], Callable[[StepRecord], Labelled]], ...] = (
    *(
        (name, text, ("scorer", "statistic"), partial(_with_bounds, KEY, figure))
        for figure, (name, text) in _BOUNDED.items()
    ),
    (
        "plaudit_scorer_drift",
        "How much more a scorer gave the same samples when it was asked again; its interval",
        ("scorer", "statistic"),
        partial(_with_bounds, DRIFT_KEY, "value"),
    ),
    *((name, text, ("scorer",), partial(_single, figure)) for figure, (name, text) in _SINGLE.items()),
)
"""Name, help text and labels of each gauge, and its values by label values."""
