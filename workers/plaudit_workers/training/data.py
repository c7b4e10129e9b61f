"""Yield the prompts of a data file in the order of their admission: endless epochs, addressed by one number.

``PromptData.prompt_at(position)`` depends on the file, the seed and the position alone, so the data cursor is all that
a checkpoint has to keep of the data. Images are stored, checked one by one, before the run's first prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from plaudit_job.data_row import IMAGES_COLUMN, DataRow
from plaudit_job.spec.rollout import DataSpec, PassRateSpec, TrainDataSpec
from plaudit_wire.errors import RefusedError, described
from plaudit_wire.logs import get_logger
from plaudit_wire.plain import shown
from plaudit_workers.data_files import NumberedRow, RowError, checked_rows
from plaudit_workers.images import ImageError, ImageProcessor, row_files, with_parts
from plaudit_workers.tokenizer import ChatTemplate
from plaudit_workers.training.state import PromptRow

logger = get_logger(__name__)
_AT_A_TIME = 64
_THREADS = 4
"""Each file is flushed to the disk: one thread would wait for the disk most of the time."""
_TOKENIZED_AT_ONCE = 1024
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(DataRow)


class PromptData:
    """Read a data file as an endless sequence of prompts.

    Args:
        texts: the prompt of each row as text, None where it is left out.
        prompt_ids: the same as int32 token ids.
        seed: of the order; None keeps the file's.
    """

    def __init__(
        self,
        rows: Rows,
        texts: list[str | None],
        prompt_ids: list[NDArray[np.int32]],
        seed: int | None,
        images: Sequence[tuple[str, ...]],
    ) -> None:
        self._rows = rows
        self._texts = texts
        self._prompt_ids = prompt_ids
        self._seed = seed
        self._images = images
        self._kept = np.array([number for number, text in enumerate(texts) if text is not None], dtype=np.int64)
        self.num_filtered = len(texts) - self._kept.size
        """Prompts left out: longer than ``maxPromptLength``, or outside ``passRate``."""
        self._order = lru_cache(maxsize=2)(self._shuffled)

    @classmethod
    def for_training(
        cls, data: DataSpec, template: ChatTemplate, seed: int, images: ImageProcessor | None = None
    ) -> Self:
        """Load ``data.train``; see ``load``."""
        return cls.load(data.train, template, seed, images)

    @classmethod
    def for_validation(
        cls, data: DataSpec, template: ChatTemplate, images: ImageProcessor | None = None
    ) -> Self | None:
        """Load ``data.validation`` in the file's order, if the job has one, with the same length limit."""
        if data.validation is None:
            return None
        limit = data.train.max_prompt_length
        section = TrainDataSpec(path=data.validation.source, shuffle=False, max_prompt_length=limit)
        return cls.load(section, template, 0, images)

    @classmethod
    def load(
        cls, section: TrainDataSpec, template: ChatTemplate, seed: int, images: ImageProcessor | None = None
    ) -> Self:
        """Read a file, store its images, apply the chat template, skip and count the prompts that are too long.

        Args:
            template: makes text of messages; without one their contents are joined by line ends.
        """
        path = Path(section.source)
        rows, digests = read_rows(path, images)
        texts, untemplated = [], []
        for number, row in enumerate(rows):
            texts.append(_text(path, number + 1, row.prompt, template, images=bool(digests[number])))
            untemplated.append(template.tokenizer.chat_template is None or isinstance(row.prompt, str))
        prompt_ids = _tokenize(path, texts, untemplated, template.tokenizer)
        lengths = [ids.size for ids in prompt_ids]
        if images is not None:
            lengths = expanded_lengths(path, prompt_ids, digests, images)
        short = [0 < length <= section.max_prompt_length for length in lengths]
        wanted = short if section.pass_rate is None else within_pass_rate(path, rows, section.pass_rate)
        kept = [text if fits and chosen else None for text, fits, chosen in zip(texts, short, wanted, strict=True)]
        data = cls(rows, kept, prompt_ids, seed if section.shuffle else None, digests)
        if len(data) == 0:
            raise RefusedError(
                f"data file {path}: none of its {len(rows)} prompts has between 1 and {section.max_prompt_length} "
                "tokens; raise data.train.maxPromptLength"
                + ("" if section.pass_rate is None else ", or widen data.train.passRate")
            )
        too_long = short.count(False)
        fields = {"path": str(path), "prompts": len(data), "too_long": too_long}
        if images is not None:
            fields["images"] = len({digest for own in digests for digest in own})
        if section.pass_rate is not None:
            fields["outside_pass_rate"] = data.num_filtered - too_long
        logger.info("prompts loaded", **fields)
        return data

    def __len__(self) -> int:
        """Return the number of prompts of one epoch."""
        return int(self._kept.size)

    def prompt_at(self, position: int) -> PromptRow:
        """Return the prompt that is admitted as number ``position`` (from 0); epoch: ``position // len(self)``."""
        number = self.row_at(position)
        row = self._rows[number]
        return PromptRow(
            row=number,
            data_source=row.data_source,
            prompt_text=self._texts[number] or "",
            prompt_ids=self._prompt_ids[number].astype("<i4").tobytes(),
            messages=[] if isinstance(row.prompt, str) else row.prompt,
            images=self._images[number],
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
        )

    def row_at(self, position: int) -> int:
        """Return the index in the file of that prompt."""
        epoch, place = divmod(position, len(self))
        return int(self._order(epoch)[place])

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        """Return int64[len]: the rows of an epoch in order."""
        if self._seed is None:
            return self._kept
        # Raw PCG64 numbers are the same in every numpy; what permutation() makes of them need not be.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
        return self._kept[np.argsort(bits.random_raw(len(self)), kind="stable")]


class Rows(Sequence[DataRow]):
    """Hold the rows of a file encoded, which is small, and shows that each can travel."""

    def __init__(self) -> None:
        self._encoded: list[bytes] = []

    def append(self, row: DataRow) -> None:
        """Add a row."""
        self._encoded.append(_encoder.encode(row))

    def __len__(self) -> int:
        """Return their number."""
        return len(self._encoded)

    def __getitem__(self, number: Any) -> Any:
        """Return one row."""
        return _decoder.decode(self._encoded[number])


def read_rows(path: Path, images: ImageProcessor | None) -> tuple[Rows, list[tuple[str, ...]]]:
    """Read and check every row of a file, and store its images; return the rows, and the digests of each row's images.

    Raise ``RowError`` for the first row that is wrong.
    """
    rows, digests = Rows(), list[tuple[str, ...]]()

    def store(numbered: NumberedRow) -> tuple[str, ...]:
        return () if images is None else _stored_images(path, numbered, images)

    numbered = checked_rows(path, images=images is not None)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="images") as threads:
        while part := list(islice(numbered, _AT_A_TIME)):
            for each in part:
                rows.append(each.row)
            digests += map(store, part) if images is None else threads.map(store, part)
    return rows, digests


def _stored_images(path: Path, numbered: NumberedRow, images: ImageProcessor) -> tuple[str, ...]:
    try:
        files = row_files(numbered.row.prompt, numbered.images, path.parent, images.settings.max_per_prompt)
        return tuple(images.add(content) for content in files)
    except ImageError as error:
        raise _refusal(path, numbered.number, error.complaint, error.remedy) from error
    except ValueError as error:  # of the processor, for sizes that it does not scale
        complaint = f"has an image that the model's processor refuses ({error})"
        raise _refusal(path, numbered.number, complaint, "Change its size, or remove the row") from error


def within_pass_rate(path: Path, rows: Rows, section: PassRateSpec) -> list[bool]:
    """Return for each row whether its pass rate is within the bounds, which count as within (``data.train.passRate``).

    The choice depends on the file and the job alone, so a resumed run has the same prompts at the same positions.
    """
    return [
        section.min <= _pass_rate(path, number, row.extra_info.get(section.field), section.field) <= section.max
        for number, row in enumerate(rows, 1)
    ]


def _pass_rate(path: Path, number: int, value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise RowError(
            path,
            f"row {number}: extra_info[{field!r}] is {shown(value)}; data.train.passRate requires a number from 0 to 1 "
            "in every row",
            "Write it, name another field, or remove passRate",
        )
    return float(value)


def _text(path: Path, number: int, prompt: str | list[dict[str, Any]], template: ChatTemplate, *, images: bool) -> str:
    if isinstance(prompt, str):
        return prompt
    if template.tokenizer.chat_template is None:
        return "\n".join(str(message["content"]) for message in prompt)
    try:
        return template.render(with_parts(prompt) if images else prompt, generate=True)
    # Beside its own errors, a template raises those of its expressions, such as a TypeError for a content of parts.
    except Exception as error:
        complaint = f"row {number}: the chat template refuses these messages ({described(error)})"
        raise RowError(path, complaint, "Mend them, or name another template with model.chatTemplate") from error


def _tokenize(
    path: Path, texts: list[str], untemplated: list[bool], tokenizer: PreTrainedTokenizerBase
) -> list[NDArray[np.int32]]:
    """Return token ids of each text. A chat template writes its own special tokens; other text gets the tokenizer's."""
    found: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * len(texts)
    for special in (True, False):
        numbers = [number for number, plain in enumerate(untemplated) if plain is special]
        for start in range(0, len(numbers), _TOKENIZED_AT_ONCE):
            part = numbers[start : start + _TOKENIZED_AT_ONCE]
            try:
                encoded = tokenizer([texts[number] for number in part], add_special_tokens=special)["input_ids"]
                ids = [np.array(each, dtype=np.int32) for each in encoded]
            except Exception as error:  # of the tokenizer's own code
                complaint = f"rows {part[0] + 1} to {part[-1] + 1}: the tokenizer refuses one ({described(error)})"
                raise RowError(path, complaint, "Mend the texts, or name another tokenizer") from error
            for number, each in zip(part, ids, strict=True):
                found[number] = each
    return found


def expanded_lengths(
    path: Path, prompt_ids: Sequence[NDArray[np.int32]], digests: Sequence[tuple[str, ...]], images: ImageProcessor
) -> list[int]:
    """Return the tokens of each prompt as the model sees it: each image counts as its patches do.

    Args:
        prompt_ids: int32[P] each, as rendered.
    """
    lengths = []
    for number, (ids, own) in enumerate(zip(prompt_ids, digests, strict=True), 1):
        places = int((ids == images.token_id).sum())
        if places != len(own):
            complaint = f"has {len(own)} images, but the rendered prompt has {places} image tokens"
            remedy = "Use the model's own chat template (remove model.chatTemplate), and no special tokens in the texts"
            raise _refusal(path, number, complaint, remedy)
        lengths.append(int(ids.size) + sum(images.num_tokens(digest) - 1 for digest in own))
    return lengths


def _refusal(path: Path, number: int, complaint: str, remedy: str) -> RowError:
    return RowError(path, f"row {number}: column {IMAGES_COLUMN} {complaint}", remedy)
