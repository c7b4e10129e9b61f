"""The operator imports nothing that its image has not: only what the parts beside it need is not there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
IMPORTED = """\
import plaudit_operator.operator, plaudit_operator.status.progress, plaudit_operator.runtime.health, sys
print(*{name.partition(".")[0] for name in sys.modules})
"""


def pins(name: str) -> set[str]:
    """Packages of an image, as they are imported where the name is the same."""
    text = (REQUIREMENTS / name).read_text()
    return {found.lower().replace("-", "_") for found in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}


def test_the_operator_imports_nothing_that_its_image_has_not():
    said = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True).stdout.split()
    absent = pins("workers.txt") - pins("operator.txt")
    assert {"redis", "numpy", "pyarrow"} <= absent
    assert "kubernetes" in said
    assert not absent & set(said)
