"""The function of a ``python`` scorer, as its child processes load it."""

from __future__ import annotations

from plaudit_reward.functions.target import ServedModel, Target
from plaudit_workers.job.spec.rewards.scorers import PythonScorerSpec, ScorerSpec


def function_target(scorer: ScorerSpec, function: PythonScorerSpec) -> Target:
    """Return the target of a scorer's function; the address of a served model is filled in when its router runs."""
    serve = function.serve
    return Target(
        path=function.path,
        function=function.function,
        arguments=dict(function.arguments),
        scope=scorer.scope,
        isolation=scorer.isolation,
        served=ServedModel(serve.source, serve.revision, serve.trust_remote_code) if serve else None,
    )
