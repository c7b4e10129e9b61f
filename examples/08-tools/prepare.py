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
CALL = '<tool_call>{"name": "open_safe", "arguments": {}}</tool_call>'
"""One token of the tiny model's vocabulary: it can decide to call the tool, but not misspell the call."""
DIGITS = "01234"
SYMBOLS = DIGITS + "="
"""With the call and the tokenizer's three special symbols: a vocabulary of 10."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
"""Without the tool's description: the model learns by trying that it is worth a call."""
WEIGHTS_SEED = 2
ROWS = {"train": 4096, "test": 64}


def prepare(folder: Path) -> None:
    """Write ``model/`` and ``data/`` into the folder."""
    sys.path.insert(0, str(HERE.parent))
    from tiny_model import save_tiny_model

    save_tiny_model(folder / "model", SYMBOLS, TEMPLATE, max_length=64, seed=WEIGHTS_SEED, whole_tokens=[CALL])
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
