"""Grade labelled mathematical answers with a trainer's own functions; the argument is a JSON lines file.

Prints one JSON line: the values by the name of the function; null where it gives none, nothing for functions whose
packages the environment lacks.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

Grader = Callable[[str, str], Any]


def trl_accuracy() -> Grader:
    """Return TRL's reward for one completion."""
    importlib.import_module("math_verify")
    rewards = importlib.import_module("trl.rewards")
    return lambda response, truth: rewards.accuracy_reward([[{"content": response}]], [truth])[0]


def verl_function(name: str) -> Grader:
    """Return one of verl's functions."""
    module = importlib.import_module(f"verl.utils.reward_score.{name}")

    def grade(response: str, truth: str) -> Any:
        value = module.compute_score(response, truth)
        return value[0] if isinstance(value, tuple) else value

    return grade


GRADERS: dict[str, Callable[[], Grader]] = {
    "trl accuracy_reward": trl_accuracy,
    "verl math_verify": lambda: verl_function("math_verify"),
    "verl prime_math": lambda: verl_function("prime_math"),
}


def main() -> None:
    """Grade every case with every function that there is."""
    with open(sys.argv[1]) as file:
        cases = [json.loads(line) for line in file]
    values: dict[str, list[float | None]] = {}
    for name, load in GRADERS.items():
        try:
            grade = load()
        except ImportError:
            continue
        values[name] = [_value(grade, case) for case in cases]
    print(json.dumps(values), flush=True)


def _value(grade: Grader, case: dict[str, Any]) -> float | None:
    try:
        value = grade(case["response"], case["ground_truth"])
    except Exception:  # the trainers' functions may raise anything
        return None
    return None if value is None else float(value)


if __name__ == "__main__":
    main()
