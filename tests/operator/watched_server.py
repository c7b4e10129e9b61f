"""An API server in memory that keeps a history, compacts it, and fails while it is listed and watched."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator
from typing import Any

from plaudit_operator.runtime.kinds import Kind
from plaudit_operator.runtime.kube import ApiUnavailableError, GoneError

Object = dict[str, Any]


class WatchedServer:
    """Objects of one kind, whose lists and watches break as its random numbers say.

    Args:
        seed: of the changes and of the failures.
        changes: how many changes there will be; then ``stop`` is set as soon as a watch has sent them all.
    """

    def __init__(self, seed: int, changes: int) -> None:
        self.stop = ImmediateEvent()
        self.objects: dict[str, Object] = {}
        self._random = random.Random(seed)
        self._left = changes
        self._version = 100
        self._history: list[Object] = []
        self._compacted = self._version
        for _ in range(3):
            self._change()

    def list(self, kind: Kind, namespace: str, selector: str) -> tuple[Iterator[Object], str]:
        self._maybe_fail()
        return self._pages(copy.deepcopy(list(self.objects.values()))), str(self._version)

    def _pages(self, items: list[Object]) -> Iterator[Object]:
        for number, item in enumerate(items):
            if number:
                self._maybe_fail()
            yield item

    def watch(self, kind: Kind, namespace: str, selector: str, version: str, timeout_s: int) -> Iterator[Object]:
        sent = int(version)
        while self._random.random() > 0.05:  # else the server ends the watch
            self._maybe_fail()
            if sent < self._compacted:
                raise GoneError("too old", 410)
            if self._left and self._random.random() < 0.5:
                self._left -= 1
                self._change()
            due = next((e for e in self._history if int(e["object"]["metadata"]["resourceVersion"]) > sent), None)
            if due is None and not self._left:
                self.stop.set()
            if due is None:
                yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self._version)}}}
                sent = self._version
                continue
            if self._random.random() < 0.05:
                yield {"type": "MODIFIED", "object": {"garbage": True}}
            sent = int(due["object"]["metadata"]["resourceVersion"])
            yield copy.deepcopy(due)
            if self.stop.is_set():
                return

    def _maybe_fail(self) -> None:
        chance = self._random.random()
        if chance < 0.03:
            raise ApiUnavailableError("connection reset")
        if chance < 0.04:
            self._compacted = self._version  # the next watch from an older version gets 410
            self._history.clear()
        if chance > 0.99:
            raise ValueError("a line that nobody can read")

    def _change(self) -> None:
        self._version += 1
        name = f"o{self._random.randrange(5)}"
        known = name in self.objects
        if known and self._random.random() < 0.3:
            item = {"metadata": {**self.objects.pop(name)["metadata"], "resourceVersion": str(self._version)}}
            self._history.append({"type": "DELETED", "object": item})
            return
        self.objects[name] = {
            "metadata": {"name": name, "namespace": "default", "resourceVersion": str(self._version)},
            "spec": {"number": self._version},
        }
        self._history.append({"type": "MODIFIED" if known else "ADDED", "object": copy.deepcopy(self.objects[name])})


class ImmediateEvent(threading.Event):
    """An event whose ``wait`` does not wait: the pauses of a run cost no time."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()
