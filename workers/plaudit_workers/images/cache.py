"""Hold what was made of images within a bound of bytes: the least recently used goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class ImageCache(Generic[Made]):
    """Cache objects made from images, by digest, within a bound. Any thread may call it.

    Args:
        make: makes it of a digest; two threads may make the same.
        size: bytes of what was made.
        most_bytes: a larger one is returned, but not kept.
    """

    def __init__(self, make: Callable[[str], Made], size: Callable[[Made], int], most_bytes: int) -> None:
        self._make = make
        self._size = size
        self._most_bytes = most_bytes
        self._held: OrderedDict[str, Made] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        """Bytes held at this moment."""

    def get(self, digest: str) -> Made:
        """Return what is made of an image; raise what making it raises."""
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest)
                return self._held[digest]
        made = self._make(digest)
        self._keep(digest, made)
        return made

    def _keep(self, digest: str, made: Made) -> None:
        with self._lock:
            if digest in self._held or self._size(made) > self._most_bytes:
                return
            self._held[digest] = made
            self.num_bytes += self._size(made)
            while self.num_bytes > self._most_bytes:
                self.num_bytes -= self._size(self._held.popitem(last=False)[1])
