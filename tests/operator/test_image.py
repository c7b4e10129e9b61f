"""The operator runs on what its image holds: packages of other images are missing there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

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
