"""The colours of a step's parts keep apart, for colour-blind eyes too, and stand out from the page."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from plaudit_metrics.service.page import FOLDER

PARTS = ("trainer", "generation", "sample_queue", "limiter", "score", "group_scorer", "ready_queue", "pause")
SIGHT = {
    "all cones": np.eye(3),
    "no red cones": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green cones": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no blue cones": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
"""Of linear RGB: Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision
Deficiency" (2009), severity 1."""
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.95047, 1.0, 1.08883])


def linear(theme: int, name: str) -> np.ndarray:
    """A colour of style.css as linear RGB; theme 0 is light, 1 dark."""
    found = re.search(rf"--{name}: light-dark\((#\w{{6}}), (#\w{{6}})\)", (FOLDER / "style.css").read_text())
    assert found is not None, name
    value = np.array([int(found[theme + 1][at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(colour: np.ndarray) -> np.ndarray:
    """CIELAB, in which distances are differences that one sees (2 is just visible)."""
    x, y, z = np.cbrt(np.maximum(XYZ @ np.clip(colour, 0, 1) / WHITE, 0.0089))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_any_two_parts_differ_clearly(theme: int, sight: str) -> None:
    seen = {part: lab(np.asarray(SIGHT[sight]) @ linear(theme, part)) for part in PARTS}
    too_close = [
        pair for pair in itertools.combinations(PARTS, 2) if np.linalg.norm(seen[pair[0]] - seen[pair[1]]) < 15
    ]
    assert too_close == []


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_part_stands_out_from_the_page(theme: int) -> None:
    ground = float((XYZ @ linear(theme, "card"))[1])
    for part in PARTS:
        own = float((XYZ @ linear(theme, part))[1])
        assert (max(own, ground) + 0.05) / (min(own, ground) + 0.05) > 2
