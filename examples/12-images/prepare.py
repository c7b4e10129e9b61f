"""Writes what the job needs: a random tiny model with a vision tower, and the task as Parquet in verl's columns.

The same files come out each time. ``--folder`` says where to; the job file expects them beside itself.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

HERE = Path(__file__).parent
COLOURS = {"r": (220, 40, 40), "g": (40, 200, 60), "b": (50, 60, 220), "y": (230, 220, 40)}
"""The letter that names a colour → red, green and blue of it."""
SYMBOLS = "rgby?= "
WEIGHTS_SEED = 1
SIDE = 56
"""Pixels: 4 x 4 patches, which are 4 tokens."""
ROWS = {"train": 512, "test": 32}


def prepare(folder: Path) -> None:
    """Writes ``model/`` and ``data/`` into the folder."""
    sys.path.insert(0, str(HERE.parent))
    from tiny_vision_model import save_tiny_vision_model

    save_tiny_vision_model(folder / "model", SYMBOLS, seed=WEIGHTS_SEED)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for split, count in ROWS.items():
        rows = [row(split, index, random) for index in range(count)]
        pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}.parquet")


def row(split: str, index: int, random: np.random.Generator) -> dict[str, object]:
    """One row in verl's columns: an image, and the letter of its colour."""
    letter = str(random.choice(list(COLOURS)))
    return {
        "data_source": "plaudit/colours",
        "prompt": [{"role": "user", "content": "<image>?"}],
        "images": [{"bytes": picture(COLOURS[letter], random), "path": None}],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": letter},
        "extra_info": {"split": split, "index": index},
    }


def picture(colour: tuple[int, int, int], random: np.random.Generator) -> bytes:
    """A PNG of one colour, with noise, so that no two are equal."""
    noise = random.integers(-30, 31, (SIDE, SIDE, 3))
    pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE, help="where model/ and data/ go (default: here)")
    prepare(parser.parse_args().folder)
