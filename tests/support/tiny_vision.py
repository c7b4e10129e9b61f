"""A tiny Qwen2.5-VL whose images and versions differ visibly, images for it, and data files of them."""

from __future__ import annotations

import io
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny_vision_model import save_tiny_vision_model

SIZES = [(84, 112), (56, 56), (140, 60), (300, 300)]
"""Height and width; the processor scales the last one down."""


def save_vision_policy(folder: Path, seed: int = 0, *, tied: bool = False) -> Path:
    """Writes the model, with large random weights."""
    save_tiny_vision_model(folder, string.ascii_lowercase + string.digits + "? =", seed=seed, spread=0.1, tied=tied)
    return folder


def noise_image(seed: int, height: int = 84, width: int = 112, kind: str = "PNG") -> bytes:
    """A file of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def vision_row(number: int, images: Sequence[Any], prompt: Any = None) -> dict[str, Any]:
    """A row in verl's columns whose prompt names each image once."""
    text = "<image>" * len(images) + f"what {number}?"
    return {
        "data_source": "colours",
        "prompt": [{"role": "user", "content": text}] if prompt is None else prompt,
        "reward_model": {"ground_truth": "a"},
        "extra_info": {"index": number},
        "images": list(images),
    }


def mixed_rows() -> list[dict[str, Any]]:
    """One image, two, none, and one that is scaled down."""
    by_row = [[0], [1, 2], [], [3]]
    return [
        vision_row(number, [{"bytes": noise_image(each, *SIZES[each]), "path": None} for each in own])
        for number, own in enumerate(by_row)
    ]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Writes rows as Parquet."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path
