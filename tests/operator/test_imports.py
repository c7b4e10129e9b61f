"""The operator loads jobs and the names that processes share, and runs on what its image holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

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


REQUIREMENTS = Path(__file__).parents[2] / "requirements"
IMPORTED = """\
import json, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))  # an import of any of these fails
import plaudit_operator.operator, plaudit_operator.status.progress, plaudit_operator.runtime.health
"""


def pins(name: str) -> set[str]:
    """Packages of an image, as they are imported where the name is the same."""
    text = (REQUIREMENTS / name).read_text()
    return {found.lower().replace("-", "_") for found in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}


def test_the_operator_imports_without_the_packages_of_the_other_images():
    missing = pins("workers.txt") - pins("operator.txt")
    assert {"redis", "numpy", "pyarrow"} <= missing
    argv = [sys.executable, "-c", IMPORTED, json.dumps(sorted(missing))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
