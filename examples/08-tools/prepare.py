"""Write what the job needs: a random tiny model with its tokenizer, and the task as Parquet in verl's columns.

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
DIGITS = "01234"
SYMBOLS = DIGITS + "="
"""With the call and the tokenizer's three special symbols: a vocabulary of 10."""
WEIGHTS_SEED = 2
ROWS = {"train": 4096, "test": 64}


def prepare(folder: Path) -> None:
    """Write ``model/`` and ``data/`` into the folder."""
    sys.path.insert(0, str(HERE.parent))
    from tiny_model import AGENT_TEMPLATE, save_tiny_model, tool_call

    save_tiny_model(
        folder / "model",
        SYMBOLS,
        AGENT_TEMPLATE,
        max_length=64,
        seed=WEIGHTS_SEED,
        whole_tokens=[tool_call("open_safe")],
    )
    (folder / "data").mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, count in ROWS.items():
        rows = [row(split, index, draw) for index in range(count)]
        pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}.parquet")


def row(split: str, index: int, draw: random.Random) -> dict[str, object]:
    """Return one row in verl's columns. The prompt does not hold the secret; only the tool gets it."""
    secret = draw.choice(DIGITS)
    return {
        "data_source": "plaudit/safe",
        "prompt": [{"role": "user", "content": "0"}],
        "ability": "tools",
        "reward_model": {"style": "rule", "ground_truth": secret},
        "extra_info": {
            "split": split,
            "index": index,
            "tools_kwargs": {"open_safe": {"create_kwargs": {"secret": secret}}},
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE, help="where model/ and data/ go (default: here)")
    prepare(parser.parse_args().folder)
