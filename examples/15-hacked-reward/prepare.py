"""Writes what the job needs: a random tiny model with its tokenizer, and the task as Parquet in verl's columns.

The same files come out each time. ``--folder`` says where to; the job file expects them beside itself.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

HERE = Path(__file__).parent
SYMBOLS = "0123456789=+ "
"""With the tokenizer's three special symbols: a vocabulary of 16."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
NUM_DIGITS = 6
WEIGHTS_SEED = 2
"""Of the random weights."""
ROWS = {"train": 1024}


def prepare(folder: Path) -> None:
    """Writes ``model/`` and ``data/`` into the folder."""
    sys.path.insert(0, str(HERE.parent))
    from tiny_model import save_tiny_model

    save_tiny_model(folder / "model", SYMBOLS, TEMPLATE, max_length=256, seed=WEIGHTS_SEED)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, count in ROWS.items():
        rows = [row(split, index, draw) for index in range(count)]
        pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}.parquet")


def row(split: str, index: int, draw: random.Random) -> dict[str, object]:
    """One row in verl's columns: six digits, to be written once more."""
    digits = "".join(draw.choices("0123456789", k=NUM_DIGITS))
    return {
        "data_source": "plaudit/copy-digits",
        "prompt": [{"role": "user", "content": digits}],
        "ability": "copy",
        "reward_model": {"style": "rule", "ground_truth": digits},
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE, help="where model/ and data/ go (default: here)")
    prepare(parser.parse_args().folder)
