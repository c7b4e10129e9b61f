"""Keep the samples of a step encoded, one by one, from their arrival until the step is forgotten.

Nothing converts all of them at once: msgspec holds the interpreter while it encodes or decodes an object, for half a
second with a step of 100,000 samples, and no thread and no request of the service would proceed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from plaudit_metrics.statistics.steps import wall_seconds
from plaudit_wire.records import GroupRecord, SampleRecord


class StepSamples(msgspec.Struct, frozen=True):
    """Hold every sample and group of one step."""

    samples: list[SampleRecord]
    groups: list[GroupRecord]


class EncodedSample(msgspec.Struct, frozen=True, gc=False):
    """Hold a sample while it waits for its step, and after it: few are ever decoded."""

    wall_s: float
    encoded: bytes

    def decode(self) -> SampleRecord:
        """Return the record."""
        return _decoder.decode(self.encoded)


class EncodedStep(msgspec.Struct, frozen=True):
    """Hold every sample and group of one step, the samples encoded."""

    samples: Sequence[EncodedSample]
    groups: Sequence[GroupRecord]
    num_bytes: int
    """Of the encoded samples."""

    def decode(self) -> Iterator[SampleRecord]:
        """Yield the samples; each is decoded when its turn comes."""
        return (sample.decode() for sample in self.samples)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SampleRecord)


def encode_sample(record: SampleRecord) -> EncodedSample:
    """Return the record as it is kept."""
    return EncodedSample(wall_seconds(record), _encoder.encode(record))


def encoded_step(samples: Sequence[EncodedSample], groups: Sequence[GroupRecord]) -> EncodedStep:
    """Return a closed step as it is kept."""
    return EncodedStep(samples, groups, sum(len(sample.encoded) for sample in samples))
