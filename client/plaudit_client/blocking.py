"""Call ``RewardClient`` from programs without an event loop: ``SyncRewardClient`` runs one in a background thread.

Nothing here waits without an end: ``LoopThread.stop`` ends the calls that still wait, a forked child starts a thread of
its own, and what the garbage collector may end in any thread, ``score_many``, takes no lock and waits for nobody.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from plaudit_client.client import MOST_UNDER_WAY, RewardClient, SampleMapping
from plaudit_client.result import InvalidSampleError, Result, UnavailableError

T = TypeVar("T")


class SyncRewardClient:
    """Score samples with a reward service; arguments and methods are those of ``RewardClient``.

    Any number of threads may call it at once: their samples share requests. Close it, or use it as a context, to end
    its thread; calls that still wait then end with ``UnavailableError``. A forked child may go on using it, with a
    thread and connections of its own.
    """

    def __init__(self, url: str, token: str = "", **arguments: Any) -> None:
        self._client = RewardClient(url, token, **arguments)
        self._make = functools.partial(type(self), url, token, **arguments)
        self._thread = LoopThread("plaudit-client")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._client.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return self._make, ()

    def __enter__(self) -> SyncRewardClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the background thread; a later call starts both again."""
        self._thread.stop(self._client.aclose)

    def score(self, sample: SampleMapping) -> Result:
        """Score one sample; see ``RewardClient.score``."""
        return self._thread.run(self._client.score(sample))

    def score_many(self, samples: Iterable[SampleMapping]) -> Iterator[Result]:
        """Score samples and yield results in order of completion; see ``RewardClient.score_many``.

        ``samples`` is read in the caller's thread: a source that blocks delays nobody else.
        """
        process = os.getpid()
        ended: queue.SimpleQueue[tuple[int, Future[Result]]] = queue.SimpleQueue()
        under_way: set[Future[Result]] = set()
        numbered = enumerate(samples)
        try:
            while True:
                for index, sample in itertools.islice(numbered, MOST_UNDER_WAY - len(under_way)):
                    call = self._thread.submit(self._client.score(sample))
                    under_way.add(call)
                    call.add_done_callback(functools.partial(_put_ended, ended, index))
                if os.getpid() != process:
                    raise UnavailableError("score_many began before this process was forked: call it again here")
                if not under_way:
                    return
                index, call = ended.get()
                under_way.discard(call)
                try:
                    result = _result_of(call)
                except InvalidSampleError as error:
                    raise InvalidSampleError(f"sample {index}: {error}") from error
                yield dataclasses.replace(result, index=index)
        finally:
            if os.getpid() == process:
                for call in under_way:
                    call.cancel()

    def score_group(self, samples: Sequence[SampleMapping], id: str = "") -> list[Result]:  # noqa: A002 (what it is)
        """Score the samples of one prompt together; see ``RewardClient.score_group``."""
        return self._thread.run(self._client.score_group(samples, id))

    def service(self) -> dict[str, Any]:
        """Return the service's description; see ``RewardClient.service``."""
        return self._thread.run(self._client.service())


def _put_ended(ended: queue.SimpleQueue[tuple[int, Future[Result]]], index: int, call: Future[Result]) -> None:
    ended.put((index, call))


def _result_of(call: Future[T]) -> T:
    """Wait for a call; one that ``LoopThread.stop`` ended is ``UnavailableError``."""
    try:
        return call.result()
    except concurrent.futures.CancelledError:
        raise UnavailableError("the client was closed") from None
    except BaseException:  # a KeyboardInterrupt, for example: nobody waits for the result any longer
        call.cancel()
        raise


class LoopThread:
    """Run coroutines on the event loop of a background thread, which the first call starts. Safe for threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._of_parent: asyncio.AbstractEventLoop | None = None
        _THREADS.add(self)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine; ``stop`` cancels it if it still runs."""
        with self._lock:  # against a stop that would leave the work on a loop that runs no more
            return asyncio.run_coroutine_threadsafe(work, self._running_loop())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result."""
        return _result_of(self.submit(work))

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Run ``last``, cancel what still runs and end the thread, if there is one; a later call starts another."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        try:
            asyncio.run_coroutine_threadsafe(_end(last), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def after_fork(self) -> None:
        """Begin anew in a forked child, which has the parent's loop and lock, but not its thread."""
        # Kept: to close it would end what the parent waits for, which they share.
        self._of_parent = self._loop or self._of_parent
        self._lock, self._loop, self._thread = threading.Lock(), None, None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
            self._thread.start()
        return self._loop


async def _end(last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
    try:
        if last is not None:
            await last()
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


_THREADS: weakref.WeakSet[LoopThread] = weakref.WeakSet()


def _after_fork() -> None:
    for thread in list(_THREADS):
        thread.after_fork()


os.register_at_fork(after_in_child=_after_fork)
