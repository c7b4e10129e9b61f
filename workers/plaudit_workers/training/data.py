"""Yield the prompts of a job's data in the order of their admission: endless epochs, addressed by one number.

``PromptData.prompt_at(position)`` depends on the data, the seed and the position alone, so the data cursor is all that
a checkpoint has to keep of the data. Images are stored, checked one by one, before the run's first prompt.
"""

from __future__ import annotations

import tempfile
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.rollout import DataSpec, TrainDataSpec, WeightedDataSpec
from plaudit_wire.logs import get_logger
from plaudit_workers.data_facts import DataFacts, FactsOfRows
from plaudit_workers.data_files import VERL, RowError, RowForm, checked_rows, data_paths
from plaudit_workers.training.prompts import PromptLengths, PromptRenderer, RenderedRow, Selection, lengths_in_words
from plaudit_workers.training.state import PromptRow

logger = get_logger(__name__)
LENGTHS_FILE = "prompt-lengths.bin"
"""In the run's folder: what ``PromptLengths`` keeps."""
_IN_MEMORY_BYTES = 256 << 20
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PromptRow)


class PromptData:
    """Read a job's data as an endless sequence of prompts.

    Args:
        rows: those that are used.
        order: their order.
        renderer: tokenizes those whose lengths were known without.
        facts: what was read.
        selection: what was left out.
    """

    def __init__(
        self,
        rows: StoredPrompts,
        order: EpochOrder,
        renderer: PromptRenderer,
        facts: DataFacts,
        selection: Selection,
    ) -> None:
        self._rows = rows
        self._order = order
        self._renderer = renderer
        self.facts = facts
        self.selection = selection

    @classmethod
    def for_training(cls, data: DataSpec, renderer: PromptRenderer, seed: int, folder: Path | None = None) -> Self:
        """Load ``data.train``; see ``load``. Lengths of prompts are kept in the folder for the run's next start."""
        file = None if folder is None else folder / LENGTHS_FILE
        lengths = PromptLengths(renderer.template, data.train.max_prompt_length, file)
        prompts = cls.load(data.train, renderer, seed, RowForm.of_data(data), folder, lengths)
        lengths.keep()
        return prompts

    @classmethod
    def for_validation(cls, data: DataSpec, renderer: PromptRenderer, folder: Path | None = None) -> Self | None:
        """Load ``data.validation`` in the file's order, if the job has one, with the same length limit."""
        if data.validation is None:
            return None
        limit = data.train.max_prompt_length
        section = TrainDataSpec(path=data.validation.source, shuffle=False, max_prompt_length=limit)
        return cls.load(section, renderer, 0, RowForm.of_data(data), folder)

    @classmethod
    def load(
        cls,
        section: TrainDataSpec,
        renderer: PromptRenderer,
        seed: int,
        form: RowForm = VERL,
        folder: Path | None = None,
        known: PromptLengths | None = None,
    ) -> Self:
        """Read data, store its images, render it, leave out and count what the job does not use.

        Args:
            folder: holds the prompts that do not fit into a quarter of a GiB of memory.
            known: spares prompts their tokens until they are used. None: all are tokenized.
        """
        rows, ends, facts = StoredPrompts(folder), list[int](), FactsOfRows()
        selection, lengths = Selection(section.max_prompt_length, section.pass_rate), array("i")
        for path in data_paths(section):
            for rendered in renderer.rendered(checked_rows(path, form), known):
                facts.add(rendered.numbered)
                if not rendered.is_bound:
                    lengths.append(rendered.length)
                if selection.wants(rendered.numbered, rendered.length):
                    rows.append(_prompt_row(rendered, facts.num_rows - 1))
            ends.append(len(rows))
        path = " + ".join(data_paths(section))
        if not selection.used:
            raise RowError(path, *selection.refusal(np.asarray(lengths)))
        numbers = {"rows": facts.num_rows, "prompts": selection.used, "left_out": selection.left_out_by()}
        logger.info("prompts loaded", path=path, **numbers, lengths=lengths_in_words(np.asarray(lengths)))
        order = EpochOrder(mixture_parts(section.mixture, ends), seed if section.shuffle else None)
        return cls(rows, order, renderer, facts.facts(), selection)

    def __len__(self) -> int:
        """Return the number of prompts of one epoch."""
        return len(self._order)

    def notice(self, job: RLJob) -> str:
        """Return how many of the training rows a run uses, and how often, for people."""
        used = f"spec.data.train: {self.selection.in_words()}"
        return used if job.spec.data.train.mixture else f"{used}. {self.selection.visits(job.spec.algorithm)}"

    def prompt_at(self, position: int) -> PromptRow:
        """Return the prompt that is admitted as number ``position`` (from 0); epoch: ``position // len(self)``."""
        prompt = self._rows[self._order.at(position)]
        if prompt.prompt_ids:
            return prompt
        ids = self._renderer.token_ids(prompt.prompt_text, templated=bool(prompt.messages))
        return replace(prompt, prompt_ids=ids.astype("<i4").tobytes())

    def row_at(self, position: int) -> int:
        """Return the index of that prompt among all rows."""
        return self._rows.row(self._order.at(position))


def _prompt_row(rendered: RenderedRow, index: int) -> PromptRow:
    row = rendered.numbered.row
    return PromptRow(
        row=index,
        data_source=row.data_source,
        prompt_text=rendered.text,
        prompt_ids=rendered.ids.astype("<i4").tobytes(),
        messages=[] if isinstance(row.prompt, str) else row.prompt,
        images=rendered.images,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
    )


class StoredPrompts:
    """Hold prompts encoded: in memory while they are small, else in a file without a name, which ends with the process.

    Args:
        folder: of the file. None: the system's for temporary files.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES, dir=None if folder is None else str(folder))  # noqa: SIM115 (it lives as long as self)
        weakref.finalize(self, self._file.close)
        self._ends = array("q", [0])
        self._rows = array("q")

    def append(self, prompt: PromptRow) -> None:
        """Add one."""
        encoded = _encoder.encode(prompt)
        self._file.seek(self._ends[-1])
        self._file.write(encoded)
        self._ends.append(self._ends[-1] + len(encoded))
        self._rows.append(prompt.row)

    def __len__(self) -> int:
        """Return their number."""
        return len(self._rows)

    def __getitem__(self, number: int) -> PromptRow:
        """Return one."""
        self._file.seek(self._ends[number])
        return _decoder.decode(self._file.read(self._ends[number + 1] - self._ends[number]))

    def row(self, number: int) -> int:
        """Return the index of one among all rows."""
        return self._rows[number]


class Part(NamedTuple):
    """Give the prompts ``start`` to ``end`` a number of places in each epoch."""

    start: int
    end: int
    places: int


def mixture_parts(mixture: Sequence[WeightedDataSpec], ends: Sequence[int]) -> list[Part]:
    """Return the parts of a mixture; all prompts are one part where there is none.

    Largest remainders decide the places, so they sum to the number of prompts. Raise ``RowError`` for a part without a
    prompt.

    Args:
        ends: number of used prompts up to the end of each entry.
    """
    if not mixture:
        return [Part(0, ends[-1], ends[-1])]
    starts = [0, *ends[:-1]]
    for entry, start, end in zip(mixture, starts, ends, strict=True):
        if start == end:
            raise RowError(entry.path, "has no prompt that the run uses", "Remove it from data.train.mixture")
    total = sum(entry.weight for entry in mixture)
    exact = [entry.weight / total * ends[-1] for entry in mixture]
    places = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: places[number] - exact[number])
    for number in by_remainder[: max(0, ends[-1] - sum(places))]:
        places[number] += 1
    return [Part(*bounds) for bounds in zip(starts, ends, places, strict=True)]


class EpochOrder:
    """Order prompts in endless epochs: the place of each depends on the parts, the seed and its position alone.

    A part goes through all its prompts before it repeats one, over the ends of epochs.

    Args:
        seed: None keeps the order of the rows; parts then alternate evenly.
    """

    def __init__(self, parts: Sequence[Part], seed: int | None) -> None:
        self._parts = parts
        self._seed = seed
        self._epoch = lru_cache(maxsize=2)(self._ordered)

    def __len__(self) -> int:
        """Return the places of an epoch."""
        return sum(part.places for part in self._parts)

    def at(self, position: int) -> int:
        """Return the number of the prompt at a position."""
        epoch, place = divmod(position, len(self))
        return int(self._epoch(epoch)[place])

    def _ordered(self, epoch: int) -> NDArray[np.int64]:
        """Return int64[places]: the prompts of an epoch in order."""
        if len(self._parts) == 1:
            part = self._parts[0]
            return self._shuffled(np.arange(part.start, part.end, dtype=np.int64), (epoch,))
        drawn = [self._drawn(number, part, epoch) for number, part in enumerate(self._parts)]
        # Of c places, the j-th belongs at (j + 1/2) / c of the epoch: the most even mixture.
        where = np.concatenate([(np.arange(part.places) + 0.5) / part.places for part in self._parts])
        prompts = np.concatenate(drawn)[np.argsort(where, kind="stable")]
        return self._shuffled(prompts, (epoch,))

    def _drawn(self, number: int, part: Part, epoch: int) -> NDArray[np.int64]:
        """Return int64[part.places]: the prompts that a part gives to an epoch."""
        size = part.end - part.start
        own = np.arange(part.start, part.end, dtype=np.int64)
        first, last = divmod(epoch * part.places, size), divmod((epoch + 1) * part.places, size)
        rounds = [self._shuffled(own, (number, each)) for each in range(first[0], last[0] + 1)]
        return np.concatenate(rounds)[first[1] : first[1] + part.places]

    def _shuffled(self, prompts: NDArray[np.int64], of: tuple[int, ...]) -> NDArray[np.int64]:
        """Return the prompts in the order of the seed for one use; as they are without a seed."""
        if self._seed is None:
            return prompts
        # Raw PCG64 numbers are the same in every numpy; what permutation() makes of them need not be.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, *of]))
        return prompts[np.argsort(bits.random_raw(prompts.size), kind="stable")]
