"""Map each kind of scorer to the function that makes it."""

from __future__ import annotations

from plaudit_workers.scoring.kinds.context import Maker
from plaudit_workers.scoring.kinds.environment import environment_scorer
from plaudit_workers.scoring.kinds.http import http_scorer
from plaudit_workers.scoring.kinds.judge import judge_scorer
from plaudit_workers.scoring.kinds.model import model_scorer
from plaudit_workers.scoring.kinds.python import python_scorer
from plaudit_workers.scoring.kinds.rule import rule_scorer
from plaudit_workers.scoring.kinds.service import service_scorer

MAKERS: dict[str, Maker] = {
    "rule": rule_scorer,
    "python": python_scorer,
    "model": model_scorer,
    "judge": judge_scorer,
    "http": http_scorer,
    "service": service_scorer,
    "environment": environment_scorer,
}
