"""Writes ``verl_0.9.1.jsonl``: what verl's ``prime_code`` gives to the programs below.

    pip download verl==0.9.1 --no-deps -d /tmp/verl
    unzip -d /tmp/verl /tmp/verl/verl-*.whl "verl/utils/reward_score/*"
    python tests/reward/code/make_verl_table.py /tmp/verl/verl/utils/reward_score

verl is no dependency; of its package only that folder is read. Each program runs unprotected, as verl runs it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("verl_0.9.1.jsonl")
SUMS = {"inputs": ["1 2\n", "5 7\n", "10 -3\n"], "outputs": ["3\n", "12\n", "7\n"]}
READS = "a, b = map(int, input().split())\n"

PROGRAMS = [
    READS + "print(a + b)",
    READS + "print(a - b)",
    READS + "print(a + b if a < 9 else 0)",
    READS + "print(a + b)\nexit()",
    "import sys\n" + READS + "print(a + b)\nsys.exit()",
    "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
    "import sys\nprint(sum(map(int, sys.stdin.readline().split())))",
    "import sys\nprint(sum(map(int, sys.stdin.readlines()[0].split())))",
    "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    "import sys\ninput = sys.stdin.readline\n" + READS + "print(a + b)",
    "from sys import stdin, stdout\nstdout.write(str(sum(map(int, stdin.readline().split()))))",
    "from sys import stdin\nprint(sum(map(int, stdin.readline().split())))",
    "from sys import (stdin,\n stdout)\nprint(3)",
    "print(sum(map(int, stdin.readline().split())))",
    "print(sum(map(int, open(0).read().split())))",
    "for line in sys.stdin:\n    print(sum(map(int, line.split())))",
    "def main():\n    a, b = map(int, input().split())\n    print(a + b)\nif __name__ == '__main__':\n    main()",
    "if __name__ == '__main__':\n    a, b = map(int, input().split())\n    print(a + b)\nprint()",
    "from math import *\n" + READS + "print(a + b)",
    "import subprocess\n" + READS + "print(a + b)",
    "x = 0\ndef f():\n    global x\n    x += 1\nf()\n" + READS + "print(a + b)",
    READS + "d = defaultdict(int)\nd[0] = a + b\nprint(d[0])",
    "import threading\ndef main():\n  a, b = map(int, input().split())\n  print(a + b)\n"
    "t = threading.Thread(target=main)\nt.start()\nt.join()",
    "import os\nos._exit(0)",
    "raise SystemExit",
    "print(3)\nraise SystemExit(1)",
    "1 / 0",
    "a b c",
    "",
]
"""On ``SUMS``, each with and without a fence."""

EXPECTED = ["1.0\n2.0", "a b c", "a  b\n\nc", "1", "yes\nno", "0.333333", "1 2\n3 4", "  lead\ntrail  ", "1\n2\n3"]
PRINTS = [
    r"'1.00000001\n2'",
    "'c b a'",
    r"'a b\n c'",
    "'1.0'",
    "'yes no'",
    "1 / 3",
    r"'2 1\n4 3'",
    r"'lead\ntrail'",
    r"'1\n2\n3\n\n'",
    "'01'",
    "'a a b c'",
    "'nan'",
    r"'yes\n\nno'",
    r"'YES\nno'",
    r"'1e0\n2e0'",
]
"""What is printed on every one of ``EXPECTED``."""

FUNCTIONS = [
    "def f(a, b): return sum(a) + b",
    "class Solution:\n    def f(self, a: List[int], b): return sum(a) + b",
    "def f(a, b): return float(sum(a) + b)",
    "def f(a, b): return str(sum(a) + b)",
    "def f(a, b): return (sum(a) + b,)",
    "def f(a, b): return [sum(a) + b]",
    "def f(a, b): return {sum(a) + b}",
    "def f(a, b):\n  print('x')\n  return sum(a) + b",
    "def f(a, b): return 9",
    "def f(a): return 1",
    "def g(a): return 1",
    "def f(a, b): import sys; sys.exit()",
    "class Solution:\n    pass",
]
"""On two cases."""

RETURNS = [
    ("[(1, 2), (3, 4)]", "1", "[[1, 2], [3, 4]]"),
    ("[(1, 2), (3, 4)]", "1", "[[[1, 2], [3, 4]]]"),
    ("(1, 2)", "1", "[1, 2]"),
    ("[1, 2]", "1", "[[1, 2]]"),
    ("{1: 2}", "1", '{"1": 2}'),
    ("{'1': 2}", "1", '{"1": 2}'),
    ("{1: 2}", "1", '[{"1": 2}]'),
    ("[{1: 2}]", "1", '[{"1": 2}]'),
    ("x[1]", '{"1": 5}', "5"),
    ("None", "1", "null"),
    ("x", '"aé"', '"aé"'),
    ("Counter(x)", "[1, 1]", '{"1": 2}'),
    ("1", "1", "true"),
    ("deque(x)", "[1]", "[1]"),
]
"""What a function returns, its argument, what it should return."""

OTHERS = [
    ("print(input())", {"inputs": ["é ü"], "outputs": ["é ü"]}),
    (r"print('\x0c1')", {"inputs": [""], "outputs": ["1"]}),
    (r"print('a\x0bb')", {"inputs": [""], "outputs": ["a\nb"]}),
    ("s = '''\nhi\n'''\nprint(s.count('\\t'))", {"inputs": [""], "outputs": ["0"]}),
    ("s = '''\nhi\n'''\nprint(s.count('\\t'))", {"inputs": [""], "outputs": ["2"]}),
    *(
        (
            f"n = int(input())\nprint(n if {right} else -1)",
            {"inputs": list(map(str, range(14))), "outputs": list(map(str, range(14)))},
        )
        for right in ("True", "n < 12", "n < 9", "n % 2")
    ),
]


def rows() -> Iterator[dict[str, Any]]:
    """Responses and their ground truths."""
    for program in PROGRAMS:
        yield {"response": f"Let us see.\n```python\n{program}\n```\n", "ground_truth": SUMS}
        yield {"response": program, "ground_truth": SUMS}
    tests: list[tuple[str, Any]] = [(f"print({text})", {"inputs": ["x"] * 9, "outputs": EXPECTED}) for text in PRINTS]
    cases = {"fn_name": "f", "inputs": ["[1, 2]\n3", "[4]\n5"], "outputs": ["6", "9"]}
    tests += [(function, cases) for function in FUNCTIONS]
    tests += [
        (f"def f(x): return {returned}", {"fn_name": "f", "inputs": [given], "outputs": [wanted]})
        for returned, given, wanted in RETURNS
    ]
    for program, ground_truth in tests + OTHERS:
        yield {"response": f"```python\n{program}\n```", "ground_truth": ground_truth}


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    prime_code = importlib.import_module("prime_code")
    with TABLE.open("w") as table:
        for row in rows():
            quiet = io.StringIO()
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                given = json.loads(json.dumps(row["ground_truth"]))  # verl changes it
                value, _ = prime_code.compute_score(row["response"], given, continuous=True)
            table.write(json.dumps({**row, "value": float(value)}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
