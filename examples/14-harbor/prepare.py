"""Write the small agent: a random tiny model with its tokenizer, in ``model/``. The same files come out each time.

``--folder`` says where to; the job file expects them beside itself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOLUTIONS = [path.read_text().strip() for path in sorted(HERE.glob("problems/*/solution/solve.sh"))]
COMMANDS = ["ls", "cat *", *SOLUTIONS]
SYMBOLS = "123="
"""Of an instruction it reads the task's number alone."""
WEIGHTS_SEED = 2


def prepare(folder: Path) -> None:
    """Write ``model/`` into the folder."""
    sys.path.insert(0, str(HERE.parent))
    from tiny_model import AGENT_TEMPLATE, save_tiny_model, tool_call

    calls = [tool_call("bash", command=command) for command in COMMANDS]
    save_tiny_model(folder / "model", SYMBOLS, AGENT_TEMPLATE, max_length=64, seed=WEIGHTS_SEED, whole_tokens=calls)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE, help="where model/ goes (default: here)")
    prepare(parser.parse_args().folder)
