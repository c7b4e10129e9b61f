"""Store the images of a data file's rows, checked one by one, before the run's first prompt. Called by ``dataset``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plaudit_wire.errors import RefusedError
from plaudit_workers.images.decoding import ImageError
from plaudit_workers.images.processor import ImageProcessor
from plaudit_workers.images.row_check import row_files
from plaudit_workers.job.data_row import IMAGES_COLUMN
from plaudit_workers.training.data.rows import Rows, image_column

_AT_A_TIME = 64
_THREADS = 4
"""Each file is flushed to the disk: one thread would wait for the disk most of the time."""


def store_images(path: Path, rows: Rows, images: ImageProcessor) -> list[tuple[str, ...]]:
    """Store every image of a file; return the digests of each row's.

    Raises:
        RefusedError: an image is missing, cannot be used or has no place in its prompt, or the disk is full.
    """
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
        for part in _parts(numbered):
            found += threads.map(store, part)
    return found


def expanded_lengths(
    path: Path, prompt_ids: Sequence[NDArray[np.int32]], digests: Sequence[tuple[str, ...]], images: ImageProcessor
) -> list[int]:
    """Return the tokens of each prompt as the model sees it: each image counts as its patches do.

    Args:
        prompt_ids: int32[P] each, as rendered.

    Raises:
        RefusedError: a rendered prompt has not as many image tokens as the row has images.
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


def _parts(rows: Iterator[tuple[int, tuple[Any, Any]]]) -> Iterator[list[tuple[int, tuple[Any, Any]]]]:
    while part := list(islice(rows, _AT_A_TIME)):
        yield part
