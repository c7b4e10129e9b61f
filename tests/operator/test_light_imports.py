"""The operator knows jobs and the names that processes share, and loads nothing that scores or trains."""

from __future__ import annotations

import json
import subprocess
import sys

_IMPORT_ALL = """
import importlib, json, pkgutil, sys
import plaudit_operator
for module in pkgutil.walk_packages(plaudit_operator.__path__, "plaudit_operator."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""
_NEVER = {
    "PIL",
    "jinja2",
    "math_verify",
    "numpy",
    "plaudit_metrics",
    "plaudit_reward",
    "pyarrow",
    "ray",
    "starlette",
    "sympy",
    "torch",
    "transformers",
    "uvicorn",
    "vllm",
}


def test_the_operator_loads_nothing_but_jobs_and_names() -> None:
    printed = subprocess.run([sys.executable, "-c", _IMPORT_ALL], capture_output=True, check=True).stdout
    loaded: list[str] = json.loads(printed)
    assert "plaudit_operator.operator" in loaded
    assert not _NEVER & {name.partition(".")[0] for name in loaded}
    of_workers = {name for name in loaded if name.startswith("plaudit_workers.")}
    assert {name for name in of_workers if not name.startswith("plaudit_job")} == set()
