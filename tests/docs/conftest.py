from __future__ import annotations

import sys
from pathlib import Path

# What the pages hold is read beside the tests; nothing under tests/ is a package.
sys.path.insert(0, str(Path(__file__).parent))
