"""Read samples with their groups for ``plaudit score``; an error names the line."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable

from plaudit_reward.rules.routing import rule_of
from plaudit_wire.errors import RefusedError
from plaudit_wire.sample import Sample
from plaudit_workers.scoring.offline.entries import RawSample
from plaudit_workers.scoring.offline.lines import EXPECTED, SampleInput, decode_entry

_MAX_REPORTED = 10


class SampleLine(SampleInput, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold one line or row."""

    group: str = ""
    """Samples of one group are adjacent; empty: the sample has no group."""
    index: int | None = None
    """Its index in the group; None: its position among the group's lines."""

    def as_sample(self, number: int, place: int) -> Sample:
        """Return the sample for the scorers, from line ``number``, at ``place`` in its group."""
        return self.sample(self.group or f"line-{number}", place if self.index is None else self.index)


class StoredReader:
    """Convert the lines or rows of one file to samples, in order.

    Args:
        by_source: name of a scorer that finds its rule by data source, or None.
    """

    def __init__(self, name: str, by_source: str | None, grouped: bool) -> None:
        self._name = name
        self._by_source = by_source
        self._grouped = grouped
        self._number = 0
        self._group = ""
        self._past_groups: set[int] = set()
        self.ids: deque[str] = deque()
        """Ids of the samples that ``units`` has yielded, in order; the writer of a score removes its id."""

    def parse(self, entry: RawSample) -> SampleLine | None:
        """Return the sample of the next line or row; None for an empty line.

        Raises:
            RefusedError: it is not a sample, no rule scores its data source, or its group ended before.
        """
        self._number += 1
        if isinstance(entry, bytes) and not entry.strip():
            return None
        try:
            sample = decode_entry(entry, SampleLine)
        except ValueError as error:
            raise self._refused(f"{error}. {EXPECTED}, group, index") from error
        if self._by_source is not None and rule_of(sample.data_source) is None:
            raise self._refused(
                f"scorer {self._by_source} has no rule for data_source {sample.data_source!r}. Name a rule in the "
                "scorer (rule: gsm8k), or score it with a function (kind: python)"
            )
        self._follow(sample.group)
        return sample

    def check(self, entries: Iterable[RawSample]) -> None:
        """Read all lines or rows.

        Raises:
            RefusedError: some are invalid; lists the first of them.
        """
        reported: list[str] = []
        for entry in entries:
            try:
                self.parse(entry)
            except RefusedError as refused:
                reported.append(str(refused))
                if len(reported) == _MAX_REPORTED:
                    reported.append(f"{self._name}: there may be more; these are the first {_MAX_REPORTED}")
                    break
        if reported:
            raise RefusedError("\n".join(reported))

    async def units(self, entries: AsyncIterator[RawSample]) -> AsyncIterator[list[Sample]]:
        """Yield groups where groups are scored as a whole, else single samples; raise as ``parse`` does."""
        unit: list[Sample] = []
        async for entry in entries:
            stored = self.parse(entry)
            if stored is None:
                continue
            self.ids.append(stored.id)
            group = stored.group if self._grouped else ""
            if unit and unit[0].group != group:
                yield unit
                unit = []
            sample = stored.as_sample(self._number, len(unit))
            if group:
                unit.append(sample)
            else:
                yield [sample]
        if unit:
            yield unit

    def _follow(self, group: str) -> None:
        if not self._grouped or group == self._group:
            return
        if self._group:
            self._past_groups.add(hash(self._group))
        if group and hash(group) in self._past_groups:
            raise self._refused(f"group {group!r} ended before this line. Sort the lines by group")
        self._group = group

    def _refused(self, message: str) -> RefusedError:
        return RefusedError(f"{self._name}:{self._number}: {message}")
