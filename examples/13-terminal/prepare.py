"""Write what the job needs: a random tiny model with its tokenizer, and nine Harbor tasks.

The same files come out each time. ``--folder`` says where to; the job file expects them beside itself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
DIGITS = "012"
COMMANDS = [f"printf {digit} >> code" for digit in DIGITS]
WANTED = [first + second for first in DIGITS for second in DIGITS]
SYMBOLS = DIGITS + "="
WEIGHTS_SEED = 2
TASK = """schema_version = "1.0"

[metadata]
category = "terminal"

[environment]
network_mode = "no-network"

[verifier]
timeout_sec = 20.0
"""
TESTS = """# The file code holds the wanted digits: 1. Only the first one is right: 0.3.
wanted=$(cat /tests/wanted)
found=$(head -c 100 /app/code 2> /dev/null)
case "$found" in
    "$wanted") reward=1 ;;
    "${wanted%?}"*) reward=0.3 ;;
    *) reward=0 ;;
esac
echo "wanted $wanted, found $found: reward $reward"
echo $reward > /logs/verifier/reward.txt
"""


def prepare(folder: Path) -> None:
    """Write ``model/`` and ``tasks/`` into the folder."""
    sys.path.insert(0, str(HERE.parent))
    from tiny_model import AGENT_TEMPLATE, save_tiny_model, tool_call

    calls = [tool_call("bash", command=command) for command in COMMANDS]
    save_tiny_model(folder / "model", SYMBOLS, AGENT_TEMPLATE, max_length=64, seed=WEIGHTS_SEED, whole_tokens=calls)
    for wanted in WANTED:
        write_task(folder / "tasks" / f"write-{wanted}", wanted)


def write_task(folder: Path, wanted: str) -> None:
    """Write one task: put the digits of the instruction into the file ``code``."""
    files = {
        "instruction.md": wanted,
        "task.toml": TASK,
        "tests/test.sh": TESTS,
        "tests/wanted": wanted,
        "solution/solve.sh": f"printf {wanted} > code\n",
        "environment/README": "A machine with nothing in it.\n",
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE, help="where model/ and tasks/ go (default: here)")
    prepare(parser.parse_args().folder)
