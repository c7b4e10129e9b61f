"""Append rows of numbers one by one, and read them as contiguous columns."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

_ROWS_AT_A_TIME = 128


class PackedRows:
    """Grow a table of float64 with ``width`` columns.

    Rows are packed into a small buffer, since one ``struct`` call is many times faster than an array access for each
    number; a full buffer is turned into columns at once, so that reading the columns copies at most one buffer.
    """

    def __init__(self, width: int) -> None:
        self._row = struct.Struct(f"{width}d")
        self._buffer = bytearray(self._row.size * _ROWS_AT_A_TIME)
        self._filled = 0
        """Bytes of the buffer."""
        self._columns = np.empty((width, 0))
        self._count = 0
        """Rows that are in the columns."""

    def append(self, *values: float) -> None:
        """Append one row of ``width`` numbers."""
        self._row.pack_into(self._buffer, self._filled, *values)
        self._filled += self._row.size
        if self._filled == len(self._buffer):
            self._turn()

    def columns(self) -> NDArray[np.float64]:
        """Return an array of shape [width, number of rows], each column contiguous."""
        self._turn()
        return self._columns[:, : self._count]

    def _turn(self) -> None:
        added = self._filled // self._row.size
        count, (width, room) = self._count + added, self._columns.shape
        if count > room:
            grown = np.empty((width, max(count, 2 * room)))
            grown[:, : self._count] = self._columns[:, : self._count]
            self._columns = grown
        rows = np.frombuffer(self._buffer, np.float64, added * width).reshape(added, width)
        self._columns[:, self._count : count] = rows.T
        self._count, self._filled = count, 0
