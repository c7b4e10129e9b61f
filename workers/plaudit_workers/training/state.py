"""Hold what the parts of the conductor share: the run's plan and context, and its current state.

``RunContext`` holds what does not change: ``RunPlan`` (of an ``RLJob``, or made by hand in simulations), streams, data,
clock. ``RunState`` holds what does: the announced policy, the ledger, ``PromptOrder`` (which prompt a position gets),
``Lineage`` (which policy versions belong to the surviving line of checkpoints).
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, Self

from plaudit_job.spec.rewards import AuditSpec
from plaudit_job.spec.rljob import RLJob, SandboxesSpec
from plaudit_job.spec.rollout import SamplingSpec, SkipSolvedSpec, ValidationSamplingSpec
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Announcement, PolicyVersion, Sampling
from plaudit_wire.redis import Lateness
from plaudit_workers.data_facts import DataFacts
from plaudit_workers.files import whole_file
from plaudit_workers.stream.trainer import StaleIncarnationError, TrainerStreams
from plaudit_workers.stream.transport import Transport
from plaudit_workers.training.schedule import Positions, Schedule, TrainerLedger
from plaudit_workers.training.sinks import Sinks

logger = get_logger(__name__)
OrderSnapshot = dict[str, Any]
"""Plain data: JSON can hold it."""
LINEAGE_FILE = "incarnations.json"


@dataclass(frozen=True)
class PromptRow:
    """Hold one prompt, ready for the model."""

    row: int
    """Index in the file, from 0."""
    data_source: str
    prompt_text: str
    """Chat template applied."""
    prompt_ids: bytes
    """int32[num_prompt_tokens], little-endian."""
    ground_truth: Any
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Empty where the data holds text."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Further columns, for scorers."""
    images: tuple[str, ...] = ()
    """Digests of its images; ``prompt_ids`` has a single token for each."""


class PromptSource(Protocol):
    """Provide an endless sequence of prompts, addressed by one number: ``data.PromptData``, or a simulated one."""

    def __len__(self) -> int:
        """Return the number of prompts of one epoch."""

    def prompt_at(self, position: int) -> PromptRow:
        """Return the prompt that is admitted as number ``position`` (from 0), if none is skipped."""

    def row_at(self, position: int) -> int:
        """Return a number of that prompt which is the same in every epoch."""


class PromptOrder:
    """Choose the prompt of each position: the next one in the data's order that the run does not always solve. Pure.

    ``data.train.skipSolved``. Positions are what the schedule admits; a place is a number for
    ``PromptSource.prompt_at``. A position of step s may be admitted once version s - 1 - k is published, so its place
    depends on the results of steps up to s - 1 - k and on nothing later, whether it is known by then or not: with
    ``order: step`` the prompts depend on the results alone, never on the speed of workers, also after a resume.

    Args:
        rule: None: a position's place is its number from the first one of the data.
    """

    def __init__(self, rule: SkipSolvedSpec | None = None, max_staleness: int = 0) -> None:
        self._first = 0
        """The position of place 0; above 0 in a run that continues a checkpoint of other data."""
        self._rule = rule
        self._max_staleness = max_staleness
        self._end = 0
        """All positions below it have a place."""
        self._next_place = 0
        self._places: dict[int, int] = {}
        """Places of positions that may still be asked for; a missing one below ``_end`` counts from ``_first``."""
        self._visits: dict[int, int] = {}
        """Row → visits that solved it, -1 once one did not; of the results that are counted."""
        self._pending: dict[int, list[tuple[int, bool]]] = {}
        """Step → (row, solved) of results that positions of later steps depend on."""
        self.num_solved = 0
        """Rows that are skipped."""

    def place(self, position: int, step_of: Callable[[int], int], source: PromptSource) -> int:
        """Return the place of a position that is admitted now; give every position up to it one that has none."""
        if self._rule is None:
            return position - self._first
        while self._end <= position:
            self._count_until(step_of(self._end) - 1 - self._max_staleness)
            self._places[self._end] = self._next_unsolved(source)
            self._end += 1
        return self._places.get(position, position - self._first)

    def record(self, position: int, step: int, mean_reward: float, source: PromptSource) -> None:
        """Record the mean reward, over samples with a score, of a group that ended in ``step`` and has a place."""
        if self._rule is not None:
            row = source.row_at(self._places.get(position, position - self._first))
            self._pending.setdefault(step, []).append((row, mean_reward >= self._rule.threshold))

    def forget_ended(self, positions: Positions) -> None:
        """Drop the places of positions that are neither in flight nor to be admitted again."""
        awaited = {flight.position for flight in positions.in_flight.values()} | positions.returned.keys()
        self._places = {
            position: place
            for position, place in self._places.items()
            if position in awaited or not positions.was_admitted(position)
        }

    def snapshot(self) -> OrderSnapshot | None:
        """Return the state for a checkpoint; None where places are positions."""
        if self._rule is None:
            return {"first": self._first} if self._first else None
        return {
            "first": self._first,
            "end": self._end,
            "next_place": self._next_place,
            "places": sorted(self._places.items()),
            "visits": sorted(self._visits.items()),
            "pending": [[step, results] for step, results in sorted(self._pending.items())],
        }

    def restore(self, snapshot: OrderSnapshot | None, positions: Positions, *, with_results: bool = True) -> None:
        """Continue from a checkpoint.

        Args:
            snapshot: its state; None: it was written without a rule, where position and place are the same.
            positions: the training positions of that checkpoint's ledger.
            with_results: False: forget the results, which are another run's.
        """
        self._first = (snapshot or {}).get("first", 0)
        if snapshot is None or "end" not in snapshot:
            self._end = max([positions.cursor, *(position + 1 for position in positions.ahead)])
            self._next_place = self._end - self._first
            return
        self._end, self._next_place = snapshot["end"], snapshot["next_place"]
        self._places = dict(snapshot["places"])
        if with_results:
            self._visits = dict(snapshot["visits"])
            self._pending = {step: [(row, solved) for row, solved in own] for step, own in snapshot["pending"]}
            self._count_solved()

    def begin(self, positions: Positions) -> None:
        """Begin other data at its first prompt.

        Args:
            positions: those of a ledger that has begun anew (``TrainerLedger.begun_anew``).
        """
        self._first = self._end = min([positions.cursor, *positions.returned])

    def _count_until(self, step: int) -> None:
        for ended in sorted(number for number in self._pending if number <= step):
            for row, solved in self._pending.pop(ended):
                before = self._visits.get(row, 0)
                self._visits[row] = before + 1 if solved and before >= 0 else -1
            self._count_solved()

    def _count_solved(self) -> None:
        self.num_solved = sum(map(self._is_solved, self._visits))

    def _is_solved(self, row: int) -> bool:
        return self._rule is not None and self._visits.get(row, 0) >= self._rule.min_visits

    def _next_unsolved(self, source: PromptSource) -> int:
        """Return the next place that is not skipped; the very next one if all rows are solved."""
        place = self._next_place
        while self.num_solved < len(source) and self._is_solved(source.row_at(place)):
            place += 1
        self._next_place = place + 1
        return place


@dataclass(frozen=True)
class ValidationPlan:
    """Hold interval and sampling of validations."""

    every_steps: int
    samples_per_prompt: int
    sampling: Sampling
    before_training: bool = True

    def is_due(self, step: int, last_step: int) -> bool:
        """Return True if the policy after ``step`` is validated (0: before the first step)."""
        if step == 0 and not self.before_training:
            return False
        return step % self.every_steps == 0 or step == last_step


@dataclass(frozen=True)
class RunPlan:
    """Hold the plan of a run."""

    schedule: Schedule
    samples_per_prompt: int
    sampling: Sampling
    seed: int = 1
    validation: ValidationPlan | None = None
    max_validation_in_flight: int = 256
    """Validation groups admitted and not ended, beside the training groups."""
    checkpoint_every_steps: int = 10
    resume_from: str = ""
    """Another run's checkpoint to start from; empty: start from the job's model."""
    rollouts_sleep: bool = False
    """Rollouts free their GPUs while the trainer updates."""
    models_sleep: bool = False
    """Served models do, or some of them."""
    keep_samples: bool = True
    auditors: Mapping[str, AuditSpec] = field(default_factory=dict)
    """The scorers that only audit, by name."""
    watches_drift: bool = False
    """The drift of a scorer is watched."""
    sandboxes: SandboxesSpec | None = None
    """The machines of samples; None: samples have none."""
    filter_truncated: bool = False
    """A sample that ended at a limit counts as one without a score."""
    skip_solved: SkipSolvedSpec | None = None
    """The prompts that are skipped because the run has always solved them; None: none."""
    retry_pauses_s: tuple[float, ...] = (10.0, 60.0, 300.0)
    """Pauses before the prompts of a step with too many failed scores are admitted again; after the last the job fails.
    """

    @classmethod
    def from_job(cls, job: RLJob) -> Self:
        """Read a resolved job."""
        spec = job.spec
        algorithm = spec.algorithm
        validation = spec.data.validation
        return cls(
            schedule=Schedule(
                steps=algorithm.steps,
                prompts_per_step=algorithm.prompts_per_step,
                mini_batches_per_step=algorithm.mini_batches_per_step,
                max_staleness=algorithm.max_staleness,
                order=algorithm.order,
                max_failed_share=spec.reward.max_failed_share,
                max_replaced=algorithm.max_replaced,
            ),
            samples_per_prompt=algorithm.samples_per_prompt,
            sampling=_sampling(spec.rollout.sampling),
            seed=spec.seed,
            validation=None
            if validation is None
            else ValidationPlan(
                every_steps=validation.every_steps,
                samples_per_prompt=validation.samples_per_prompt,
                sampling=_sampling(spec.rollout.sampling, validation.sampling),
                before_training=validation.before_training,
            ),
            checkpoint_every_steps=spec.trainer.checkpoint.every_steps,
            resume_from=spec.trainer.checkpoint.resume_from,
            rollouts_sleep=spec.rollout.sleep_during_updates,
            models_sleep=spec.reward.sleeping_models,
            keep_samples=spec.metrics.keep_samples,
            auditors=spec.reward.auditors,
            watches_drift=bool(spec.reward.watched),
            sandboxes=spec.sandboxes if spec.uses_sandboxes else None,
            filter_truncated=algorithm.filter_truncated,
            skip_solved=spec.data.train.skip_solved,
        )


def _sampling(training: SamplingSpec, validation: ValidationSamplingSpec | None = None) -> Sampling:
    """Return the sampling of training; for that of validation, which has no ends of its own, both."""
    given = training.model_dump(by_alias=False)
    if validation is not None:
        given |= validation.model_dump(by_alias=False, exclude_none=True)
    return Sampling(**given)


@dataclass(frozen=True)
class _Exchange:
    """Hold one question for the server's time."""

    trip_s: float
    """Seconds until the reply: the error of ``offset_s`` is at most half of them."""
    offset_s: float
    """The server's clock less this host's monotonic one; the reply counts for the middle of the round trip."""
    asked: float
    """When the question was sent (monotonic)."""
    reply_s: float
    """Seconds until the reply, without those in which this process woke up late."""

    def contradicts(self, other: _Exchange) -> bool:
        """Return True if both can be right only when one of the clocks was set between them."""
        return abs(self.offset_s - other.offset_s) > (self.trip_s + other.trip_s) / 2 + _DRIFT_S


_trip_s = attrgetter("trip_s")
_RECENT_EXCHANGES = 60
"""About a minute of them."""
_FIRST_EXCHANGES = 4
_FEWEST_REPLIES = 5
_OUTAGE_S = 1.0
_MOST_OUTAGES = 1000
_DRIFT_S = 0.01
"""Two clocks drift apart by less than that in a minute."""
_SLEW = 0.01
"""The clock loses at most this share of a second each second, so that no duration is off by more ..."""
_CLOCK_SET_S = 1.0
"""... but follows at once, between two steps, when Redis's was set by more: its stamps would fit nothing for hours."""


class ServerClock:
    """Estimate the clock of Redis's host: an offset to the monotonic clock, which never falls but in ``settle``.

    Waits and closings are stamped with it, so that they fit what the stream scripts stamped. The offset is that of the
    fastest of the newest round trips, as in NTP: a paused Redis, which replies late, does not move it. When Redis's
    clock itself is set, the offset stays until ``settle``, so that no duration contains the jump; until then
    ``set_by_s`` tells that Redis's stamps do not fit.

    Args:
        ask: returns the server's seconds since the epoch.
    """

    def __init__(self, ask: Callable[[], Awaitable[float]]) -> None:
        self._ask = ask
        self._exchanges: deque[_Exchange] = deque(maxlen=_RECENT_EXCHANGES)
        self._offset_s = self._target_s = time.time() - time.monotonic()
        self._slewed_at = time.monotonic()
        self._newest = 0.0
        self.set_by_s = 0.0
        """By how much Redis's clock was set since ``settle``; 0: by less than a second."""
        self._unanswered_since: float | None = None
        self._outages: deque[tuple[float, float]] = deque(maxlen=_MOST_OUTAGES)

    async def synchronise(self) -> None:
        """Ask the server; the first time more than once, since one reply alone may be late."""
        if not self._exchanges:
            self._exchanges += [await self._exchange() for _ in range(_FIRST_EXCHANGES)]
            self._offset_s = self._target_s = min(self._exchanges, key=_trip_s).offset_s
            return
        exchange, known = await self._exchange(), min(self._exchanges, key=_trip_s)
        if exchange.contradicts(known):
            self._exchanges.clear()
        elif exchange.trip_s < known.trip_s and abs(self._target_s - known.offset_s) <= known.trip_s / 2:
            self._move(exchange.offset_s)  # the same clock, known better
        self._exchanges.append(exchange)
        off_s = exchange.offset_s - self._target_s
        if abs(off_s) > _CLOCK_SET_S + exchange.trip_s / 2:
            self.set_by_s = off_s

    async def _exchange(self) -> _Exchange:
        asked = time.monotonic()
        self._unanswered_since = self._unanswered_since or asked  # a question that failed is still unanswered
        with Lateness() as late:
            server_s = await self._ask()
        replied = time.monotonic()
        # Not until the reply was read: this process may have been busy, while Redis had answered at once.
        answered = min(server_s - self._offset_at(replied), replied)
        if answered - self._unanswered_since > _OUTAGE_S:
            self._outages.append((self._unanswered_since, answered))
        self._unanswered_since = None
        reply_s = max(replied - asked - late.seconds, 0.0)
        return _Exchange(replied - asked, server_s - (asked + replied) / 2, asked, reply_s)

    def outages(self, since: float) -> list[tuple[float, float]]:
        """Return when the server did not answer for over a second: stretches of its clock that end after ``since``."""
        now, asked = time.monotonic(), self._unanswered_since
        lasting = [(asked, now)] if asked is not None and now - asked > _OUTAGE_S else []
        offset_s = self._offset_at(now)
        stretches = [(began + offset_s, ended + offset_s) for began, ended in (*self._outages, *lasting)]
        return [(began, ended) for began, ended in stretches if ended > since]

    def reply_s(self, since: float) -> float:
        """Return the first quartile of the server's replies since then (its clock), and at least of the newest five.

        A quarter that came at once says that the server is fast: the rest came while this process was busy, or the
        server paused, which is a cause of its own.
        """
        asked_after = since - self._offset_at(time.monotonic())
        num_replies = max(_FEWEST_REPLIES, sum(each.asked >= asked_after for each in self._exchanges))
        replies_s = sorted(each.reply_s for each in list(self._exchanges)[-num_replies:])
        return replies_s[len(replies_s) // 4]

    def settle(self) -> float:
        """Follow a Redis whose clock was set. Call it where no duration runs.

        Returns:
            The seconds by which this clock was set at once, for points in time that were taken before; usually 0.
        """
        self.set_by_s = 0.0
        best = min(self._exchanges, key=_trip_s, default=None)
        if best is None or abs(best.offset_s - self._target_s) <= best.trip_s / 2 + _DRIFT_S:
            return 0.0
        set_by_s, before = best.offset_s - self._target_s, self.now()
        logger.warning("the clock of Redis was set", seconds=round(set_by_s, 3))
        self._move(best.offset_s)
        if abs(set_by_s) > _CLOCK_SET_S:
            self._offset_s, self._newest = best.offset_s, 0.0
        return self.now() - before

    def _move(self, offset_s: float) -> None:
        """Take an offset: a larger one at once, a smaller one slowly."""
        now = time.monotonic()
        self._offset_s = max(self._offset_at(now), offset_s)
        self._target_s, self._slewed_at = offset_s, now

    def _offset_at(self, monotonic_s: float) -> float:
        return max(self._offset_s - _SLEW * (monotonic_s - self._slewed_at), self._target_s)

    def now(self) -> float:
        """Return seconds since the epoch on the server's clock; never less than before, since ``settle``."""
        monotonic_s = time.monotonic()
        self._newest = max(self._newest, monotonic_s + self._offset_at(monotonic_s))
        return self._newest


@dataclass
class Lineage:
    """Map each incarnation to the version it continued from; ``0.<step>`` if it started from the job's own model.

    Every trainer that takes over is an incarnation. Versions that an older one published after the one from which it
    continues are a lost future. The lineage is stored beside the checkpoints, because a checkpoint does not contain
    its successors.
    """

    parents: dict[int, PolicyVersion] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """Return the highest incarnation so far; 0 before the first."""
        return max(self.parents, default=0)

    def survives(self, version: PolicyVersion, head: PolicyVersion) -> bool:
        """Return True if ``version`` is ``head`` or one of its ancestors.

        An incarnation first publishes the weights that it continued from: the older version under another name.
        """
        parent = self.parents.get(version.incarnation)
        while parent is not None and version.number == parent.number:
            version, parent = parent, self.parents.get(parent.incarnation)
        ancestor: PolicyVersion | None = head
        while ancestor is not None:
            if version.incarnation == ancestor.incarnation:
                return version.number <= ancestor.number
            ancestor = self.parents.get(ancestor.incarnation)
        return False

    def rules_out(self, version: PolicyVersion) -> bool:
        """Return True if a later incarnation continued from an older version, so that ``version`` is a lost future."""
        newest = PolicyVersion(self.newest, sys.maxsize)
        return version.incarnation < self.newest and not self.survives(version, newest)

    @classmethod
    def read(cls, folder: Path) -> Lineage:
        """Read the lineage in a folder of checkpoints; empty if there is none."""
        try:
            stored = json.loads((folder / LINEAGE_FILE).read_text())
        except FileNotFoundError:
            return cls()
        return cls({int(key): PolicyVersion(*parent) for key, parent in stored.items()})

    def write(self, folder: Path) -> None:
        """Write the lineage atomically."""
        stored = {
            str(incarnation): [parent.incarnation, parent.number]
            for incarnation, parent in sorted(self.parents.items())
        }
        with whole_file(folder / LINEAGE_FILE) as temporary:
            temporary.write_text(json.dumps(stored))


def refuse_replaced(folder: Path, incarnation: int) -> None:
    """Check that no later trainer has begun; called again right before a checkpoint gets its name.

    Raises:
        StaleIncarnationError: one has. A late checkpoint could replace one of the successor's, or delete its parent.
    """
    if Lineage.read(folder).newest > incarnation:
        raise StaleIncarnationError(f"a later trainer than incarnation {incarnation} writes checkpoints")


@dataclass(frozen=True)
class RunContext:
    """Hold everything of one run that does not change."""

    plan: RunPlan
    folder: Path
    transport: Transport
    streams: TrainerStreams
    data: PromptSource
    sinks: Sinks
    clock: ServerClock
    validation_data: PromptSource | None = None
    data_facts: DataFacts | None = None
    """What the training data is; None where it is no file."""
    data_notice: str = ""
    """A message for people: how many rows of the training data are used."""
    worker: str = "trainer"
    """Name in heartbeats."""


@dataclass
class RunState:
    """Hold the current state of the run."""

    incarnation: int
    lineage: Lineage
    announcement: Announcement
    ledger: TrainerLedger = field(default_factory=TrainerLedger)
    order: PromptOrder = field(default_factory=PromptOrder)
    closing: int = 0
    """Calls in progress that end groups: the ledger has counted these ends, Redis perhaps not yet."""
    paused_until: float = 0.0
    """No training prompts are admitted before this time (server's clock), because a step could not be trained."""
    problem: str = ""
    """Why the run makes no progress now, for people; the trainer's heartbeat carries it."""
    doing: str = ""
    """What the trainer does for the open step, for people; empty while it waits for groups."""
    counters_suspect: bool = False
    """Redis's counters may differ from the ledger (lost keys, groups that reappeared)."""

    @contextmanager
    def at_work(self, doing: str) -> Iterator[None]:
        """Report what the trainer does while the context lasts."""
        self.doing = doing
        try:
            yield
        finally:
            self.doing = ""

    @property
    def version(self) -> PolicyVersion:
        """Return the newest published policy."""
        return self.announcement.version
