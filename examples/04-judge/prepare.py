"""Writes what the job needs: the model and the data of 01-copy-digits. ``--folder`` says where to (default: here)."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

HERE = Path(__file__).parent

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE, help="where model/ and data/ go (default: here)")
    folder = parser.parse_args().folder
    runpy.run_path(str(HERE.parent / "01-copy-digits" / "prepare.py"))["prepare"](folder)
