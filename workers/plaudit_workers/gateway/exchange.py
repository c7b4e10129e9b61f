"""One request for scores and its answer, as a whole or line by line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.types import Receive, Scope, Send

from plaudit_workers.gateway.bodies import RequestBody, SubmittedSamples
from plaudit_workers.gateway.callers.caller_session import CallerSession
from plaudit_workers.gateway.callers.results import GatewayAnswer, MissingAnswer, answer_of, encode, lines
from plaudit_workers.gateway.callers.waiting import as_they_come, wait_for_accepted, wait_for_all
from plaudit_workers.gateway.refusal import RefusedRequestError

_ACCEPTED_WITHIN_S = 5.0
_QUIET_S = 15.0
_HEADERS = [(b"content-type", b"application/json")]
_STREAM_HEADERS = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would hold lines back
]


class Exchange:
    """Submit the samples of one request at once and answer when they are scored. An ASGI response.

    Args:
        field: of the list in the answer, for a batch.
        answered: called with groups and their answers when these are sent.
    """

    status_code = 200

    def __init__(
        self,
        session: CallerSession,
        body: RequestBody,
        *,
        field: str,
        streams: bool,
        timeout_s: float,
        answered: Callable[[Sequence[SubmittedSamples], Sequence[GatewayAnswer]], None],
    ) -> None:
        self._session = session
        self._body = body
        self._field = field
        self._streams = streams
        self._timeout_s = timeout_s
        self._answered = answered
        self._awaited = [session.await_result(group) for group in body.groups]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request; leave the wait for its results in any case."""
        delivered = False
        try:
            if self._streams:
                await self._send_lines(receive, send)
            else:
                await self._send_all(receive, send)
            delivered = True
        finally:
            self.leave(delivered=delivered)

    def leave(self, *, delivered: bool) -> None:
        """End the wait for the results; see ``CallerSession.leave``."""
        awaited, self._awaited = self._awaited, []
        self._session.leave(awaited, delivered=delivered)

    async def answers(self, receive: Receive) -> list[GatewayAnswer]:
        """Wait for all results.

        Raises:
            RefusedRequestError: time is up, or an id belongs to another sample.
            DisconnectedError: the caller has left.
        """
        try:
            if not await wait_for_all(self._awaited, receive, self._timeout_s):
                ids = ", ".join(group.id for group in self._body.groups[:3])
                message = f"not scored within {self._timeout_s:g} s; the scores wait under their ids ({ids}, …)"
                raise RefusedRequestError(504, "not_scored_yet", message, retry_after_s=1)
            answers = [self._answer(position) for position in range(len(self._awaited))]
            if conflicts := {i: a.error["message"] for i, a in enumerate(answers) if isinstance(a, MissingAnswer)}:
                raise RefusedRequestError(409, "conflict", next(iter(conflicts.values())), samples=conflicts)
        except BaseException:
            self.leave(delivered=False)
            raise
        self._answered(self._body.groups, answers)
        return answers

    async def _send_all(self, receive: Receive, send: Send) -> None:
        answers = await self.answers(receive)
        content = encode({self._field: answers} if self._body.is_batch else answers[0])
        length = (b"content-length", str(len(content)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, length]})
        await send({"type": "http.response.body", "body": content})

    async def _send_lines(self, receive: Receive, send: Send) -> None:
        """Send the headers once Redis holds the samples, then each result; an answer that ends early lacks some."""
        await wait_for_accepted(self._awaited, _ACCEPTED_WITHIN_S)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        async for positions in as_they_come(self._awaited, receive, self._timeout_s, _QUIET_S):
            answers = [self._answer(position) for position in positions]
            self._answered([self._body.groups[position] for position in positions], answers)
            await send({"type": "http.response.body", "body": lines(answers) or b"\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _answer(self, position: int) -> GatewayAnswer:
        return answer_of(self._body.groups[position], self._awaited[position].result.result())
