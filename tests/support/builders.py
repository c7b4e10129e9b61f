"""Records with what a test does not care about filled in; keyword arguments replace single fields."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from plaudit_wire.messages import PolicyVersion, Prompt, SampleBody, Sampling
from plaudit_wire.records import GenerationRecord, GroupRecord, Sample, SampleRecord, ScoringRecord, Stamps
from plaudit_workers.stream.groups import Group, GroupSample


def job_document(name: str = "job", **spec: Any) -> dict[str, Any]:
    """Build a job as plain data from the sections of its ``spec``, in camelCase."""
    return {"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": name}, "spec": spec}


def make_prompt(group: str = "t-0-1.0", n: int = 2, **changes: Any) -> Prompt:
    """Build an admitted prompt of step 1 whose text is ``copy 12``."""
    fields: dict[str, Any] = {
        "group": group,
        "position": 0,
        "split": "train",
        "step": 1,
        "n": n,
        "min_version": PolicyVersion(1, 0),
        "seed": 7,
        "sampling": Sampling(max_tokens=8),
        "data_source": "copy",
        "prompt": "copy 12",
        "prompt_ids": struct.pack("<2i", 1, 2),
    }
    return Prompt(**{**fields, **changes})


def make_sample(response: str = "12", index: int = 0, **changes: Any) -> Sample:
    """Build a finished sample as a scorer receives it."""
    fields: dict[str, Any] = {"group": "t-0-1.0", "data_source": "copy", "prompt": "copy 12"}
    return Sample(**{**fields, "index": index, "response": response, **changes})


def make_generation(num_tokens: int = 3, **changes: Any) -> GenerationRecord:
    """Build the record of a generation by policy version 0."""
    fields: dict[str, Any] = {
        "worker": "rollout-0",
        "generate_s": 0.1,
        "prompt_tokens": 2,
        "response_tokens": num_tokens,
        "version_min": 0,
        "version_max": 0,
    }
    return GenerationRecord(**{**fields, **changes})


def make_body(
    prompt: Prompt, index: int = 0, text: str = "12", tokens: Sequence[int] = (1, 2, 3), **changes: Any
) -> SampleBody:
    """Build a sample's tensors and texts; it answers ``prompt``."""
    fields: dict[str, Any] = {
        "response_ids": struct.pack(f"<{len(tokens)}i", *tokens),
        "logprobs": struct.pack(f"<{len(tokens)}f", *([-0.5] * len(tokens))),
        "loss_mask": bytes([1] * len(tokens)),
        "version_spans": [(0, 1, 0)],
        "generation": make_generation(len(tokens)),
        "sample": Sample(
            group=prompt.group,
            index=index,
            data_source=prompt.data_source,
            prompt=prompt.prompt,
            response=text,
            ground_truth=prompt.ground_truth,
            split=prompt.split,
        ),
    }
    return SampleBody(**{**fields, **changes})


def scored(value: float) -> ScoringRecord:
    """Build the record of a score by ``reward-0``."""
    return ScoringRecord("scored", value, worker="reward-0")


def make_sample_record(
    stamps: Stamps,
    scoring: ScoringRecord,
    *,
    generation: GenerationRecord | None = None,
    **changes: Any,
) -> SampleRecord:
    """Build the record of a terminal sample, index 0 of group ``t-0-1.0``."""
    fields: dict[str, Any] = {"group": "t-0-1.0", "index": 0, "split": "train", "step": 1, "data_source": "digits"}
    return SampleRecord(stamps=stamps, scoring=scoring, generation=generation, **{**fields, **changes})


def make_group(record: GroupRecord, samples: Sequence[SampleRecord]) -> Group:
    """Build the group that a trainer would read from Redis for these records; without generation no body."""
    prompt = make_prompt(record.group, record.num_samples, step=record.step, data_source="digits")
    members = [
        GroupSample(
            sample.index,
            sample.stamps,
            make_body(prompt, sample.index, tokens=(1, 2), generation=sample.generation) if sample.generation else None,
            scoring=sample.scoring,
            deliveries=sample.deliveries,
        )
        for sample in samples
        if sample.group == record.group
    ]
    return Group(record.group, "ready", prompt, members, incarnation=1, admitted=record.admitted)
