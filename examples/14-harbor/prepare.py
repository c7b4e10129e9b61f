"""Write the small agent: a random tiny model with its tokenizer, in ``model/``. The same files come out each time.

``--folder`` says where to; the job file expects them beside itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOLUTIONS = [path.read_text().strip() for path in sorted(HERE.glob("problems/*/solution/solve.sh"))]
COMMANDS = ["ls", "cat *", *SOLUTIONS]
CALLS = [
    f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>" for command in COMMANDS
]
"""Each is one token of the tiny model's vocabulary: it can choose a command, but not misspell it."""
SYMBOLS = "123="
"""Of an instruction it reads the task's number alone."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
"""Without the tool's description: the model learns by trying what its commands earn."""
WEIGHTS_SEED = 2


def prepare(folder: Path) -> None:
    """Write ``model/`` into the folder."""
    sys.path.insert(0, str(HERE.parent))
    from tiny_model import save_tiny_model

    save_tiny_model(folder / "model", SYMBOLS, TEMPLATE, max_length=64, seed=WEIGHTS_SEED, whole_tokens=CALLS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE, help="where model/ goes (default: here)")
    prepare(parser.parse_args().folder)
