"""Writes what the job needs: word problems in the format of GSM8K, in verl's columns, and a tiny model.

The same files come out each time. ``--folder`` says where to; the job file expects them beside itself.
"""

from __future__ import annotations

import argparse
import random
import string
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

HERE = Path(__file__).parent
SYMBOLS = string.digits + string.ascii_letters + " .,?!'\"#+-=\n"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n' }}{% endif %}"
)
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
ROWS = {"train": 1024, "test": 64}


def prepare(folder: Path) -> None:
    """Writes ``model/`` and ``data/`` into the folder."""
    sys.path.insert(0, str(HERE.parent))
    from tiny_model import save_tiny_model

    save_tiny_model(folder / "model", SYMBOLS, TEMPLATE, max_length=512, seed=1)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, count in ROWS.items():
        rows = [row(split, index, draw) for index in range(count)]
        pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}.parquet")


def row(split: str, index: int, draw: random.Random) -> dict[str, object]:
    """One row with the columns, and the nesting, of verl's ``examples/data_preprocess/gsm8k.py``."""
    name, thing = draw.choice(["Ann", "Ben", "Cleo", "Dan"]), draw.choice(["apples", "books", "coins", "eggs"])
    has, gets = draw.randint(1, 5), draw.randint(1, 4)
    question = f"{name} has {has} {thing} and gets {gets} more. How many {thing} does {name} have now?"
    answer = f"{name} has {has} + {gets} = {has + gets} {thing}.\n#### {has + gets}"
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(has + gets)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE, help="where model/ and data/ go (default: here)")
    prepare(parser.parse_args().folder)
