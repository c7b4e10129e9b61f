"""Write what the job needs: a random tiny model with its tokenizer, and empty prompts as Parquet in verl's columns.

The same files come out each time. ``--folder`` names their folder; the job file expects them beside itself.
"""

from __future__ import annotations

import argparse
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

    calls = [tool_call("step", button=int(digit)) for digit in DIGITS]
    save_tiny_model(folder / "model", SYMBOLS, AGENT_TEMPLATE, max_length=64, seed=WEIGHTS_SEED, whole_tokens=calls)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "data_source": "plaudit/lamps",
            "prompt": [{"role": "user", "content": ""}],  # the environment writes it
            "ability": "environment",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index in range(ROWS)
    ]
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / "train.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE, help="folder of model/ and data/ (default: this one)")
    prepare(parser.parse_args().folder)
