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

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from plaudit_job.data_row import IMAGES_COLUMN, extra_info_of
from plaudit_job.spec.rollout import DataSpec, TrainDataSpec
from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_workers.images import ImageError, ImageProcessor, row_files, with_parts, without_files
from plaudit_workers.tokenizer import ChatTemplate
from plaudit_workers.training.rows import Rows, image_column, read_rows, within_pass_rate
from plaudit_workers.training.state import PromptRow

logger = get_logger(__name__)
_AT_A_TIME = 64
_THREADS = 4
"""Each file is flushed to the disk: one thread would wait for the disk most of the time."""
_TOKENIZED_AT_ONCE = 1024


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
        section = TrainDataSpec(path=data.validation.path, shuffle=False, max_prompt_length=limit)
        return cls.load(section, template, 0, images)

    @classmethod
    def load(
        cls, section: TrainDataSpec, template: ChatTemplate, seed: int, images: ImageProcessor | None = None
    ) -> Self:
        """Read a file, store its images, apply the chat template, skip and count the prompts that are too long.

        Args:
            template: makes text of messages; without one their contents are joined by line ends.
        """
        path = Path(section.path)
        rows = read_rows(path, images=images is not None)
        prompts = rows.column("prompt")
        digests = [()] * len(rows) if images is None else store_images(path, rows, images)
        texts = [
            _text(path, number, prompt, template, images=bool(digests[number - 1]))
            for number, prompt in enumerate(prompts, start=1)
        ]
        untemplated = [template.tokenizer.chat_template is None or isinstance(prompt, str) for prompt in prompts]
        prompt_ids = _tokenize(texts, untemplated, template.tokenizer)
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
        text, prompt = self._texts[number], row["prompt"]
        return PromptRow(
            row=number,
            data_source=str(row["data_source"]),
            prompt_text=text or "",
            prompt_ids=self._prompt_ids[number].astype("<i4").tobytes(),
            messages=[] if isinstance(prompt, str) else without_files(prompt),
            images=self._images[number],
            ground_truth=row["reward_model"]["ground_truth"],
            extra_info=extra_info_of(row.get("extra_info")),
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


def _text(path: Path, number: int, prompt: str | list[dict[str, Any]], template: ChatTemplate, *, images: bool) -> str:
    if isinstance(prompt, str):
        return prompt
    if template.tokenizer.chat_template is None:
        return "\n".join(str(message["content"]) for message in prompt)
    try:
        return template.render(with_parts(prompt) if images else prompt, generate=True)
    except TemplateError as error:
        raise RefusedError(
            f"data file {path}, row {number}: the chat template refuses these messages ({error}); mend them, or name "
            "another template with model.chatTemplate"
        ) from error


def _tokenize(texts: list[str], untemplated: list[bool], tokenizer: PreTrainedTokenizerBase) -> list[NDArray[np.int32]]:
    """Return token ids of each text. A chat template writes its own special tokens; other text gets the tokenizer's."""
    found: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * len(texts)
    for special in (True, False):
        numbers = [number for number, plain in enumerate(untemplated) if plain is special]
        for start in range(0, len(numbers), _TOKENIZED_AT_ONCE):
            part = numbers[start : start + _TOKENIZED_AT_ONCE]
            encoded = tokenizer([texts[number] for number in part], add_special_tokens=special)["input_ids"]
            for number, ids in zip(part, encoded, strict=True):
                found[number] = np.array(ids, dtype=np.int32)
    return found


def store_images(path: Path, rows: Rows, images: ImageProcessor) -> list[tuple[str, ...]]:
    """Store every image of a file; return the digests of each row's."""
    numbered = enumerate(zip(rows.column("prompt"), image_column(path, rows), strict=True), 1)
    found: list[tuple[str, ...]] = []

    def store(row: tuple[int, tuple[Any, Any]]) -> tuple[str, ...]:
        number, (prompt, value) = row
        try:
            files = row_files(prompt, value, path.parent, images.settings.max_per_prompt)
            return tuple(images.add(content) for content in files)
        except ImageError as error:
            raise _refusal(path, number, error.complaint, error.remedy) from error
        except ValueError as error:  # of the processor, for sizes that it does not scale
            complaint = f"has an image that the model's processor refuses ({error})"
            raise _refusal(path, number, complaint, "Change its size, or remove the row") from error

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="images") as threads:
        while part := list(islice(numbered, _AT_A_TIME)):
            found += threads.map(store, part)
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


def _refusal(path: Path, number: int, complaint: str, remedy: str) -> RefusedError:
    return RefusedError(f"data file {path}, row {number}: column {IMAGES_COLUMN!r} {complaint}. {remedy}")
