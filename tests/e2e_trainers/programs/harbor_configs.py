"""Read each task.toml of a JSON file as Harbor does; print what it found, or why it refuses."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

from harbor.models.task.config import TaskConfig

warnings.simplefilter("ignore")  # about older fields
found = {}
for name, text in json.loads(Path(sys.argv[1]).read_text()).items():
    try:
        found[name] = TaskConfig.model_validate_toml(text).model_dump(mode="json")
    except ValueError as error:
        found[name] = {"refused": str(error)}
print(json.dumps(found))
