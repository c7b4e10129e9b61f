"""Writes what the job needs: a dataset as TRL's, turned into rows of a job, and a tiny model.

TRL's rows have ``prompt`` (messages) and further columns, here ``solution`` and ``level``. The same files come out each
time. ``--folder`` says where to; the job file expects them beside itself.
"""

from __future__ import annotations

import argparse
import random
import string
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

HERE = Path(__file__).parent
SYMBOLS = string.digits + string.ascii_lowercase + " +=?"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
NUM_ROWS = 512


def prepare(folder: Path) -> None:
    """Writes ``model/`` and ``data/`` into the folder."""
    sys.path.insert(0, str(HERE.parent))
    from tiny_model import save_tiny_model

    save_tiny_model(folder / "model", SYMBOLS, TEMPLATE, max_length=128, seed=3)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    rows = [job_row(trl_row(draw)) for _ in range(NUM_ROWS)]
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / "train.parquet")


def trl_row(draw: random.Random) -> dict[str, Any]:
    """One row as TRL's trainer takes it: conversational, with columns of its own."""
    one, two = draw.randint(1, 9), draw.randint(1, 9)
    return {
        "prompt": [{"role": "user", "content": f"{one} + {two}"}],
        "solution": str(one + two),
        "level": "easy" if one + two < 10 else "hard",
    }


def job_row(row: dict[str, Any]) -> dict[str, Any]:
    """The same row in a job's columns: every column of TRL's but ``prompt`` goes into ``extra_info``."""
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return {
        "data_source": "sums",
        "prompt": row["prompt"],
        "reward_model": {"style": "rule", "ground_truth": row["solution"]},
        "extra_info": columns,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE, help="where model/ and data/ go (default: here)")
    prepare(parser.parse_args().folder)
