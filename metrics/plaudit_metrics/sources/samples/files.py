"""Find the files of a run's stored samples: ``samples/step-000012-i1.parquet``, step 12 as incarnation 1 trained it."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

_NAME = re.compile(r"step-(\d+)-i(\d+)\.parquet")

FOLDER = "samples"
"""Folder of the files, in the run's folder."""


class UnreadableFileError(Exception):
    """A file is damaged or does not hold stored samples; the message names it."""


def samples_file(run_folder: Path, step: int, incarnation: int) -> Path:
    """Return the path of a step's file."""
    return run_folder / FOLDER / f"step-{step:06d}-i{incarnation}.parquet"


def surviving_files(folder: Path) -> dict[int, Path]:
    """Return the file of each step in a run's samples folder, by step in rising order; empty without files.

    A trainer that resumed from step 10 trains step 11 again: its file of step 11 replaces all older files from step 11
    on, since those steps were rolled back.
    """
    found = [
        (int(name[2]), int(name[1]), path) for path in folder.glob("step-*") if (name := _NAME.fullmatch(path.name))
    ]
    surviving: dict[int, Path] = {}
    for _, of_incarnation in itertools.groupby(sorted(found, reverse=True), lambda each: each[0]):
        began = min(surviving, default=math.inf)
        surviving |= {step: path for _, step, path in of_incarnation if step < began}
    return dict(sorted(surviving.items()))
