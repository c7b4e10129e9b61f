"""Reads stored samples, one JSON object a line, for ``plaudit score``; a broken line is told by its number."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import msgspec

from plaudit_reward.rules.routing import rule_of
from plaudit_wire.sample import Sample
from plaudit_workers.process import RefusedError
from plaudit_workers.scoring.offline.lines import SampleInput

_MAX_TOLD = 10
_FIELDS = (
    "response, and perhaps prompt, data_source, ground_truth, extra_info, group, index, response_tokens, max_tokens, "
    "finish_reason"
)


class StoredSample(SampleInput, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line."""

    group: str = ""
    """Samples of one group lie next to each other; empty: the sample is alone."""
    index: int | None = None
    """Which of its group's samples; None: by its place among them."""

    def as_sample(self, number: int, place: int) -> Sample:
        """The sample as scorers see it, from line ``number``, the ``place``-th of its group."""
        return self.sample(self.group or f"line-{number}", place if self.index is None else self.index)


class StoredReader:
    """Turns lines into samples, one file from its first line on.

    Args:
        name: of the file, for messages.
        by_source: name of a scorer that finds its rule by data source; None where there is none.
        grouped: whether groups are scored as a whole, so that their samples must lie together.
    """

    def __init__(self, name: str, by_source: str | None, grouped: bool) -> None:
        self._name = name
        self._by_source = by_source
        self._grouped = grouped
        self._decode = msgspec.json.Decoder(StoredSample).decode
        self._number = 0
        self._group = ""
        self._past_groups: set[int] = set()

    def parse(self, line: bytes) -> StoredSample | None:
        """The sample of the next line; None for an empty one.

        Raises:
            RefusedError: the line is no sample, no rule scores its data source, or its group had ended before.
        """
        self._number += 1
        if not line.strip():
            return None
        try:
            sample = self._decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._refused(f"{error}. A line is a JSON object with {_FIELDS}") from error
        if self._by_source is not None and rule_of(sample.data_source) is None:
            raise self._refused(
                f"scorer {self._by_source} has no rule for data_source {sample.data_source!r}. Name a rule in the "
                "scorer (rule: gsm8k), or score it with a function (kind: python)"
            )
        self._follow(sample.group)
        return sample

    def check(self, lines: Iterable[bytes]) -> None:
        """Looks through all lines.

        Raises:
            RefusedError: some are broken; names the first of them.
        """
        told: list[str] = []
        for line in lines:
            try:
                self.parse(line)
            except RefusedError as refused:
                told.append(str(refused))
                if len(told) == _MAX_TOLD:
                    told.append(f"{self._name}: perhaps more: these are the first {_MAX_TOLD}")
                    break
        if told:
            raise RefusedError("\n".join(told))

    async def units(self, lines: AsyncIterator[bytes]) -> AsyncIterator[list[Sample]]:
        """What is scored together: the samples of a group where groups are scored as a whole, else single samples.

        Raises:
            RefusedError: see ``parse``.
        """
        unit: list[Sample] = []
        async for line in lines:
            stored = self.parse(line)
            if stored is None:
                continue
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
            raise self._refused(f"group {group!r} had ended before. Sort the lines by group: its samples lie together")
        self._group = group

    def _refused(self, words: str) -> RefusedError:
        return RefusedError(f"{self._name}:{self._number}: {words}")
