"""``RewardClient``: one session of a scoring service, for a trainer or any other program."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Service
from plaudit_wire.outage import OUTAGE
from plaudit_wire.sample import Sample
from plaudit_workers.client.connect import ServiceError, connect
from plaudit_workers.client.inbox import Inbox
from plaudit_workers.client.result import Result
from plaudit_workers.scoring.offline.lines import SampleInput, sample_input
from plaudit_workers.stream.connection import RedisAddress, Transport
from plaudit_workers.stream.sessions import (
    LARGEST_GROUP,
    SessionGoneError,
    SessionTakenError,
    StreamSession,
    Submission,
)
from plaudit_workers.supervision import set_within

logger = get_logger(__name__)

KEPT_S = 86_400.0
"""Seconds that a session and its results are kept without a keep-alive of its client: a day."""

_GROUPS_A_PIPELINE = 64
_RESULTS_A_READ = 256
_UPKEEP_EVERY_S = 1.0
_CHECK_LOSSES_EVERY_S = 5.0
_ROOM_PAUSE_S = 0.2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ID = re.compile(r"[^\s:]\S{0,199}")

_LEFT_WITHIN_S = 10.0

SampleLike = SampleInput | Mapping[str, Any]
"""A sample, or a mapping with its fields."""


class RewardClient:
    """Submit samples to a scoring service and receive their scores. Use it as an async context, from one event loop.

    Every sample that ``submit`` has accepted gets exactly one result, even if workers die. A result is acknowledged
    when the caller requests the next one from ``results``, or leaves the context without an exception. Results that
    are not acknowledged are delivered again to the next client of the same session.

    Args:
        url: Redis of the service: ``redis://host:port/0`` or ``rediss://…``, without a password.
        run: id of the service's run; empty: the only service of ``job``, or the only one in this Redis.
        username: of Redis; empty: the user ``default``.
        session: name under which a later client can continue after this one was killed; empty: a random name, whose
            unfinished work is given up when the context is left.
        keep_s: seconds that the session and its results are kept without a keep-alive of a client.
        wait_s: seconds to wait for a service that does not exist yet.
    """

    def __init__(
        self,
        url: str | RedisAddress,
        *,
        run: str = "",
        job: str = "",
        password: str = "",
        username: str = "",
        session: str = "",
        keep_s: float = KEPT_S,
        wait_s: float = 0.0,
    ) -> None:
        if session and not _NAME.fullmatch(session):
            raise ServiceError(f"session {session!r}: give at most 100 letters, digits, '.', '_' and '-'")
        self._where = {"run": run, "job": job}
        self._address = RedisAddress(url, password, username) if isinstance(url, str) else url
        self._named = bool(session)
        self.session = session or uuid.uuid4().hex
        self._keep_s = keep_s
        self._wait_s = wait_s
        self._transport: Transport
        self._session: StreamSession
        self.service: Service
        self._inbox = Inbox()
        self._by_iteration = True
        self._ended = False
        self._submitting = 0
        self._check_losses_at = 0.0
        self._changed = asyncio.Event()
        self._background: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._transport, self.service = await connect(self._address, wait_s=self._wait_s, **self._where)
        self._session = StreamSession(self._transport, self.session, self.service, self._keep_s)
        try:
            await self._session.open()
            self._inbox.waiting = dict.fromkeys(await self._session.groups())
        except BaseException:
            await self._transport.close()
            raise
        self._background = asyncio.create_task(self._receive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._background is not None
        self._background.cancel()
        await asyncio.gather(self._background, return_exceptions=True)
        try:
            if error is None and self._by_iteration:
                self._inbox.handle_yielded()
            async with asyncio.timeout(_LEFT_WITHIN_S):
                if not self._ended:
                    await self._acknowledge()
                if not self._named and not self._ended:
                    await self._session.end()
        except (ServiceError, SessionTakenError, *OUTAGE) as problem:  # a timeout is one of them
            logger.warning("cannot end the session", error=str(problem))
        finally:
            await self._transport.close()

    @property
    def outstanding(self) -> int:
        """Return the number of submitted groups without a result in this session; a single sample is a group."""
        return len(self._inbox.waiting)

    async def submit(self, samples: Iterable[SampleLike]) -> list[str]:
        """Submit samples, each on its own; wait while the session has as many in work as it may.

        Return their ids, in the same order. A sample whose id was submitted before is not scored again.

        Raises:
            ServiceError: a sample or an id is invalid; or another client has opened the session.
        """
        inputs = [_checked(sample) for sample in samples]
        ids = [_checked_id(sample.id) or uuid.uuid4().hex for sample in inputs]
        groups = {self._session.group_id(own): [sample] for own, sample in zip(ids, inputs, strict=True)}
        await self._submit(groups)
        return ids

    async def submit_group(self, samples: Sequence[SampleLike], id: str = "") -> str:  # noqa: A002 (what it is)
        """Submit samples of one prompt, for group-scope scorers to score together; wait like ``submit``.

        Return the id of the group; its results come one after the other, with ``index`` 0, 1, ….

        Raises:
            ServiceError: as ``submit``; also for no samples, or more than 1,024.
        """
        if not 1 <= len(samples) <= LARGEST_GROUP:
            raise ServiceError(f"the group has {len(samples)} samples: submit 1 to {LARGEST_GROUP}")
        own = _checked_id(id) or uuid.uuid4().hex
        await self._submit({self._session.group_id(own): [_checked(sample) for sample in samples]})
        return own

    async def results(self, *, follow: bool = False, acknowledge: bool = True) -> AsyncGenerator[Result, None]:
        """Yield results as they arrive, in no particular order; iterate from one task at a time.

        Ends when no submission of this session is outstanding and no ``submit`` is under way.

        Args:
            follow: wait for more results instead of ending.
            acknowledge: acknowledge each result when the caller requests the next one; False: only when the caller
                passes its id to ``acknowledge``.

        Raises:
            ServiceError: another client has opened the session.
        """
        self._by_iteration = acknowledge
        if acknowledge:
            self._inbox.handle_yielded()  # by an iteration that ended early
        num_yielded = 0
        while True:
            while (arrived := self._inbox.next()) is not None:
                result, complete = arrived
                yield result
                if acknowledge and complete:
                    self._inbox.handle([complete])
                num_yielded += 1
                if num_yielded % _GROUPS_A_PIPELINE == 0:
                    await self._acknowledge()
            await self._acknowledge()
            if self._inbox.is_idle and not self._submitting and not follow:
                return
            await self._change(_UPKEEP_EVERY_S)

    async def acknowledge(self, ids: Iterable[str]) -> None:
        """Acknowledge the results of these samples or groups; for ``results(acknowledge=False)``."""
        self._inbox.handle(self._session.group_id(own) for own in ids)
        await self._acknowledge()

    async def end(self) -> None:
        """End the session, named or not: delete its data and stop scoring its samples."""
        await self._session.end()
        self._ended = True

    async def _submit(self, groups: Mapping[str, Sequence[SampleInput]]) -> None:
        self._submitting += 1
        try:
            items = iter(groups.items())
            while batch := dict(itertools.islice(items, _GROUPS_A_PIPELINE)):
                left = {group: _samples(group, inputs) for group, inputs in batch.items()}
                while left:
                    if not await self._offer(left):
                        await self._change(_ROOM_PAUSE_S)
        finally:
            self._submitting -= 1

    async def _offer(self, left: dict[str, list[Sample]]) -> bool:
        """Submit the remaining groups and remove those that are accepted. Return False when there is no room now."""
        try:
            answers = await self._session.submit_many(left)
        except SessionGoneError:
            await self._session.open()
            return False
        except SessionTakenError as error:
            raise self._taken_over(error) from error
        for (group, samples), answer in zip(list(left.items()), answers, strict=True):
            if answer is Submission.conflict:
                raise ServiceError(
                    f"id {self._session.own_id(group)!r} was submitted in session {self.session} with another sample: "
                    "give each sample an id of its own"
                )
            if answer in (Submission.submitted, Submission.scored, Submission.returned):
                del left[group]
            if answer in (Submission.submitted, Submission.scored):
                self._inbox.submitted(group, samples)
        self._refuse_to_wait_for_memory(answers)
        return Submission.full not in answers and Submission.memory not in answers

    def _refuse_to_wait_for_memory(self, answers: Sequence[Submission]) -> None:
        """Raise if only this client can free Redis's memory: waiting would never end."""
        if Submission.memory in answers and not self._inbox.waiting and self._inbox.num_arrived:
            raise ServiceError(
                f"Redis's memory is full, and {self._inbox.num_arrived} results of this session wait: iterate "
                "results() while you submit, or give the service more memory"
            )

    async def _receive(self) -> None:
        """Receive results as they arrive and do the session's periodic work, until cancelled."""
        upkeep_at = 0.0
        while True:
            try:
                if time.monotonic() >= upkeep_at:
                    upkeep_at = time.monotonic() + _UPKEEP_EVERY_S
                    await self._maintain_session()
                for group in await self._session.read(_RESULTS_A_READ, _UPKEEP_EVERY_S):
                    self._inbox.take(self._session.own_id(group.group), group)
            except OUTAGE as error:
                self._transport.outages.report(error)
                await asyncio.sleep(_ROOM_PAUSE_S)
            except SessionGoneError:
                await self._session.open()
                self._check_losses_at = upkeep_at = 0.0
            finally:
                self._changed.set()

    async def _maintain_session(self) -> None:
        """Keep the session alive, release overdue groups, end expired sessions, and periodically check for losses."""
        await self._session.acknowledge([])
        await self._session.clean_up()
        if time.monotonic() >= self._check_losses_at:
            self._check_losses_at = time.monotonic() + _CHECK_LOSSES_EVERY_S
            await self._repair_losses()

    async def _repair_losses(self) -> None:
        """Submit again the groups that Redis has lost; read results again if it has restored acknowledged ones."""
        waiting = set(self._inbox.waiting)
        known = await self._session.groups()
        if self._inbox.reappeared(known):
            self._session.read_again()
        lost = waiting - known
        if lost:
            logger.error("Redis has lost submissions; submitting them again", groups=len(lost))
        items = iter(self._inbox.lost(lost).items())
        while batch := dict(itertools.islice(items, _GROUPS_A_PIPELINE)):
            while batch:
                if not await self._offer(batch):
                    await asyncio.sleep(_ROOM_PAUSE_S)

    async def _acknowledge(self) -> None:
        done = self._inbox.to_acknowledge()
        if not done:
            return
        try:
            await self._session.acknowledge(done)
        except SessionGoneError:
            await self._session.open()  # Redis has lost the results with its state
        except SessionTakenError as error:
            raise self._taken_over(error) from error
        self._inbox.acknowledged(done)

    async def _change(self, timeout_s: float) -> None:
        """Wait for results, at most this long; raise the error that ended the receiving task."""
        if self._background is not None and self._background.done():
            error = self._background.exception()
            if isinstance(error, SessionTakenError):
                raise self._taken_over(error) from error
            if error is not None:
                raise error
        await set_within(self._changed, timeout_s)

    def _taken_over(self, error: SessionTakenError) -> ServiceError:
        return ServiceError(f"{error}: give each client a session of its own")


def _samples(group: str, inputs: Sequence[SampleInput]) -> list[Sample]:
    return [each.sample(group, index) for index, each in enumerate(inputs)]


def _checked(sample: SampleLike) -> SampleInput:
    if isinstance(sample, SampleInput):
        return sample
    try:
        return sample_input(sample, SampleInput)
    except ValueError as error:
        raise ServiceError(f"invalid sample: {error}. See plaudit_workers.client.SampleInput") from error


def _checked_id(own: str) -> str:
    if own and not _ID.fullmatch(own):
        raise ServiceError(f"id {own!r}: give at most 200 characters without spaces")
    return own
