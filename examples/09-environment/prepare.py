"""Write what the jobs need: a random tiny model with its tokenizer, and the tasks as Parquet in verl's columns.

The same files come out each time. ``--folder`` says where to; the job files expect them beside themselves.
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
WEIGHTS_SEED = 2
ROWS = 2048


def prepare(folder: Path) -> None:
    """Write ``model/`` and ``data/`` into the folder."""
    sys.path.insert(0, str(HERE.parent))
    from tiny_model import AGENT_TEMPLATE, save_tiny_model, tool_call

    calls = [tool_call("press", button=int(digit)) for digit in DIGITS]
    save_tiny_model(folder / "model", SYMBOLS, AGENT_TEMPLATE, max_length=64, seed=WEIGHTS_SEED, whole_tokens=calls)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for name, length in (("lamp", 1), ("repeat", 2)):
        rows = [row(name, index, "".join(draw.choices(DIGITS, k=length))) for index in range(ROWS)]
        pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{name}.parquet")


def row(name: str, index: int, numbers: str) -> dict[str, object]:
    """Return one row in verl's columns. The prompt is empty: the environment writes it."""
    return {
        "data_source": f"plaudit/{name}",
        "prompt": [{"role": "user", "content": ""}],
        "ability": "environment",
        "reward_model": {"style": "rule", "ground_truth": numbers},
        "extra_info": {"index": index},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE, help="where model/ and data/ go (default: here)")
    prepare(parser.parse_args().folder)
