"""Define the messages in the streams, apart from ``plaudit_wire.records.Sample`` (the entry of ``samples``).

| record | written by | read by |
| --- | --- | --- |
| ``Prompt`` | trainer, at admission (``prompts`` entry and the group's hash) | rollout; trainer after a resume |
| ``SampleBody`` | rollout, at publication (the group's hash) | trainer |
| ``Announcement`` | trainer (``state``) | rollout |
| ``Service`` | reward worker of a job without trainer (``service``) | client of the scoring service |

Arrays are raw little-endian bytes (int32 ids, float32 log-probabilities, uint8 masks), so encoding them is free.
An encoded record is one byte of schema version, then msgpack (``encode``/``decode``). The records of the metrics
(``GenerationRecord``, ``ScoringRecord``) travel as plain msgpack, without the version.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from plaudit_wire.records import ADMISSION_MEMORY_SHARE, GenerationRecord, Sample, Split

SCHEMA_VERSION: Final = 1
"""First byte of every encoded record; increased when a field changes its meaning. 0 marks a spilled record."""
Record = TypeVar("Record")
_VERSION_BYTE = bytes([SCHEMA_VERSION])
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


class RecordError(Exception):
    """A record that cannot be encoded, or that this version cannot read: another schema version, or damaged."""


class SchemaVersionError(RecordError):
    """A record of another schema version: a process of that version can read it."""


def decoder(kind: type[Record]) -> msgspec.msgpack.Decoder[Record]:
    """Return the decoder of one type, built once."""
    if kind not in _decoders:
        _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return _decoders[kind]


def encode(record: msgspec.Struct) -> bytes:
    """Encode a record for a stream or a hash; raise ``RecordError`` for a part that passed no gate (``plain``)."""
    try:
        return _VERSION_BYTE + _encoder.encode(record)
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise RecordError(f"a {type(record).__name__} that cannot be encoded: {error}") from error


def digest_of(data: bytes) -> str:
    """Return the BLAKE2b-128 digest of data, as hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def decode(data: bytes, kind: type[Record]) -> Record:
    """Decode a record that ``encode`` wrote; raise ``RecordError`` if it is damaged, or of another version or type."""
    if not data:
        raise RecordError(f"an empty {kind.__name__}")
    if data[:1] != _VERSION_BYTE:
        raise SchemaVersionError(
            f"a {kind.__name__} of schema version {data[:1].hex()}; this process reads {SCHEMA_VERSION}: "
            "run the same version of Plaudit in every process"
        )
    try:
        return decoder(kind).decode(memoryview(data)[1:])
    except msgspec.DecodeError as error:
        raise RecordError(f"a damaged {kind.__name__}: {error}") from error


class PolicyVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A published policy: ``number`` counts steps, ``incarnation`` the trainers that took over the run.

    Orders as a tuple. Text form ``incarnation.number``.
    """

    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Return the version of a text form; raise ``ValueError`` if it is none."""
        incarnation, number = text.split(".")
        return cls(int(incarnation), int(number))


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampling parameters of a prompt (``rollout.sampling``, or those of the validation)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    stop: list[str] = []
    """Texts that end a response; they stay part of it."""
    min_p: float = 0.0
    """Tokens below this share of the likeliest one's probability are left out. Of validation only, as the next two."""
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    """The model's end is left out before so many tokens."""
    stop_token_ids: list[int] = []
    """Tokens that end a response; they stay part of it."""
    ignore_eos: bool = False
    """The model's end of turn does not end a response."""


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One admitted group: a prompt, to be sampled ``n`` times."""

    group: str
    position: int
    """The data cursor: the number of prompts of its split that were first admitted before this one."""
    split: Split
    step: int
    """The step for which it was admitted."""
    n: int
    min_version: PolicyVersion
    """The oldest policy version that may generate it."""
    seed: int
    """From (run seed, split, position); sample ``i`` uses ``seed + i``: a redelivered prompt gives the same samples."""
    sampling: Sampling
    data_source: str
    prompt: str
    """The text that the model sees, with the chat template applied."""
    prompt_ids: bytes
    """int32[num_prompt_tokens]; an image is a single token, which the engine repeats as often as the image needs."""
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []
    attempt: int = 0
    """The number of earlier admissions of this position (it is admitted again after a drop)."""
    images: list[str] = []
    """SHA-256 of each image's file, hexadecimal, in the order of the prompt; the files lie in the run's folder."""


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """A further token sequence of a sample, such as a sub-agent's conversation; trained with the sample's advantage."""

    prompt_ids: bytes
    """int32[P]: everything before the first token that the policy sampled in this branch."""
    response_ids: bytes
    """int32[T]."""
    logprobs: bytes
    """float32[T]."""
    loss_mask: bytes
    """uint8[T]."""
    version_spans: list[tuple[int, int, int]]
    """As in ``SampleBody``."""


class SampleBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tensors of one sample; ``T`` = number of response tokens."""

    response_ids: bytes
    """int32[T]."""
    logprobs: bytes
    """float32[T], under the distribution that was sampled from; 0 where ``loss_mask`` is 0."""
    loss_mask: bytes
    """uint8[T]: 1 where the policy chose the token, 0 for tool output."""
    version_spans: list[tuple[int, int, int]]
    """(first token, incarnation, number): the policy version that sampled from this token on. Begins with token 0."""
    generation: GenerationRecord
    sample: Sample
    """Texts and data columns as the scorers saw them, for stored samples and group-scope scorers."""
    prompt_ids: bytes = b""
    """int32[P] where the agent changed the prompt of this sample, such as by an environment's first observation, or
    where the engine repeated the tokens of images; empty: those of the ``Prompt``."""
    branches: list[Branch] = []
    """Token sequences beside the sample's own, where an agent's conversation forked. No token is in the loss twice."""


class TransferPart(msgspec.Struct, frozen=True):
    """A part of the weights, which one rank of the trainer holds in memory."""

    address: str
    """``host:port`` of the rank."""
    digest: str
    """SHA-256 over the table of its blocks, which has the digest of each block."""


class Transfer(msgspec.Struct, frozen=True):
    """The offer of a version's weights from the trainer's memory (``trainer.weights.transfer: direct``)."""

    token: str
    """Secret of this trainer; a rollout proves that it knows it."""
    num_bytes: int
    """Size of all parts together, as one safetensors file."""
    parts: list[TransferPart]


class Announcement(msgspec.Struct, frozen=True, omit_defaults=True):
    """The policy that rollouts must hold."""

    version: PolicyVersion
    path: str
    """Folder of the safetensors, on the shared volume; empty if the version is only offered directly."""
    digest: str
    """SHA-256 over the weight files."""
    transfer: Transfer | None = None
    """Offer of the same weights without files."""
    sleep: str = ""
    """Not empty: the trainer needs the GPUs. Those that take turns with it (``sleepDuringUpdates``) free their memory
    and report this value as ``asleep``; they continue, rollouts with the announced weights, once it is empty."""


class Service(msgspec.Struct, frozen=True):
    """The offer of a scoring service to its clients (``state.service``). A client needs this record, not the job."""

    job: str
    """Name of the RLJob."""
    scorers: list[str]
    """Names of its scorers, in the job's order."""
    group_scorers: bool
    """Group-scope scorers run after the samples' own scorers."""
    group_deadline_s: float
    """Seconds from a group's submission to its release; its group-scope scorers get as long again."""
    room: int
    """Samples that one session may have in work. A larger group is accepted when nothing else is in work."""
    memory_share: float = ADMISSION_MEMORY_SHARE
    """Submissions are refused above this share of Redis's memory."""
    kept_share: float = 0.0
    """Share of the groups that are stored with their results, for auditors."""
    scoring: str = ""
    """Version of the scorers, as in each result; while workers are replaced, of some of them."""


class GroupDelivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """Entry of ``groups``: all samples of this group are terminal and its group-scope scorers are due."""

    group: str


class Tensors(msgspec.Struct, frozen=True, array_like=True):
    """The part of a ``SampleBody`` that only the trainer reads, as the group's hash stores it."""

    response_ids: bytes
    logprobs: bytes
    loss_mask: bytes
    version_spans: list[tuple[int, int, int]]
    prompt_ids: bytes = b""
    branches: list[Branch] = []


class EncodedBody(NamedTuple):
    """A ``SampleBody`` in the three parts that have different readers."""

    tensors: bytes
    sample: bytes
    """Entry of ``samples`` and field of the hash."""
    generation: bytes
    digest: str
    """BLAKE2b-128 over tensors and sample: identifies the body that a score belongs to."""


def encode_body(body: SampleBody) -> EncodedBody:
    """Split and encode a body."""
    tensors = encode(
        Tensors(body.response_ids, body.logprobs, body.loss_mask, body.version_spans, body.prompt_ids, body.branches)
    )
    sample = encode(body.sample)
    digest = hashlib.blake2b(tensors, digest_size=16)
    digest.update(sample)
    return EncodedBody(tensors, sample, _encoder.encode(body.generation), digest.hexdigest())


def decode_body(tensors: bytes, sample: bytes, generation: bytes) -> SampleBody:
    """Decode and join the parts of a body; raise ``RecordError`` as ``decode`` does."""
    read = decode(tensors, Tensors)
    parts = decoder(GenerationRecord).decode(generation), decode(sample, Sample)
    return SampleBody(
        read.response_ids, read.logprobs, read.loss_mask, read.version_spans, *parts, read.prompt_ids, read.branches
    )
