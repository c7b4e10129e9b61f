"""Write what the job needs: a random tiny model with its tokenizer, and three Harbor tasks.

The same files come out each time. ``--folder`` says where to; the job file expects them beside itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = "012"
COMMANDS = ["mkdir out", *(f"cp {name} out" for name in FILES)]
CALLS = [
    f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>" for command in COMMANDS
]
"""Each is one token of the tiny model's vocabulary: it can choose a command, but not misspell it."""
SYMBOLS = FILES + "="
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
"""Without the tool's description: the model learns by trying what its commands do."""
WEIGHTS_SEED = 2
TASK = """schema_version = "1.0"

[metadata]
category = "terminal"

[environment]
network_mode = "no-network"

[verifier]
timeout_sec = 20.0
"""
TESTS = """# The folder out holds the wanted file, unchanged, and nothing else: 1. Some file: 0.4. Nothing: 0.2.
wanted=$(cat /tests/wanted)
if [ "$(ls -A /app/out 2> /dev/null)" = "$wanted" ] && cmp -s "/app/out/$wanted" "/tests/content"; then
    reward=1
elif [ -n "$(ls -A /app/out/ 2> /dev/null)" ]; then
    reward=0.4
elif [ -d /app/out ]; then
    reward=0.2
else
    reward=0
fi
echo "wanted $wanted, reward $reward"
echo $reward > /logs/verifier/reward.txt
"""


def prepare(folder: Path) -> None:
    """Write ``model/`` and ``tasks/`` into the folder."""
    sys.path.insert(0, str(HERE.parent))
    from tiny_model import save_tiny_model

    save_tiny_model(folder / "model", SYMBOLS, TEMPLATE, max_length=64, seed=WEIGHTS_SEED, whole_tokens=CALLS)
    for name in FILES:
        write_task(folder / "tasks" / f"copy-{name}", name)


def write_task(folder: Path, wanted: str) -> None:
    """Write one task: copy the file that the instruction names into a new folder ``out``."""
    files = {
        "instruction.md": wanted,
        "task.toml": TASK,
        "tests/test.sh": TESTS,
        "tests/wanted": wanted,
        "tests/content": content(wanted),
        "solution/solve.sh": f"mkdir out\ncp {wanted} out\n",
        **{f"environment/{name}": content(name) for name in FILES},
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def content(name: str) -> str:
    """Return what a file of the machine holds."""
    return f"this is file {name}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE, help="where model/ and tasks/ go (default: here)")
    prepare(parser.parse_args().folder)
