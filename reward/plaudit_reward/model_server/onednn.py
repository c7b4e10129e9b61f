"""Compute float32 linear layers on a CPU with oneDNN.

For float32 torch calls MKL, which leaves half of the vector units of AMD's CPUs idle: oneDNN is more than twice as fast
there. In shorter formats, and on GPUs, torch's own choice is good.
"""

from __future__ import annotations

import torch
from torch import Tensor


class OneDnnLinear(torch.nn.Linear):
    """Compute a linear layer; it differs from its base class in rounding only."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name in the base class)
        """Call the operation with which torch's compiler (Inductor) replaces linear layers."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
        return output


def use_onednn(model: torch.nn.Module) -> None:
    """Replace the layers of a model that compute in float32 on a CPU, if torch was built with oneDNN."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return
    for layer in model.modules():
        # Not subclasses: they compute something else.
        if type(layer) is torch.nn.Linear and (layer.weight.dtype, layer.weight.device.type) == (torch.float32, "cpu"):
            layer.__class__ = OneDnnLinear
