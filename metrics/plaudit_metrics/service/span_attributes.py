"""Describe a sample by the attributes of OpenTelemetry's conventions for generative AI (``gen_ai.*``). Pure."""

from __future__ import annotations

from typing import Any

from plaudit_wire.records import CallRecord, GenerationRecord, SampleRecord, ScorerRecord, StepRecord, TurnRecord

Attributes = dict[str, Any]

EVALUATION = "gen_ai.evaluation.result"
"""Name of the event that holds a score."""
_NO_FAILURE = ("scored", "skipped", "ok")


def of_sample(record: StepRecord, sample: SampleRecord) -> Attributes:
    """Return the attributes of a sample's root span."""
    attributes: Attributes = {
        "plaudit.step": record.step,
        "plaudit.group": sample.group,
        "plaudit.index": sample.index,
        "plaudit.data_source": sample.data_source,
        "plaudit.outcome": sample.scoring.outcome,
        "plaudit.deliveries": sample.deliveries,
    }
    if sample.scoring.value is not None:
        attributes["plaudit.reward"] = sample.scoring.value
    return attributes | error(sample.scoring.outcome)


def of_generation(generation: GenerationRecord, model: str) -> Attributes:
    """Return the attributes of the span of a sample's generation."""
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        "gen_ai.usage.output_tokens": generation.response_tokens,
        "gen_ai.response.finish_reasons": [generation.finish_reason],
        "plaudit.policy_version.min": generation.version_min,
        "plaudit.policy_version.max": generation.version_max,
        "plaudit.worker": generation.worker,
    }


def of_turn(number: int, turn: TurnRecord, model: str) -> Attributes:
    """Return the attributes of the span of one turn of a conversation."""
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": model,
        "gen_ai.usage.output_tokens": turn.tokens,
        "plaudit.turn": number,
        "plaudit.engine_queue_s": turn.engine_queue_s,
    }


def of_call(call: CallRecord) -> Attributes:
    """Return the attributes of the span of one tool call."""
    attributes: Attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": call.tool,
        "plaudit.outcome": call.outcome,
        "plaudit.wait_s": call.wait_s,
    }
    return attributes | error(call.outcome)


def of_scorer(name: str, scorer: ScorerRecord) -> Attributes:
    """Return the attributes of a scorer's span; a judge reports its tokens."""
    attributes: Attributes = {
        "plaudit.scorer": name,
        "plaudit.outcome": scorer.outcome,
        "plaudit.attempts": scorer.attempts,
        "plaudit.limiter_s": scorer.limiter_s,
        "plaudit.retry_s": scorer.retry_s,
        "plaudit.wait_s": scorer.wait_s,
    }
    for extra, attribute in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")):
        if isinstance(count := scorer.extra.get(extra), float | int):
            attributes[f"gen_ai.usage.{attribute}"] = int(count)
    return attributes | error(scorer.outcome)


def evaluation(name: str, scorer: ScorerRecord) -> Attributes:
    """Return the attributes of the event with a scorer's result."""
    attributes: Attributes = {"gen_ai.evaluation.name": name, **error(scorer.outcome)}
    if scorer.value is not None:
        attributes["gen_ai.evaluation.score.value"] = scorer.value
    if scorer.reason:
        attributes["gen_ai.evaluation.explanation"] = scorer.reason
    return attributes


def error(outcome: str) -> Attributes:
    """Return ``error.type`` for an outcome that is a failure."""
    return {} if outcome in _NO_FAILURE else {"error.type": outcome}
