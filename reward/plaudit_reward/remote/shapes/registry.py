"""Map the name of a shape to the shape."""

from __future__ import annotations

from typing import Literal

from plaudit_reward.remote.shapes.nemo_gym import NEMO_GYM
from plaudit_reward.remote.shapes.openrlhf import OPENRLHF
from plaudit_reward.remote.shapes.plaudit import PLAUDIT
from plaudit_reward.remote.shapes.sandbox_fusion import SANDBOX_FUSION
from plaudit_reward.remote.shapes.shape import EndpointShape
from plaudit_reward.remote.shapes.slime import SLIME

ShapeName = Literal["plaudit", "slime", "openrlhf", "nemo-gym", "sandbox-fusion"]

SHAPES: dict[ShapeName, EndpointShape] = {
    "plaudit": PLAUDIT,
    "slime": SLIME,
    "openrlhf": OPENRLHF,
    "nemo-gym": NEMO_GYM,
    "sandbox-fusion": SANDBOX_FUSION,
}
