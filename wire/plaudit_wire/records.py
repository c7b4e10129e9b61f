"""Define the records of the metrics (one sample, group, step, worker), the scorers' input, and limits of several parts.

| record | written by | read by |
| --- | --- | --- |
| ``Sample`` | rollout (the stream ``samples``) | reward worker; trainer |
| ``GenerationRecord``, ``TurnRecord``, ``CallRecord`` | rollout, with the sample | trainer, metrics service |
| ``ScoringRecord`` | reward worker, with the commit | trainer, metrics service |
| ``Stamps`` | the stream scripts, with the server's clock | trainer, metrics service |
| ``SampleRecord`` | the joiner of the three above: trainer (group's hash), service (event) | every view of samples |
| ``GroupRecord`` | trainer, when it closes a group | metrics service, stored samples |
| ``StepRecord`` | trainer, when it closes a step | ``steps.jsonl``, metrics service |
| ``WorkerRecord`` | every process, in its heartbeat | trainer (weights in use), metrics service |

Points in time are seconds since the epoch on the **transport's** clock (one clock for all processes); durations are
monotonic seconds measured inside one process. ``None`` means "did not happen", never "zero".

``read_fields`` reads a sample's two values in its group's hash, which the transitions write
(``plaudit_workers/stream/lua/shared/group.lua``), each a line of text fields, then msgpack. ``published``: call,
digest, taken, published, entry; the generation (may be empty). ``ended``: call, outcome, taken, committed, deliveries,
first taken; the scoring. ``-`` stands for a missing field.
"""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

VERIFY_S: Final = "verify_s"
"""The extra of a scorer of kind ``verifier`` that holds the seconds of its tests."""
Outcome = Literal["scored", "data_error", "infra_error", "timeout", "skipped", "poison", "given_up"]
"""The end of a sample's scoring. Only ``scored`` carries a value. ``given_up``: its group's deadline passed."""
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
NO_STEP = -1
"""The step of samples that belong to no step: a client of a scoring service submitted them."""
Split = Literal["train", "validation"]
GroupEnd = Literal["trained", "evaluated", "dropped", "returned"]
"""``returned``: by a reward service to its caller."""
CallOutcome = Literal["ok", "error", "timeout", "killed", "refused"]
"""The end of a tool call. ``error``: the tool raised. ``timeout``: it passed its limit. ``killed``: its process ended.
``refused``: it was never run, because the tool is unknown, its arguments are invalid or a limit was reached."""
_DRAW_PARTS = 1 << 16
PAUSE: Final = "pause"
"""``WaitRecord.cause``: too many samples of the step had no score, so the trainer paused before admitting their
prompts again."""
REDIS: Final = "redis"
"""``WaitRecord.cause``: Redis did not answer the trainer."""
UNKNOWN: Final = "unknown"
"""``WaitRecord.cause``: Redis's clock was set, so the stamps of the awaited groups do not give it."""
GROUP_ENDED: Final = "its group was ended before it was scored"
"""``ScoringRecord.reason`` of a sample that nobody needs any more: rolled back, or left when its run ended."""
VALIDATES: Final = "validates"
"""``WorkerRecord.doing`` of a trainer that waits for validation samples."""
LIVE_WITHIN_S: Final = 20.0
"""A process counts as dead when its last heartbeat is older than this."""
LEASE_S: Final = 20.0
"""An entry of a stream that its worker has not renewed for this long may be claimed by others."""
ADMISSION_MEMORY_SHARE: Final = 0.7
"""Share of Redis's memory above which no group is admitted and no session submits."""
INLINE_LIMIT_BYTES: Final = 256 * 1024
"""Larger records are spilled to the shared volume; Redis holds a path and a checksum instead."""
EVENTS_MEMORY_SHARE: Final = 0.1
"""Share of Redis's memory that the stream ``events`` may take."""


class CallRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of a tool."""

    tool: str
    outcome: CallOutcome
    started_s: float
    """Seconds from the start of the sample to the call."""
    call_s: float
    wait_s: float = 0.0
    """The part of ``call_s`` spent waiting for a process."""


class TurnRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of the policy in a sample of several turns, and the tool calls that it made."""

    first: int
    """Index of its first token in the response."""
    tokens: int
    started_s: float
    """Seconds from the start of the sample to the request."""
    generate_s: float
    """Seconds in the engine, including its queue."""
    engine_queue_s: float = 0.0
    calls: list[CallRecord] = []


class SandboxRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The machine of one sample, while its agent used it."""

    start_s: float
    """Seconds that it took to make the machine."""
    claim_s: float = 0.0
    """Seconds that the sample waited for one of ``sandboxes.maxConcurrent`` places before."""
    wait_s: float = 0.0
    """Seconds that its commands waited for a place."""
    exec_s: float = 0.0
    """Seconds of its commands, without their waits."""
    num_commands: int = 0
    cpus: float = 0.0
    """CPUs that it holds while it exists; 0: only its commands and its tests hold one."""
    failed: bool = False
    """It could not be made, or broke through no fault of the policy; or the one before it broke, in which the sample
    had begun."""

    @property
    def waited_s(self) -> float:
        """Return the seconds in which its sample waited for a place or for the machine."""
        return self.claim_s + self.start_s + self.wait_s


class GenerationRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The generation of one sample."""

    worker: str
    generate_s: float
    """Seconds inside the engine, without tool calls, including the engine's queue."""
    prompt_tokens: int
    response_tokens: int
    version_min: int
    """Number of the oldest policy version that sampled one of its tokens."""
    version_max: int
    tool_s: float = 0.0
    engine_queue_s: float = 0.0
    """The part of ``generate_s`` before the engine first scheduled the request."""
    num_preempted: int = -1
    """Preemptions by the engine; -1 when the engine reports none (verl's sentinel, filtered from statistics)."""
    finish_reason: str = "stop"
    logprob_mismatch: float | None = None
    turns: list[TurnRecord] = []
    """The turns of a sample that called tools or generated several times; empty for a single response."""
    replaced_parameters: list[str] = []
    """Parameters that the agent's program asked for, such as ``temperature``, and did not get: the job's own were used.
    """
    sandbox: SandboxRecord | None = None

    @property
    def is_truncated(self) -> bool:
        """Return True if a limit of tokens, turns or time ended the sample."""
        return self.finish_reason in ("length", "timeout")


class _Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold the end of a scoring. ``value`` is present exactly when ``outcome`` is ``scored``."""

    outcome: Outcome
    value: float | None = None
    reason: str | None = None

    @property
    def is_scored(self) -> bool:
        """Return True if there is a score."""
        return self.value is not None

    @property
    def has_failed(self) -> bool:
        """Return True if there is no score, and it was not skipped on purpose."""
        return self.value is None and self.outcome != "skipped"


class ScorerRecord(_Result, frozen=True, omit_defaults=True):
    """Hold one scorer's result for one sample, with its durations."""

    limiter_s: float = 0.0
    """Seconds spent waiting for a rate or concurrency limit."""
    held_s: float = 0.0
    """The part of ``limiter_s`` that the endpoint requested (Retry-After), beside the configured limits."""
    retry_s: float = 0.0
    """Seconds of failed attempts and of the pauses between attempts."""
    throttled_s: float = 0.0
    """The part of ``retry_s`` that the endpoint caused because it had too many requests (status 429)."""
    call_s: float = 0.0
    """Seconds of the last attempt, ``wait_s`` excluded."""
    wait_s: float = 0.0
    """Seconds spent waiting for a free scorer process, over all attempts."""
    of_group: bool = False
    """The scorer is of group scope: its durations are those of the whole group, once all its samples had a score."""
    post_process_s: float = 0.0
    """Seconds in which it then changed the values of the whole group (``post_process_scores``), waits included."""
    attempts: int = 1
    extra: dict[str, float | str] = {}

    @property
    def seconds(self) -> float:
        """Return the seconds from its beginning to its end, waits and retries included."""
        return self.limiter_s + self.wait_s + self.retry_s + self.call_s


class ScoringRecord(_Result, frozen=True, omit_defaults=True):
    """Hold the scoring of one sample."""

    drop_group: bool = False
    """The failure policy of a failed scorer excludes the whole group from training."""
    scorers: dict[str, ScorerRecord] = {}
    limiter_s: float = 0.0
    """``limiter_s``, ``retry_s`` and ``call_s`` divide the scoring time of the scorer that ended last."""
    retry_s: float = 0.0
    call_s: float = 0.0
    worker: str = ""
    version: str = ""
    """Version of the scoring: a digest of its scorers; ``a+b`` where a sample's own scorers were of version ``a`` and
    those of its group of version ``b``. Empty if no worker has scored the sample."""
    alone: float | None = None
    """The value that remains if the group-scope scorers fail, by their ``onFailure``. Absent once they have scored."""


class Stamps(msgspec.Struct, frozen=True, omit_defaults=True):
    """The times of one sample's transitions (seconds since the epoch, transport's clock)."""

    admitted: float
    taken: float | None = None
    """A rollout began to work on it."""
    published: float | None = None
    score_first_taken: float | None = None
    """The first reward worker took it; None unless another worker had to take it again."""
    score_taken: float | None = None
    """The reward worker whose commit was accepted took it."""
    committed: float | None = None
    """It became terminal."""


class Failure(msgspec.Struct, frozen=True):
    """One kind of failure of one scorer; written by the metrics service, read by ``plaudit run``."""

    scorer: str
    outcome: Outcome
    reason: str
    """Of the first sample that failed so; empty when it has none."""
    count: int
    """Samples that failed so."""

    def __str__(self) -> str:
        """Return ``64 × KeyError: 'answer' (reward.py:2 in compute_score)``."""
        return f"{self.count} × {self.reason or self.outcome}"


class SampleRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The complete record of one terminal sample."""

    group: str
    index: int
    split: Split
    step: int
    data_source: str
    stamps: Stamps
    scoring: ScoringRecord
    generation: GenerationRecord | None = None
    deliveries: int = 1
    """Deliveries to reward workers: the first one, and one for each lapsed lease."""

    @property
    def wall_s(self) -> float:
        """Return the seconds from its admission until it became terminal."""
        return (self.stamps.committed or self.stamps.admitted) - self.stamps.admitted


def is_drawn(name: str, share: float) -> bool:
    """Return True if a name belongs to a share of all names; every process draws the same, and larger shares hold more.

    UTF-8 has no lone surrogates, which ids from outside may hold.
    """
    return zlib.crc32(name.encode(errors="replace")) % _DRAW_PARTS < share * _DRAW_PARTS


class GroupRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One group, from its admission to its end. Points in time as in ``Stamps``."""

    group: str
    split: Split
    step: int
    """The step it was closed in (trained, evaluated or dropped)."""
    end: GroupEnd
    num_samples: int
    num_scored: int
    admitted: float
    closed: float
    terminal: float | None = None
    """The last of its samples became terminal."""
    ready: float | None = None
    """The trainer could have taken it; later than ``terminal`` by the group-scope scorers."""
    taken: float | None = None
    """The trainer took it."""
    reason: str = ""
    """The reason of a drop."""


class WaitRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One interval in which the trainer was idle (transport's clock)."""

    start: float
    end: float
    awaited: list[str]
    """Ids of the groups that became ready and ended the wait; empty for a pause."""
    cause: str = ""
    """``PAUSE``, ``REDIS``, ``UNKNOWN``, or empty when the cause follows from the stamps of the awaited groups."""


class StepRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One closed step, as recorded by the trainer."""

    step: int
    incarnation: int
    opened: float
    closed: float
    num_samples: int
    num_groups: int
    statistics: dict[str, float]
    """The keys of docs/metrics.md; JSON has no NaN, so an undefined figure is an absent key."""
    verdict: str = ""
    waits: list[WaitRecord] = []
    labels: dict[str, str] = {}
    """Figures that are text, such as the worker of the slowest sample (docs/metrics.md)."""

    @property
    def length_s(self) -> float:
        """Return the seconds in which a trainer ran the step, without the time between two trainers."""
        return max(self.statistics.get("step_s", self.closed - self.opened), 0.0)


class ScorerWork(msgspec.Struct, frozen=True):
    """The samples that one scorer works on in one reward worker; a group is one."""

    in_flight: int
    oldest_s: float
    """Age of the oldest present attempt in seconds; waits for limits and earlier attempts are not in it."""
    waiting: int = 0
    """Those that wait for a rate or concurrency limit now."""


class SandboxWork(msgspec.Struct, frozen=True, omit_defaults=True):
    """The machines of samples now."""

    held: int = 0
    """Of a rollout: machines in which its conversations work. Of the trainer: all machines of the run."""
    starting: int = 0
    """Machines that are being made."""
    waiting: int = 0
    """Samples that wait for a place for their machine."""
    oldest_wait_s: float = 0.0
    """Age of the oldest such wait in seconds; 0 without one."""


class EngineStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """The requests and the cache of one rollout's engine, as the engine counts them."""

    running: int
    waiting: int
    kv_cache_share: float | None = None
    """Share of the key-value cache in use, 0 to 1; None for an engine without one."""
    first_token_s: float | None = None
    """Mean seconds from a request to its first token, over the newest requests; None before the first."""


class WorkerRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process's heartbeat."""

    worker: str
    role: Literal["trainer", "rollout", "reward", "metrics", "model"]
    slots: int = 0
    busy: int = 0
    ready: bool = True
    version: str = ""
    """The policy version that it has loaded (``incarnation.number``); empty for none."""
    loading: str = ""
    """The policy version whose files it is reading; the trainer does not delete them."""
    needs_files: str = ""
    """The policy version that this rollout could not receive directly, or restore from its delta; the trainer then
    writes its whole files."""
    asleep: str = ""
    """The announcement's ``sleep`` for which this rollout or model server has freed its GPUs, and for which this reward
    worker calls no served model; empty while it has not."""
    calls_held_for: str = ""
    """The same ``sleep``, from a model server to reward workers: hold your calls until this is empty again."""
    circuits_open: list[str] = []
    """Judges that this reward worker does not call for now, because they failed too often."""
    started: float = 0.0
    """When the trainer began to work, seconds since the epoch on the transport's clock; 0 for other roles."""
    scorers: dict[str, ScorerWork] = {}
    """The work of each of a reward worker's scorers."""
    engine: EngineStatus | None = None
    """A rollout's engine; None before it has started and for other roles."""
    problem: str = ""
    """The reason that this process makes no progress, as a sentence for people; empty while it works."""
    notices: list[str] = []
    """From the trainer: messages for people that do not stop it."""
    doing: str = ""
    """What the trainer does for the open step, as a phrase (``updates the policy``); empty while it waits for groups,
    and for other roles."""
    in_agents: int = 0
    """The part of a rollout's ``busy`` that waits for its agents: for tools, environments or users' programs."""
    sandboxes: SandboxWork | None = None
    """From rollouts and the trainer; None for a job without, and for other roles."""
    loaded_s: float = 0.0
    """Seconds in which a rollout loaded the weights that it has; 0 before the first, and for other roles."""
    reply_s: float = 0.0
    """Seconds until Redis replied to this process: the fastest of its newest heartbeats; 0 before the second reply."""


class AgentReward(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reward that an agent's tools or environment gave a sample, or the reason that there is none.

    ``value`` is present exactly when ``outcome`` is ``scored``.
    """

    outcome: Literal["scored", "data_error", "infra_error", "timeout", "skipped"]
    value: float | None = None
    reason: str | None = None


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished response with everything that a scorer may need."""

    group: str
    """Id of the group (the prompt's n samples)."""
    index: int
    """Index among the group's n samples, from 0."""
    data_source: str
    prompt: str
    """The prompt as the model saw it (chat template applied)."""
    response: str
    """The generated text, without special tokens."""
    ground_truth: Any = None
    """``reward_model.ground_truth`` of the data row."""
    extra_info: dict[str, Any] = {}
    """``extra_info`` of the data row."""
    messages: list[dict[str, Any]] = []
    """The prompt's chat messages, where the data holds messages."""
    response_tokens: int = 0
    max_tokens: int = 0
    """The limit on the response's tokens (``sampling.maxTokens``), for length penalties."""
    finish_reason: str = "stop"
    """``stop``, ``length`` (of tokens or turns) or ``timeout``."""
    split: Split = "train"
    completion: list[dict[str, Any]] = []
    """The chat messages after the prompt (assistant, tool, user), where an agent held a conversation; ``response`` is
    its text from the first sampled token to the last."""
    tool_rewards: list[float] = []
    """Rewards that tools returned with their results, in the order of the calls."""
    turn_rewards: list[float] = []
    """Rewards that an environment gave for each turn."""
    agent_reward: AgentReward | None = None
    """The reward of the tools or the environment for the whole sample; None: the agent gives no rewards."""
    environment: dict[str, Any] | None = None
    """Public attributes of the environment's instance at the end of the episode, plain data only; None: there is no
    instance, or it gave no answer."""
    failure: AgentReward | None = None
    """The reason that the conversation broke off: no scorer runs, and the sample gets this outcome without a value."""
    machine: str = ""
    """Name of the machine that its agent left behind (``spec.sandboxes``); empty: it had none."""

    @property
    def num_turns(self) -> int | None:
        """Return the number of messages as verl counts them: user, assistant and tool turns; None without an agent."""
        if not self.completion:
            return None
        num_assistant = len([message for message in self.completion if message.get("role") == "assistant"])
        return 1 + num_assistant + _num_answers(self.completion)

    @property
    def answer(self) -> str:
        """Return the text of the policy's last turn; without an agent the whole response."""
        turns = (message for message in reversed(self.completion) if message.get("role") == "assistant")
        last = next(turns, None)
        return self.response if last is None else str(last.get("content") or "")


def _num_answers(completion: list[dict[str, Any]]) -> int:
    """Count runs of consecutive messages that are not the policy's: the results of parallel calls are one turn."""
    roles = ["assistant", *(message.get("role") for message in completion)]
    return sum(before == "assistant" != after for before, after in pairwise(roles))


class SampleFields(NamedTuple):
    """One sample as its group's hash stores it; msgpack parts stay encoded."""

    stamps: Stamps
    digest: str
    """Digest of its body; empty: it was not published."""
    deliveries: int
    generation: bytes
    """Empty: none."""
    scoring: bytes | None
    """None: it is not terminal."""


def read_fields(admitted: float, published: bytes | None, ended: bytes | None) -> SampleFields:
    """Read the two values of a sample whose group was admitted at ``admitted``; damage raises ``ValueError``."""
    head, _, generation = (published or b"").partition(b"\n")
    _, digest, taken, published_at, _ = head.split() if published else (b"", b"", b"-", b"-", b"")
    head, _, scoring = (ended or b"").partition(b"\n")
    _, _, score_taken, committed, deliveries, first = head.split() if ended else (b"", b"", b"-", b"-", b"1", b"-")
    stamps = Stamps(admitted, *map(_time_of, (taken, published_at, first, score_taken, committed)))
    return SampleFields(stamps, digest.decode(), int(deliveries), generation, scoring if ended else None)


def _time_of(word: bytes) -> float | None:
    return None if word == b"-" else float(word)
