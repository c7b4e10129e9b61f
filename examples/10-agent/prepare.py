"""Write what the jobs need: questions, and a tiny random model with a chat template that renders tools.

The same files come out each time. ``--folder`` names the folder; the job files expect them beside themselves.
"""

from __future__ import annotations

import argparse
import string
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

HERE = Path(__file__).parent
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    '<tool_call>{"name": "{{ call["function"]["name"] }}", "arguments": '
    '{{ call["function"]["arguments"] | tojson }}}</tool_call>'
    "{% endfor %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
NUM_ROWS = 16


def prepare(folder: Path) -> None:
    """Write ``model/`` and ``data/`` into the folder."""
    sys.path.insert(0, str(HERE.parent))
    from tiny_model import save_tiny_model

    save_tiny_model(folder / "model", string.printable, TEMPLATE, max_length=8192, seed=10)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    row = {
        "data_source": "weather",
        "prompt": [{"role": "user", "content": "How warm is it in Oslo?"}],
        "reward_model": {"style": "rule", "ground_truth": "4 degrees"},
        "extra_info": {"city": "Oslo"},
    }
    rows = [{**row, "extra_info": {"city": "Oslo", "index": number}} for number in range(NUM_ROWS)]
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / "train.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE, help="folder of model/ and data/ (default: here)")
    prepare(parser.parse_args().folder)
